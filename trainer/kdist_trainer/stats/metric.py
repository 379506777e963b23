"""What a metric is: its name, type, unit, labels and help, said once where its number is kept."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """How a metric behaves over time."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Scope(StrEnum):
    """Whose number a metric shows, and how an agent makes it of its ranks' records."""

    RANK = "rank"
    """One series for each local rank, labelled `rank`."""
    NODE = "node"
    """Counters and histograms are the sum over the local ranks, gauges their largest."""
    WITNESS = "witness"
    """The first local rank speaks for the node."""
    LEADER = "leader"
    """Rank 0 speaks for the job; only the agent that has it shows the metric."""
    AGENT = "agent"
    """The agent itself knows it; it is in no record."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric family: what it is called, what it means and which series it has."""

    name: str
    kind: Kind
    help: str
    scope: Scope = Scope.AGENT
    unit: str = ""
    labels: tuple[str, ...] = ()
    """Labels besides `kdist_job`, and besides `rank` where the scope is RANK."""
    series: tuple[tuple[str, ...], ...] = ((),)
    """Values of `labels`, one tuple per series; empty where an agent's metric finds them as it goes."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, the infinite one left out."""
    quiet: bool = False
    """A series at zero is not shown."""

    @property
    def slots(self) -> int:
        """Numbers that the metric takes in a record: each bucket's own count, the infinite one's, then the sum."""
        return len(self.series) * (len(self.buckets) + 2 if self.kind is Kind.HISTOGRAM else 1)


def counter(name: str, help: str, *, scope: Scope, **metric: Any) -> Any:  # noqa: A002
    """A field of `StepStats` that only grows: a float, or a list of floats where there are several series."""
    return _field(Metric(name=name, kind=Kind.COUNTER, help=help, scope=scope, **metric))


def gauge(name: str, help: str, *, scope: Scope, **metric: Any) -> Any:  # noqa: A002
    """A field of `StepStats` that shows a state: a float, `None` while unknown."""
    declared = Metric(name=name, kind=Kind.GAUGE, help=help, scope=scope, **metric)
    return dataclasses.field(default=None, metadata={"metric": declared})


def histogram(name: str, help: str, *, scope: Scope, buckets: tuple[float, ...], **metric: Any) -> Any:  # noqa: A002
    """A field of `StepStats` that counts observations in buckets: a list of floats, see `Metric.slots`."""
    return _field(Metric(name=name, kind=Kind.HISTOGRAM, help=help, scope=scope, buckets=buckets, **metric))


def _field(metric: Metric) -> Any:
    if metric.slots == 1:
        return dataclasses.field(default=0.0, metadata={"metric": metric})
    return dataclasses.field(default_factory=lambda: [0.0] * metric.slots, metadata={"metric": metric})
