"""The model of a dashboard, independent of its renderer: rows of panels with queries, units,
thresholds and variables, and the colours of series. Plain data.

A query writes its metrics' label selectors as `{}`, with more labels in between where it needs
them; the matchers of the dashboard's variables are inserted there, so that no selector can lack
them. Every colour is a pair, for light and dark backgrounds, and a series has the same colour in
Grafana and on the HTML page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Color = tuple[str, str]

SERIES: tuple[Color, ...] = (
    ("#2a78d6", "#3987e5"),
    ("#eb6834", "#d95926"),
    ("#1baf7a", "#199e70"),
    ("#eda100", "#c98500"),
    ("#4a3aa7", "#9085e9"),
    ("#e87ba4", "#d55181"),
    ("#008300", "#4caf50"),
    ("#e34948", "#e66767"),
)
"""For things without a colour of their own, in this order."""

STATUS: dict[str, Color] = {
    "good": ("#0a8f4d", "#1fb873"),
    "warning": ("#b97900", "#e0a020"),
    "bad": ("#d03b3b", "#ec6a6a"),
    "neutral": ("#52514e", "#c3c2b7"),
}

_GREY: tuple[Color, ...] = (("#a8a69e", "#6f6e69"), ("#c9c7bf", "#55544f"), ("#dedcd3", "#43423e"))

NAMED: dict[str, Color] = {
    # phases of a step
    "forward": SERIES[0],
    "backward": SERIES[4],
    "optimizer": SERIES[2],
    "comm_exposed": SERIES[1],
    "data_wait": SERIES[3],
    "other": _GREY[1],
    # categories of wall time
    "productive_step": SERIES[2],
    "checkpoint_save": SERIES[4],
    "checkpoint_restore": SERIES[5],
    "evaluation": SERIES[0],
    "rendezvous": SERIES[1],
    "restart": SERIES[7],
    "stalled": ("#8f1d1d", "#ff8a8a"),
    "startup": _GREY[0],
    "init": _GREY[1],
    "idle": _GREY[2],
    # lines that stand for what should be
    "target": _GREY[0],
    "at most": _GREY[0],
    "interval": _GREY[0],
}


def color_of(name: str, index: int) -> Color:
    """The colour of the series `name`, the `index`-th of its panel."""
    return NAMED.get(name, SERIES[index % len(SERIES)])


RATE = "$__rate_interval"
"""Window of every `rate`: Grafana chooses it to hold at least four scrapes."""

_SELECTOR = re.compile(r"(?P<metric>[a-zA-Z_:][\w:]*)\{(?P<labels>[^}]*)\}")


class Kind(StrEnum):
    """How a panel shows its numbers; Grafana's names."""

    STAT = "stat"
    LINES = "timeseries"
    BARS = "bargauge"
    TABLE = "table"


@dataclass(frozen=True)
class Step:
    """From `value` on, a number is shown in `color`: good, warning, bad or neutral."""

    value: float | None
    color: str


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One picture: `queries` are PromQL by their legend, in which `{{label}}` stands for a label's
    value.
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
    steps: tuple[Step, ...] = ()
    bridged: bool = False
    """Points are joined over gaps: what happens seldom has a number only now and then."""
    shows_name: bool = False
    """A stat that shows its legend, not its value."""
    optional: bool = False
    """It draws what may be absent: metrics of others (cAdvisor, DCGM), or of machines with GPUs."""
    units: Mapping[str, str] | None = None
    """Units of a table's columns by legend, where they differ from `unit`."""
    column_steps: Mapping[str, tuple[Step, ...]] | None = None
    """Steps of a table's columns by legend, where they have some."""
    word: str = ""
    """A label whose value a table shows in the column of that name, in place of a number."""

    @property
    def instant(self) -> bool:
        """Whether it shows now, and not how it came to be."""
        return self.kind in (Kind.BARS, Kind.TABLE) or self.shows_name


@dataclass(frozen=True)
class PanelRow:
    """A titled group of panels; `collapsed` ones are opened by who wants them."""

    title: str
    panels: tuple[Panel, ...]
    collapsed: bool = False


@dataclass(frozen=True)
class Variable:
    """A choice at the dashboard's head: all values of `label` on `metric`."""

    name: str
    label: str
    metric: str
    multi: bool = True
    all_value: str = ".+"


@dataclass(frozen=True)
class Annotation:
    """An event that is drawn across all panels when `query` gives a number greater than zero."""

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
    marks: tuple[Annotation, ...] = ()
    hours: int = 1
    """How far back it looks at first."""

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels, in reading order."""
        return tuple(panel for row in self.rows for panel in row.panels)

    def query(self, text: str) -> str:
        """A panel's query with the variables' matchers in each selector: all of them only where a
        metric is kdist's own.
        """

        def with_variables(found: re.Match[str]) -> str:
            known = [
                each.name for each in self.variables if each.name in _known_to(found["metric"])
            ]
            own = [f'{name}=~"${name}"' for name in known]
            labels = [*own, *filter(None, [found["labels"].strip()])]
            return f"{found['metric']}{{{', '.join(labels)}}}"

        return _SELECTOR.sub(with_variables, text)


def _known_to(metric: str) -> tuple[str, ...]:
    """Variables whose labels a metric has: Prometheus' own lack the training, other people's the
    scrape of ours too.

    The namespace of what DCGM's exporter says may be that of the exporter.
    """
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
    """One number, large; its trend behind it."""
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
    """Numbers over time."""
    return Panel(
        title=title, description=description, kind=Kind.LINES, queries=queries, unit=unit, **panel
    )


def stack(
    title: str, description: str, unit: str, queries: Mapping[str, str], **panel: Any
) -> Panel:
    """Parts of a whole over time."""
    return lines(title, description, unit, queries, stacked=True, minimum=0.0, **panel)


def bars(
    title: str, description: str, unit: str, queries: Mapping[str, str], **panel: Any
) -> Panel:
    """Numbers of now, side by side."""
    return Panel(
        title=title,
        description=description,
        kind=Kind.BARS,
        queries=queries,
        unit=unit,
        minimum=0.0,
        **panel,
    )


def at_most(warning: float, bad: float) -> tuple[Step, ...]:
    """Good below `warning`, bad from `bad` on."""
    return (Step(None, "good"), Step(warning, "warning"), Step(bad, "bad"))


def at_least(warning: float, good: float) -> tuple[Step, ...]:
    """Bad below `warning`, good from `good` on."""
    return (Step(None, "bad"), Step(warning, "warning"), Step(good, "good"))
