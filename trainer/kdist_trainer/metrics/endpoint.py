"""The Prometheus endpoint: renders a snapshot of all metrics as text, which follows from the
declarations alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from kdist_trainer.metrics import declarations
from kdist_trainer.metrics.aggregation import ACCEPTED, MetricsSnapshot, add
from kdist_trainer.metrics.declarations import (
    AGENT_METRICS,
    REASONS,
    STANDBY,
    STATES,
    Kind,
    Metric,
    Scope,
)
from kdist_trainer.metrics.step_stats import WallCategory
from kdist_trainer.metrics.wire import COUNTER_SLOTS, GAUGES, RECORDED, SLOTS

Labels = tuple[str, ...]
Series = dict[Labels, list[float]]
"""One number, or a histogram's slots, by label values: those of `Metric.labels`, preceded by `rank`
if the scope is RANK.
"""

JOB_LABEL = "kdist_job"
CATALOGUE: tuple[Metric, ...] = (*AGENT_METRICS, *RECORDED)
"""Every metric, in the order of the exposition."""


class Exposition(Collector):
    """A collector of the values that `read` returns at each scrape: all series by the metric's
    name.
    """

    def __init__(self, job: str, read: Callable[[], Mapping[str, Series]]) -> None:
        self._job = job
        self._read = read
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def describe(self) -> Iterator[Family]:
        """Empty: the registry has no other collector, so names cannot collide."""
        return iter(())

    def collect(self) -> Iterator[Family]:
        """Yield the families that have a series, in the order of `CATALOGUE`."""
        values = self._read()
        for metric in CATALOGUE:
            if series := values.get(metric.name):
                yield _family(metric, series, self._job)


def label_names(metric: Metric) -> Labels:
    """The label names of a metric's series, `kdist_job` first."""
    return (JOB_LABEL, *(("rank",) if metric.scope is Scope.RANK else ()), *metric.labels)


def reported_series(snapshot: MetricsSnapshot, wall: Mapping[str, float]) -> dict[str, Series]:
    """The series of all metrics that ranks report, by name.

    Args:
        snapshot: The reported values.
        wall: Wall time in seconds by category.
    """
    node = [0.0] * COUNTER_SLOTS
    for counters in snapshot.in_order:
        node = add(node, counters)
    found: dict[str, Series] = {}
    for metric in RECORDED:
        if metric.scope is Scope.LOCAL_RANK_ZERO:
            found[metric.name] = {
                (category,): [seconds]
                for category, seconds in wall.items()
                if seconds or category != WallCategory.UNOBSERVED
            }
        elif metric.kind is Kind.GAUGE and metric.scope is Scope.RANK:
            known = {
                rank: record.gauges[GAUGES[metric.name]]
                for rank, record in sorted(snapshot.current.items())
            }
            found[metric.name] = {
                (str(rank),): [value] for rank, value in known.items() if value is not None
            }
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
            is_shown = (
                metric.scope is not Scope.RANK_ZERO
                or 0 in snapshot.local_ranks
                or any(snapshot.rank_zero[SLOTS[metric.name]])
            )
            found[metric.name] = (
                _split(metric, node if metric.scope is Scope.NODE else snapshot.rank_zero)
                if is_shown
                else {}
            )
    return found


def exporter_series(
    snapshot: MetricsSnapshot,
    state: str,
    scrape_seconds: float,
    refused: Mapping[str, Mapping[str, int]],
) -> dict[str, Series]:
    """The series of the exporter itself, by the metric's name.

    Args:
        snapshot: The reported values.
        state: The agent's state, one of `STATES` or `STANDBY`.
        scrape_seconds: Duration of the last scrape.
        refused: The connections that the agent's servers have closed, by reason, by server.
    """
    shown = "pending" if state == STANDBY else state
    return {
        declarations.SCRAPE_DURATION.name: {(): [scrape_seconds]},
        declarations.JOB_STATE.name: {(each,): [float(each == shown)] for each in STATES},
        declarations.HEARTBEAT.name: {
            (str(rank),): [time] for rank, time in snapshot.received_at.items()
        },
        declarations.RECORDS.name: {
            (outcome,): [float(count)]
            for outcome, count in snapshot.received.items()
            if count or outcome == ACCEPTED
        },
        declarations.CONNECTIONS_REFUSED.name: {
            (server, reason): [float(reasons.get(reason, 0))]
            for server, reasons in refused.items()
            for reason in REASONS
        },
    }


_CUMULATIVE = frozenset(
    metric.name
    for metric in (*RECORDED, declarations.LOST_STEPS, declarations.LOST_PROGRESS)
    if metric.kind is not Kind.GAUGE
)


def drop_unreported(series: Mapping[str, Series]) -> dict[str, Series]:
    """Drop a script's metrics that are all zero: a script that reports no steps may still have
    done some.
    """
    has_loss = bool(series.get("kdist_loss"))
    return {
        name: found
        for name, found in series.items()
        if name not in _CUMULATIVE
        or any(map(any, found.values()))
        or (name == "kdist_nonfinite_total" and has_loss)
    }


def _split(metric: Metric, counters: list[float]) -> Series:
    start = SLOTS[metric.name].start
    size = metric.slots // len(metric.series)
    parts = {
        labels: counters[start + i * size : start + (i + 1) * size]
        for i, labels in enumerate(metric.series)
    }
    return (
        {labels: slots for labels, slots in parts.items() if any(slots)}
        if metric.hide_zero
        else parts
    )


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
    family: CounterMetricFamily | GaugeMetricFamily = kind(
        metric.name, metric.help, labels=names, unit=metric.unit
    )
    for labels, slots in series.items():
        family.add_metric((job, *labels), slots[0])
    return family
