"""A dashboard as one HTML page without scripts, fonts or a server: its style sheet, light and dark,
its header, and its rows of panels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from html import escape

from kdist.dashboards.grafana import places
from kdist.dashboards.model import STATUS, Dashboard, Kind, Panel, PanelRow
from kdist.dashboards.preview.curve import EventMarker
from kdist.dashboards.preview.panel import COLUMN, LINE, PanelSource, render_panel
from kdist.dashboards.preview.svg import paint
from kdist.dashboards.prometheus import Prometheus, Series, Window, fill

STYLE = f"""
:root {{
  --ground: light-dark(#f4f3ef, #121211); --card: light-dark(#ffffff, #1c1c1a); \
--edge: light-dark(#e3e1d9, #2d2d2a);
  --ink: light-dark(#141413, #f2f1ec); --soft: light-dark(#5d5b55, #a9a79f); \
--faint: light-dark(#8d8b83, #7b7a74);
  --grid: light-dark(#eceae4, #292926);
}}
* {{ box-sizing: border-box; margin: 0 }}
body {{ background: var(--ground); color: var(--ink); padding: 28px 32px 20px;
  font: 13px/1.45 Inter, "Segoe UI", system-ui, -apple-system, "Helvetica Neue", "DejaVu Sans", \
sans-serif;
  font-variant-numeric: tabular-nums; max-width: {24 * COLUMN + 64}px; margin: auto }}
header {{ display: flex; justify-content: space-between; align-items: end; gap: 24px; \
margin-bottom: 6px }}
h1 {{ font-size: 23px; font-weight: 650; letter-spacing: -0.015em }}
header p {{ color: var(--soft) }}
.when {{ text-align: right; display: grid; color: var(--soft) }}
.when b {{ font-size: 16px; color: var(--ink); font-weight: 600 }}
.marks span {{ margin-left: 14px }}
.marks i {{ display: inline-block; width: 2px; height: 12px; margin-right: 6px; \
vertical-align: -2px }}
.marks i.quiet {{ height: 6px; vertical-align: 0 }}
h2 {{ font-size: 12px; font-weight: 650; color: var(--soft); margin: 20px 2px 8px;
  letter-spacing: 0.06em; text-transform: uppercase }}
.grid {{ display: grid; grid-template-columns: repeat(24, 1fr); grid-auto-rows: {LINE - 10}px; \
gap: 10px }}
article {{ background: var(--card); border: 1px solid var(--edge); border-radius: 9px; \
padding: 10px 12px 8px; overflow: hidden;
  position: relative; display: flex; flex-direction: column; min-width: 0 }}
h3 {{ font-size: 12.5px; font-weight: 550; color: var(--soft); white-space: nowrap; \
overflow: hidden; text-overflow: ellipsis }}
.value {{ font-size: 29px; font-weight: 620; letter-spacing: -0.025em; line-height: 1.25; \
white-space: nowrap; z-index: 1 }}
.value small {{ font-size: 15px; font-weight: 500; letter-spacing: 0; color: inherit; \
opacity: .75 }}
.value.word {{ font-size: 25px }}
svg {{ width: 100%; display: block; flex: 1; min-height: 0 }}
svg.spark {{ position: absolute; left: 0; right: 0; bottom: 0; height: 34px; flex: none }}
svg.spark polyline {{ fill: none; stroke-width: 1.5; opacity: .55; \
vector-effect: non-scaling-stroke }}
.rule {{ stroke: var(--grid); stroke-width: 1 }}
.tick {{ fill: var(--faint); font-size: 10.5px }}
.name {{ font-size: 10.5px; font-weight: 550 }}
.over {{ paint-order: stroke; stroke: var(--card); stroke-width: 4px; stroke-linejoin: round }}
.line {{ fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round }}
.layer {{ opacity: .92; stroke: var(--card); stroke-width: .6 }}
.faint {{ opacity: .12 }}
.event {{ stroke-width: 1.4; opacity: .9 }}
.event.loud {{ stroke-dasharray: 4 3 }}
.event.quiet {{ stroke-width: 1.6; opacity: .7 }}
.legend {{ display: flex; flex-wrap: wrap; gap: 1px 14px; color: var(--soft); font-size: 11.5px;
  max-height: 34px; overflow: hidden }}
.legend b, .bars b {{ color: var(--ink); font-weight: 550 }}
.legend i {{ display: inline-block; width: 9px; height: 9px; border-radius: 2.5px; \
margin-right: 6px }}
.bars {{ display: grid; grid-template-columns: max-content 1fr max-content; gap: 7px 10px; \
align-items: center; margin-top: 12px;
  font-size: 12px; color: var(--soft) }}
.bar {{ background: var(--grid); border-radius: 4px; height: 11px; overflow: hidden }}
.bar i {{ display: block; height: 100%; border-radius: 4px }}
.table {{ overflow: auto; margin-top: 8px }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ text-align: right; padding: 6px 12px; border-bottom: 1px solid var(--edge) }}
th {{ font-weight: 550; color: var(--soft) }} td {{ font-weight: 500 }}
th:first-child {{ text-align: left; color: var(--ink) }} th small {{ color: var(--faint); \
font-weight: 400 }}
.nothing {{ color: var(--faint); margin: auto; font-size: 12px }}
footer {{ color: var(--faint); margin-top: 18px; font-size: 11.5px }}
@media (max-width: 900px) {{ .grid {{ grid-template-columns: 1fr }}
  article {{ grid-column: 1 !important; grid-row: auto / span 7 !important }}
  article.stat {{ grid-row: auto / span 4 !important }} }}
"""


_POINTS = 240
_LOUD = {"bad"}
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
    scheme = {"light": "light", "dark": "dark"}.get(theme, "light dark")
    head = (
        "<meta charset=utf-8><meta name=viewport "
        f"content='width=device-width'><title>{escape(dashboard.title)}</title>"
    )
    return (
        "<!doctype html><html lang=en "
        f"style='color-scheme:{scheme}'><head>{head}<style>{STYLE}</style></head>"
        f"<body>{_header(dashboard, window, chosen, events)}{''.join(rows)}"
        "<footer>drawn by kdist dashboards preview from "
        f"{escape(prometheus.url)}</footer></body></html>\n"
    )


def has_answers(row: PanelRow, source: PanelSource) -> bool:
    """Whether any panel of a row has something to show: one that Grafana shows collapsed is left
    out where it has nothing.
    """
    return any(source.now(query) for panel in row.panels for query in panel.queries.values())


def trim(
    dashboard: Dashboard,
    prometheus: Prometheus,
    window: Window,
    chosen: Mapping[str, str],
    scrape: float,
) -> Window:
    """The part of the window in which there was something."""
    coarse = Window(window.start, window.end, max(scrape, (window.end - window.start) / 5000))
    known = prometheus.range(
        fill(dashboard, "count(kdist_job_info{})", coarse, chosen=chosen, scrape_seconds=scrape),
        coarse,
    )
    times = [at for one in known for at, _ in one.points]
    return Window(min(times), max(times), coarse.step) if len(times) > 1 else window


def find_events(dashboard: Dashboard, source: PanelSource, scrape: float) -> list[EventMarker]:
    """When the dashboard's marks happened: the first moment at which each is seen."""
    found = []
    for mark in dashboard.marks:
        seen = -math.inf
        for one in source.over(mark.query):
            for at, value in one.points:
                if (
                    value > 0
                    and at - seen > max(4 * scrape, source.window.step) + source.window.step
                ):
                    found.append(
                        EventMarker(mark.title, STATUS[mark.color], at, mark.color in _LOUD)
                    )
                if value > 0:
                    seen = at
    return found


def _header(
    dashboard: Dashboard, window: Window, chosen: Mapping[str, str], events: Sequence[EventMarker]
) -> str:
    day = time.strftime("%d %B %Y", time.localtime(window.start))
    first, last = (
        time.strftime("%H:%M:%S", time.localtime(at)) for at in (window.start, window.end)
    )
    what = chosen.get("kdist_job", "all trainings")
    keys = {event.title: event for event in events}
    marks = [
        f'<span><i class="{"loud" if event.loud else "quiet"}" '
        f'style="background:{paint(event.color)}"></i>{escape(title)}</span>'
        for title, event in keys.items()
    ]
    return (
        f"<header><div><h1>{escape(dashboard.title)}</h1><p>{escape(dashboard.description)}</p></div>"
        f"<div class=when><b>{escape(what)}</b><span>{day}, {first} to {last}</span>"
        f"<span class=marks>{''.join(marks)}</span></div></header>"
    )


def _row(row: PanelRow, source: PanelSource, events: Sequence[EventMarker]) -> str:
    cards = [
        _card(panel, place, source, events)
        for panel, place in zip(row.panels, places(row), strict=True)
    ]
    return f"<section><h2>{escape(row.title)}</h2><div class=grid>{''.join(cards)}</div></section>"


def _card(
    panel: Panel, place: tuple[int, int], source: PanelSource, events: Sequence[EventMarker]
) -> str:
    x, y = place
    inside = render_panel(panel, source, events)
    # a page is read whole: no table scrolls
    rows = math.ceil((inside.count("<tr>") * _TABLE_ROW + _TABLE_HEAD) / LINE)
    height = max(panel.height, rows) if panel.kind is Kind.TABLE else panel.height
    area = f"grid-column:{x + 1}/span {panel.width};grid-row:{y + 1}/span {height}"
    title = f"<h3 title='{escape(panel.description, quote=True)}'>{escape(panel.title)}</h3>"
    return f"<article class={panel.kind} style='{area}'>{title}{inside}</article>"
