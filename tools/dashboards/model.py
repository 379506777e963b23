"""The model of a dashboard, independent of its renderer: rows of panels with queries, units,
thresholds and variables, and the colors of series. Plain data.

A query writes its metrics' label selectors as `{}`, with more labels in between where it needs
them; the matchers of the dashboard's variables are inserted there, so that no selector can lack
them. A series has the same color in Grafana and on an HTML page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kdist.agents.metrics import BUSY_PHASES
from kdist.report.page import DARK_RED, GREYS, SERIES, Color

NAMED: dict[str, Color] = {
    # phases of a step
    "forward": SERIES[0],
    "backward": SERIES[4],
    "optimizer": SERIES[2],
    "comm_exposed": SERIES[1],
    "data_wait": SERIES[3],
    "other": GREYS[1],
    # categories of wall time
    "productive_step": SERIES[2],
    "checkpoint_save": SERIES[4],
    "checkpoint_restore": SERIES[5],
    "evaluation": SERIES[0],
    "rendezvous": SERIES[1],
    "restart": SERIES[7],
    "stalled": DARK_RED,
    "startup": GREYS[0],
    "init": GREYS[1],
    "idle": GREYS[2],
    "unobserved": SERIES[6],
    # lines that stand for a limit or a target
    "target": GREYS[0],
    "at most": GREYS[0],
    "interval": GREYS[0],
}


def color_of(name: str, index: int) -> Color:
    """The color of the series `name`, the `index`-th of its panel."""
    return NAMED.get(name, SERIES[index % len(SERIES)])


RATE = "$__rate_interval"
"""Window of every `rate`: Grafana chooses it to hold at least four scrapes."""

_SELECTOR = re.compile(r"(?P<metric>[a-zA-Z_:][\w:]*)\{(?P<labels>[^}]*)\}")


class Kind(StrEnum):
    """How a panel shows its values; Grafana's names."""

    STAT = "stat"
    LINES = "timeseries"
    BARS = "bargauge"
    TABLE = "table"


@dataclass(frozen=True)
class Threshold:
    """From `value` on (None: from the lowest), a number is shown in `color`, a key of
    `kdist.report.page.STATUS`.
    """

    value: float | None
    color: str


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel. `queries` are PromQL by legend; in a legend, `{{label}}` stands for the value of
    that label.
    """

    title: str
    description: str
    kind: Kind
    queries: Mapping[str, str]
    unit: str
    """Grafana's identifier of the unit."""
    width: int = 8
    """Columns of 24."""
    height: int = 7
    stacked: bool = False
    logarithmic: bool = False
    minimum: float | None = None
    maximum: float | None = None
    decimals: int | None = None
    thresholds: tuple[Threshold, ...] = ()
    spans_gaps: bool = False
    """Points are connected over gaps: what happens rarely has few values."""
    shows_name: bool = False
    """A stat that shows its legend, not its value."""
    optional: bool = False
    """Its metrics may be absent: those of cAdvisor and DCGM, and those of machines with GPUs."""
    units: Mapping[str, str] | None = None
    """Units of a table's columns by legend, where they differ from `unit`."""
    column_thresholds: Mapping[str, tuple[Threshold, ...]] | None = None
    """Thresholds of a table's columns by legend, where they have some."""
    text_label: str = ""
    """A label whose value a table shows in the column of that name, in place of a number."""

    @property
    def instant(self) -> bool:
        """Whether it shows the newest values only."""
        return self.kind in (Kind.BARS, Kind.TABLE) or self.shows_name


@dataclass(frozen=True)
class PanelRow:
    """A titled group of panels, at first closed if `collapsed`."""

    title: str
    panels: tuple[Panel, ...]
    collapsed: bool = False


@dataclass(frozen=True)
class Variable:
    """A menu of the dashboard: all values of the label `name` on `metric`; `label` is its title."""

    name: str
    label: str
    metric: str
    multi: bool = True
    all_value: str = ".+"


@dataclass(frozen=True)
class Annotation:
    """An event that is drawn across all panels when `query` has a value above zero."""

    title: str
    query: str
    color: str


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """A page of rows. `uid` is part of the address that alerts link to."""

    uid: str
    title: str
    description: str
    rows: tuple[PanelRow, ...]
    variables: tuple[Variable, ...]
    annotations: tuple[Annotation, ...] = ()
    hours: int = 1
    """The time range at first."""
    refresh: str = "30s"

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels, in reading order."""
        return tuple(panel for row in self.rows for panel in row.panels)

    def query(self, text: str) -> str:
        """A panel's query with the variables' matchers in each selector: those whose labels the
        metric has.
        """

        def with_variables(found: re.Match[str]) -> str:
            usable = _variables_of(found["metric"])
            names = [each.name for each in self.variables if each.name in usable]
            matchers = [f'{name}=~"${name}"' for name in names]
            matchers += filter(None, [found["labels"].strip()])
            return f"{found['metric']}{{{', '.join(matchers)}}}"

        return _SELECTOR.sub(with_variables, text)


def _variables_of(metric: str) -> tuple[str, ...]:
    """The variables whose labels a metric has: Prometheus' own metrics lack the training, those of
    cAdvisor also our scrape, and the controller's name it otherwise. The namespace of DCGM's may be
    that of its exporter.
    """
    if metric.startswith("kdist_controller_"):
        return ()
    if metric.startswith("kdist_"):
        return ("namespace", "kdist_job", "job", "instance")
    if metric.startswith("DCGM_"):
        return ()
    return (
        ("namespace", "job", "instance")
        if metric in {"up", "scrape_samples_scraped"}
        else ("namespace",)
    )


def stat(
    title: str,
    description: str,
    query: str,
    unit: str,
    *,
    width: int = 3,
    height: int = 4,
    **panel: Any,
) -> Panel:
    """The newest value in large type, its trend behind it."""
    return Panel(
        title=title,
        description=description,
        kind=Kind.STAT,
        queries={title: query},
        unit=unit,
        width=width,
        height=height,
        **panel,
    )


def lines(
    title: str, description: str, unit: str, queries: Mapping[str, str], **panel: Any
) -> Panel:
    """Values over time."""
    return Panel(
        title=title, description=description, kind=Kind.LINES, queries=queries, unit=unit, **panel
    )


def stack(
    title: str, description: str, unit: str, queries: Mapping[str, str], **panel: Any
) -> Panel:
    """Parts of a whole over time, stacked."""
    return lines(title, description, unit, queries, stacked=True, minimum=0.0, **panel)


def bars(
    title: str, description: str, unit: str, queries: Mapping[str, str], **panel: Any
) -> Panel:
    """The newest values as bars."""
    return Panel(
        title=title,
        description=description,
        kind=Kind.BARS,
        queries=queries,
        unit=unit,
        minimum=0.0,
        **panel,
    )


BUSY = f'kdist_step_phase_seconds_total{{phase=~"{"|".join(BUSY_PHASES)}"}}'
"""Seconds of a step in which a rank waits for no other one."""
RESTARTS = (
    "max by (namespace, kdist_job) (sum by (namespace, kdist_job, instance) "
    "(kdist_worker_group_restarts_total{})) or 0 * max by (namespace, kdist_job) "
    "(kdist_generation{})"
)
"""Restarts of each job since its agents started, each of which counts all of them."""
STALLED_SECONDS = (60, 120)
"""Without a step, after which a training is marked; the larger number is that of the alert."""
SILENT_SECONDS = (30, 60)
"""Without a record of a rank, after which it is marked; the larger number is that of the alert."""
GOODPUT = (0.5, 0.8)
"""Shares of productive time below which a training is marked; the alert's is the larger one."""
RESTARTED = (1, 4)
"""Restarts from which on a training is marked; the alert fires from the larger number on."""
RESTARTS_LEFT = (2, 4)
"""Restarts of the budget below which a training is marked; the alert fires below the smaller."""


def at_most(warning: float, bad: float) -> tuple[Threshold, ...]:
    """Good below `warning`, bad from `bad` on."""
    return (Threshold(None, "good"), Threshold(warning, "warning"), Threshold(bad, "bad"))


def at_least(warning: float, good: float) -> tuple[Threshold, ...]:
    """Bad below `warning`, good from `good` on."""
    return (Threshold(None, "bad"), Threshold(warning, "warning"), Threshold(good, "good"))
