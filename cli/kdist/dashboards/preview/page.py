"""A dashboard as one HTML page that needs nothing else: no script from elsewhere, no font, no server."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from html import escape

from kdist.dashboards.colors import STATUS
from kdist.dashboards.grafana import places
from kdist.dashboards.panels import Dashboard, Kind, Panel, Row
from kdist.dashboards.preview import panel as card
from kdist.dashboards.preview.chart import Event, paint
from kdist.dashboards.preview.panel import COLUMN, LINE, Source
from kdist.dashboards.preview.style import STYLE
from kdist.dashboards.prometheus import Prometheus, Series, Window, fill

_POINTS = 240
_LOUD = {"bad"}
_TABLE_ROW, _TABLE_HEAD = 33, 52  # pixels


def draw_page(dashboard: Dashboard, prometheus: Prometheus, window: Window, *, chosen: Mapping[str, str], theme: str) -> str:
    """The whole page. `theme` is light, dark or auto; `chosen` are values of the dashboard's variables."""
    scrape = prometheus.scrape_seconds()
    window = trim(dashboard, prometheus, window, chosen, scrape)
    step = max(scrape, (window.end - window.start) / _POINTS)
    window = Window(window.start, window.end, step)

    def over(query: str) -> Sequence[Series]:
        return prometheus.range(fill(dashboard, query, window, chosen=chosen, scrape_seconds=scrape), window)

    def now(query: str) -> Sequence[Series]:
        return prometheus.instant(fill(dashboard, query, window, chosen=chosen, scrape_seconds=scrape), at=window.end)

    source = Source(over, now, window)
    events = find_events(dashboard, source, scrape)
    rows = [_row(row, source, events) for row in dashboard.rows if not row.collapsed or has_answers(row, source)]
    scheme = {"light": "light", "dark": "dark"}.get(theme, "light dark")
    head = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><title>{escape(dashboard.title)}</title>"
    return (
        f"<!doctype html><html lang=en style='color-scheme:{scheme}'><head>{head}<style>{STYLE}</style></head>"
        f"<body>{_header(dashboard, window, chosen, events)}{''.join(rows)}"
        f"<footer>drawn by kdist dashboards preview from {escape(prometheus.url)}</footer></body></html>\n"
    )


def has_answers(row: Row, source: Source) -> bool:
    """Whether any panel of a row has something to show: one that Grafana shows collapsed is left out where it has nothing."""
    return any(source.now(query) for panel in row.panels for query in panel.queries.values())


def trim(dashboard: Dashboard, prometheus: Prometheus, window: Window, chosen: Mapping[str, str], scrape: float) -> Window:
    """The part of the window in which there was something."""
    coarse = Window(window.start, window.end, max(scrape, (window.end - window.start) / 5000))
    known = prometheus.range(fill(dashboard, "count(kdist_job_info{})", coarse, chosen=chosen, scrape_seconds=scrape), coarse)
    times = [at for one in known for at, _ in one.points]
    return Window(min(times), max(times), coarse.step) if len(times) > 1 else window


def find_events(dashboard: Dashboard, source: Source, scrape: float) -> list[Event]:
    """When the dashboard's marks happened: the first moment at which each is seen."""
    found = []
    for mark in dashboard.marks:
        seen = -math.inf
        for one in source.over(mark.query):
            for at, value in one.points:
                if value > 0 and at - seen > max(4 * scrape, source.window.step) + source.window.step:
                    found.append(Event(mark.title, STATUS[mark.color], at, mark.color in _LOUD))
                if value > 0:
                    seen = at
    return found


def _header(dashboard: Dashboard, window: Window, chosen: Mapping[str, str], events: Sequence[Event]) -> str:
    day = time.strftime("%d %B %Y", time.localtime(window.start))
    first, last = (time.strftime("%H:%M:%S", time.localtime(at)) for at in (window.start, window.end))
    what = chosen.get("kdist_job", "all trainings")
    keys = {event.title: event for event in events}
    marks = [
        f'<span><i class="{"loud" if event.loud else "quiet"}" style="background:{paint(event.color)}"></i>{escape(title)}</span>'
        for title, event in keys.items()
    ]
    return (
        f"<header><div><h1>{escape(dashboard.title)}</h1><p>{escape(dashboard.description)}</p></div>"
        f"<div class=when><b>{escape(what)}</b><span>{day}, {first} to {last}</span>"
        f"<span class=marks>{''.join(marks)}</span></div></header>"
    )


def _row(row: Row, source: Source, events: Sequence[Event]) -> str:
    cards = [_card(panel, place, source, events) for panel, place in zip(row.panels, places(row), strict=True)]
    return f"<section><h2>{escape(row.title)}</h2><div class=grid>{''.join(cards)}</div></section>"


def _card(panel: Panel, place: tuple[int, int], source: Source, events: Sequence[Event]) -> str:
    x, y = place
    inside = card.draw(panel, source, events)
    rows = math.ceil((inside.count("<tr>") * _TABLE_ROW + _TABLE_HEAD) / LINE)  # a page is read whole: no table scrolls
    height = max(panel.height, rows) if panel.kind is Kind.TABLE else panel.height
    area = f"grid-column:{x + 1}/span {panel.width};grid-row:{y + 1}/span {height}"
    title = f"<h3 title='{escape(panel.description, quote=True)}'>{escape(panel.title)}</h3>"
    return f"<article class={panel.kind} style='{area}'>{title}{inside}</article>"


__all__ = ["COLUMN", "LINE", "draw_page"]
