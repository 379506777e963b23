"""A dashboard as one HTML page: its stylesheet, its header, and its rows of panels."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from kdist.report.page import STATUS, Markup, element, paint, render_page
from tools.dashboards.curve import EventMarker
from tools.dashboards.grafana import positions
from tools.dashboards.model import Dashboard, Kind, Panel, PanelRow
from tools.dashboards.panel import COLUMN, LINE, PanelSource, render_panel
from tools.dashboards.prometheus import Prometheus, Series, Window, fill

STYLE = f"""
body {{ max-width: {24 * COLUMN + 64}px }}
header {{ display: flex; justify-content: space-between; align-items: end; gap: 24px;
  margin-bottom: 6px }}
header p {{ color: var(--soft) }}
.when {{ text-align: right; display: grid; color: var(--soft) }}
.when b {{ font-size: 16px; color: var(--ink); font-weight: 600 }}
.marks span {{ margin-left: 14px }}
.marks i {{ display: inline-block; width: 2px; height: 12px; margin-right: 6px;
  vertical-align: -2px }}
.marks i.minor {{ height: 6px; vertical-align: 0 }}
h2 {{ font-size: 12px; font-weight: 650; color: var(--soft); margin: 20px 2px 8px;
  letter-spacing: 0.06em; text-transform: uppercase }}
.grid {{ display: grid; grid-template-columns: repeat(24, 1fr); grid-auto-rows: {LINE - 10}px;
  gap: 10px }}
article {{ background: var(--card); border: 1px solid var(--edge); border-radius: 9px;
  padding: 10px 12px 8px; overflow: hidden; position: relative;
  display: flex; flex-direction: column; min-width: 0 }}
h3 {{ font-size: 12.5px; font-weight: 550; color: var(--soft); white-space: nowrap;
  overflow: hidden; text-overflow: ellipsis }}
.value {{ font-size: 29px; font-weight: 620; letter-spacing: -0.025em; line-height: 1.25;
  white-space: nowrap; z-index: 1 }}
.value small {{ font-size: 15px; font-weight: 500; letter-spacing: 0; color: inherit;
  opacity: .75 }}
.value.word {{ font-size: 25px }}
svg {{ flex: 1; min-height: 0 }}
svg.spark {{ position: absolute; left: 0; right: 0; bottom: 0; height: 34px; flex: none }}
svg.spark polyline {{ fill: none; stroke-width: 1.5; opacity: .55;
  vector-effect: non-scaling-stroke }}
.name {{ font-size: 10.5px; font-weight: 550 }}
.over {{ paint-order: stroke; stroke: var(--card); stroke-width: 4px; stroke-linejoin: round }}
.layer {{ opacity: .92; stroke: var(--card); stroke-width: .6 }}
.faint {{ opacity: .12 }}
.event.minor {{ stroke-width: 1.6; stroke-dasharray: none; opacity: .7 }}
.legend {{ display: flex; flex-wrap: wrap; gap: 1px 14px; color: var(--soft);
  font-size: 11.5px; max-height: 34px; overflow: hidden }}
.legend b {{ color: var(--ink); font-weight: 550 }}
.legend i {{ display: inline-block; width: 9px; height: 9px; border-radius: 2.5px;
  margin-right: 6px }}
.bars b {{ color: var(--ink); font-weight: 550 }}
.bars {{ display: grid; grid-template-columns: max-content 1fr max-content; gap: 7px 10px;
  align-items: center; margin-top: 12px; font-size: 12px; color: var(--soft) }}
.bar {{ background: var(--grid); border-radius: 4px; height: 11px; overflow: hidden }}
.bar i {{ display: block; height: 100%; border-radius: 4px }}
.table {{ overflow: auto; margin-top: 8px }}
th small {{ color: var(--faint); font-weight: 400 }}
.nothing {{ color: var(--faint); margin: auto; font-size: 12px }}
footer {{ color: var(--faint); margin-top: 18px; font-size: 11.5px }}
@media (max-width: 900px) {{ .grid {{ grid-template-columns: 1fr }}
  article {{ grid-column: 1 !important; grid-row: auto / span 7 !important }}
  article.stat {{ grid-row: auto / span 4 !important }} }}
"""


_POINTS = 240
_SCHEMES = {"light": "light", "dark": "dark", "auto": "light dark"}
_MAJOR_COLOR = "bad"  # of annotations that are drawn over the whole height
_TABLE_ROW, _TABLE_HEAD = 33, 52  # pixels


def render_dashboard(
    dashboard: Dashboard,
    prometheus: Prometheus,
    window: Window,
    *,
    chosen: Mapping[str, str],
    theme: str,
) -> str:
    """The whole page. `theme` is light, dark or auto; `chosen` are values of the dashboard's
    variables.
    """
    scrape = prometheus.scrape_seconds()
    window = trim(dashboard, prometheus, window, chosen, scrape)
    step = max(scrape, (window.end - window.start) / _POINTS)
    window = Window(window.start, window.end, step)

    def over(query: str) -> Sequence[Series]:
        return prometheus.range(
            fill(dashboard, query, window, chosen=chosen, scrape_seconds=scrape), window
        )

    def now(query: str) -> Sequence[Series]:
        return prometheus.instant(
            fill(dashboard, query, window, chosen=chosen, scrape_seconds=scrape), at=window.end
        )

    source = PanelSource(over, now, window)
    events = find_events(dashboard, source, scrape)
    rows = [
        _row(row, source, events)
        for row in dashboard.rows
        if not row.collapsed or has_answers(row, source)
    ]
    footer = element("footer", f"drawn by tools.dashboards preview from {prometheus.url}")
    return render_page(
        dashboard.title,
        _header(dashboard, window, chosen, events),
        *rows,
        footer,
        style=STYLE,
        scheme=_SCHEMES[theme],
    )


def has_answers(row: PanelRow, source: PanelSource) -> bool:
    """Whether any query of a row has an answer: a row that Grafana shows collapsed is left out
    where none has.
    """
    return any(source.now(query) for panel in row.panels for query in panel.queries.values())


def trim(
    dashboard: Dashboard,
    prometheus: Prometheus,
    window: Window,
    chosen: Mapping[str, str],
    scrape: float,
) -> Window:
    """The part of the window in which there were trainings; all of it if there were none."""
    coarse = Window(window.start, window.end, max(scrape, (window.end - window.start) / 5000))
    query = fill(dashboard, "count(kdist_job_info{})", coarse, chosen=chosen, scrape_seconds=scrape)
    times = [at for one in prometheus.range(query, coarse) for at, _ in one.points]
    return Window(min(times), max(times), coarse.step) if len(times) > 1 else window


def find_events(dashboard: Dashboard, source: PanelSource, scrape: float) -> list[EventMarker]:
    """The dashboard's annotations as event markers, each at the first time at which it is true.

    Args:
        dashboard: its annotations are queries.
        source: answers them.
        scrape: seconds between two scrapes.
    """
    step = source.window.step
    gap = max(4 * scrape, step) + step
    found = []
    for mark in dashboard.annotations:
        last = -math.inf
        for one in source.over(mark.query):
            for at in (at for at, value in one.points if value > 0):
                if at - last > gap:
                    color, major = STATUS[mark.color], mark.color == _MAJOR_COLOR
                    found.append(EventMarker(mark.title, color, at, major))
                last = at
    return found


def _header(
    dashboard: Dashboard, window: Window, chosen: Mapping[str, str], events: Sequence[EventMarker]
) -> Markup:
    day = time.strftime("%d %B %Y", time.localtime(window.start))
    first, last = (
        time.strftime("%H:%M:%S", time.localtime(at)) for at in (window.start, window.end)
    )
    title = element("h1", dashboard.title)
    return element(
        "header",
        element("div", title, element("p", dashboard.description)),
        element(
            "div",
            element("b", chosen.get("kdist_job", "all trainings")),
            element("span", f"{day}, {first} to {last}"),
            element("span", *_event_keys(events), class_="marks"),
            class_="when",
        ),
    )


def _event_keys(events: Sequence[EventMarker]) -> list[Markup]:
    keys = {event.title: event for event in events}
    return [
        element(
            "span",
            element(
                "i",
                class_="major" if event.major else "minor",
                style=f"background:{paint(event.color)}",
            ),
            title,
        )
        for title, event in keys.items()
    ]


def _row(row: PanelRow, source: PanelSource, events: Sequence[EventMarker]) -> Markup:
    cards = [
        _card(panel, position, source, events)
        for panel, position in zip(row.panels, positions(row), strict=True)
    ]
    return element("section", element("h2", row.title), element("div", *cards, class_="grid"))


def _card(
    panel: Panel, position: tuple[int, int], source: PanelSource, events: Sequence[EventMarker]
) -> Markup:
    x, y = position
    inside = render_panel(panel, source, events)
    # a page is read whole: no table scrolls
    rows = math.ceil((inside.count("<tr>") * _TABLE_ROW + _TABLE_HEAD) / LINE)
    height = max(panel.height, rows) if panel.kind is Kind.TABLE else panel.height
    return element(
        "article",
        element("h3", panel.title, title=panel.description),
        inside,
        class_=panel.kind,
        style=f"grid-column:{x + 1}/span {panel.width};grid-row:{y + 1}/span {height}",
    )
