"""From a snapshot of all numbers to the text that Prometheus reads. Pure: what is shown follows from the declarations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from kdist_trainer.exporter.totals import ACCEPTED, Snapshot, add
from kdist_trainer.stats import AGENT_METRICS, COUNTER_SLOTS, GAUGES, RECORDED, SLOTS, STATES, Kind, Metric, Scope, Wall, agent

Labels = tuple[str, ...]
Series = dict[Labels, list[float]]
"""Label values (those of `Metric.labels`, after `rank` where the scope is RANK) to one number, or a histogram's slots."""

JOB_LABEL = "kdist_job"
CATALOGUE: tuple[Metric, ...] = (*AGENT_METRICS, *RECORDED)
"""Every metric there is, in the order of the exposition."""


class Exposition(Collector):
    """A registry's collector that shows whatever `read` returns at each scrape: all series by the metric's name."""

    def __init__(self, job: str, read: Callable[[], Mapping[str, Series]]) -> None:
        self._job = job
        self._read = read
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def describe(self) -> Iterator[Family]:
        """Nothing: no other collector shares the registry, so there is no name to guard."""
        return iter(())

    def collect(self) -> Iterator[Family]:
        """The families that have a series, in the order of `CATALOGUE`."""
        numbers = self._read()
        for metric in CATALOGUE:
            if series := numbers.get(metric.name):
                yield _family(metric, series, self._job)


def label_names(metric: Metric) -> Labels:
    """Labels of a metric's series, `kdist_job` first."""
    return (JOB_LABEL, *(("rank",) if metric.scope is Scope.RANK else ()), *metric.labels)


def reported_series(snapshot: Snapshot, wall: Mapping[str, float]) -> dict[str, Series]:
    """The series of all recorded metrics by name; `wall` is the shown partition of wall time."""
    node = [0.0] * COUNTER_SLOTS
    for counters in snapshot.sums:
        node = add(node, counters)
    found: dict[str, Series] = {}
    for metric in RECORDED:
        if metric.scope is Scope.WITNESS:
            found[metric.name] = {
                (category,): [seconds] for category, seconds in wall.items() if seconds or category != Wall.UNOBSERVED
            }
        elif metric.kind is Kind.GAUGE and metric.scope is Scope.RANK:
            known = {rank: record.gauges[GAUGES[metric.name]] for rank, record in sorted(snapshot.current.items())}
            found[metric.name] = {(str(rank),): [value] for rank, value in known.items() if value is not None}
        elif metric.kind is Kind.GAUGE:
            value = snapshot.gauges[GAUGES[metric.name]]
            found[metric.name] = {} if value is None else {(): [value]}
        elif metric.scope is Scope.RANK:
            found[metric.name] = {
                (str(rank), *labels): slots
                for rank, counters in snapshot.by_rank.items()
                for labels, slots in _split(metric, counters).items()
            }
        else:
            leads = metric.scope is not Scope.LEADER or 0 in snapshot.local_ranks or any(snapshot.leader[SLOTS[metric.name]])
            found[metric.name] = _split(metric, node if metric.scope is Scope.NODE else snapshot.leader) if leads else {}
    return found


def own_series(snapshot: Snapshot, state: str, scrape_seconds: float) -> dict[str, Series]:
    """What an agent shows of itself besides what it was told: its state, who reports to it, how long a scrape takes."""
    return {
        agent.SCRAPE_DURATION.name: {(): [scrape_seconds]},
        agent.JOB_STATE.name: {(word,): [float(word == state)] for word in STATES},
        agent.HEARTBEAT.name: {(str(rank),): [heard] for rank, heard in snapshot.heard.items()},
        agent.RECORDS.name: {(word,): [float(count)] for word, count in snapshot.received.items() if count or word == ACCEPTED},
    }


_COUNTED = frozenset(
    metric.name for metric in (*RECORDED, agent.LOST_STEPS, agent.LOST_PROGRESS) if metric.kind is not Kind.GAUGE
)


def known_series(series: Mapping[str, Series]) -> dict[str, Series]:
    """Of a script's series those that something was told of.

    Where it reports no steps and no saves, nobody knows that there were none.
    """
    has_loss = bool(series.get("kdist_loss"))
    return {
        name: found
        for name, found in series.items()
        if name not in _COUNTED or any(map(any, found.values())) or (name == "kdist_nonfinite_total" and has_loss)
    }


def _split(metric: Metric, counters: list[float]) -> Series:
    start = SLOTS[metric.name].start
    size = metric.slots // len(metric.series)
    parts = {labels: counters[start + i * size : start + (i + 1) * size] for i, labels in enumerate(metric.series)}
    return {labels: slots for labels, slots in parts.items() if any(slots)} if metric.quiet else parts


def _family(metric: Metric, series: Series, job: str) -> Family:
    names = label_names(metric)
    if metric.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=names, unit=metric.unit)
        for labels, slots in series.items():
            counts, cumulative = [], 0.0
            for bound, count in zip((*metric.buckets, math.inf), slots, strict=False):
                cumulative += count
                counts.append(("+Inf" if bound == math.inf else str(bound), cumulative))
            histogram.add_metric((job, *labels), counts, slots[-1])
        return histogram
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily = kind(metric.name, metric.help, labels=names, unit=metric.unit)
    for labels, slots in series.items():
        family.add_metric((job, *labels), slots[0])
    return family
