"""How a metric is declared: its name, which ends with its unit, type, labels and help.
`rank_metrics` and `agent_metrics` are made of it.
"""

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
    """Where a metric's value comes from, and how an agent aggregates the records of its ranks."""

    RANK = "rank"
    """One series per local rank, with the label `rank`."""
    NODE = "node"
    """Counters and histograms are summed over the local ranks; of gauges the maximum is shown."""
    LOCAL_RANK_ZERO = "local rank 0"
    """The value of the node's first rank."""
    RANK_ZERO = "rank 0"
    """The value of global rank 0; only the agent that runs it shows the metric."""
    AGENT = "agent"
    """A value of the agent itself; no record carries it."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric family: its name, its meaning and its series."""

    name: str
    kind: Kind
    help: str
    scope: Scope = Scope.AGENT
    labels: tuple[str, ...] = ()
    """Labels in addition to `kdist_job`, and to `rank` if the scope is RANK."""
    series: tuple[tuple[str, ...], ...] = ((),)
    """Values of `labels`, one tuple per series; empty if they are only known at run time (metrics
    of the agent).
    """
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without +Inf."""
    hide_zero: bool = False
    """Whether a series is omitted while it is zero."""

    @property
    def unit(self) -> str:
        """The unit that the name ends with."""
        name = self.name.removesuffix("_total")
        units = ("bytes_per_second", "seconds", "bytes")
        return next((unit for unit in units if name.endswith(f"_{unit}")), "")

    @property
    def slots(self) -> int:
        """Number of values that the metric takes in a record. A histogram's series has the count of
        each bucket (not cumulative), that of +Inf, and the sum.
        """
        return len(self.series) * (len(self.buckets) + 2 if self.kind is Kind.HISTOGRAM else 1)


def counter(name: str, help: str, *, scope: Scope, **metric: Any) -> Any:  # noqa: A002
    """Declare a counter field of `StepStats`: a float, or a list of floats if it has several
    series.
    """
    return _field(Metric(name=name, kind=Kind.COUNTER, help=help, scope=scope, **metric))


def gauge(name: str, help: str, *, scope: Scope, **metric: Any) -> Any:  # noqa: A002
    """Declare a gauge field of `StepStats`: a float, `None` while unknown."""
    declared = Metric(name=name, kind=Kind.GAUGE, help=help, scope=scope, **metric)
    return dataclasses.field(default=None, metadata={"metric": declared})


def histogram(
    name: str,
    help: str,  # noqa: A002
    *,
    scope: Scope,
    buckets: tuple[float, ...],
    **metric: Any,
) -> Any:
    """Declare a histogram field of `StepStats`: a list of floats, see `Metric.slots`."""
    return _field(
        Metric(name=name, kind=Kind.HISTOGRAM, help=help, scope=scope, buckets=buckets, **metric)
    )


def _field(metric: Metric) -> Any:
    if metric.slots == 1:
        return dataclasses.field(default=0.0, metadata={"metric": metric})
    return dataclasses.field(
        default_factory=lambda: [0.0] * metric.slots, metadata={"metric": metric}
    )
