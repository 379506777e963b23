"""The page of a dashboard, from a Prometheus with made-up answers."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from tools.dashboards import DASHBOARDS
from tools.dashboards.model import Kind
from tools.dashboards.page import render_dashboard
from tools.dashboards.prometheus import Prometheus, Series, Window

WINDOW = Window(1000.0, 1100.0, 1.0)
LABELS = {"namespace": "ml", "kdist_job": "digits", "rank": "0", "state": "running", "pod": "p-0"}


class Answers(Prometheus):
    """Answers every query with one series; a new worker group forms at half of the time."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9")

    def instant(self, query: str, *, at: float) -> list[Series]:  # noqa: ARG002 - of the base class
        return [Series(LABELS, ((at, 3.0),))]

    def range(self, query: str, window: Window) -> list[Series]:  # noqa: ARG002 - of the base class
        values: dict[float, float] = {at: at / 10 for at in (1000.0, 1050.0, 1100.0)}
        if "changes(" in query:
            values = {1000.0: 0.0, 1050.0: 1.0, 1100.0: 0.0}
        return [Series(LABELS, tuple(values.items()))]

    def scrape_seconds(self) -> float:
        return 1.0


@pytest.mark.parametrize("name", DASHBOARDS)
@pytest.mark.parametrize(
    ("theme", "scheme"), [("auto", "light dark"), ("dark", "dark"), ("light", "light")]
)
def test_a_page_has_a_card_for_each_panel_and_fetches_nothing(
    name: str, theme: str, scheme: str
) -> None:
    dashboard = DASHBOARDS[name]
    page = render_dashboard(dashboard, Answers(), WINDOW, chosen={}, theme=theme)
    assert page.count("<article") == len(dashboard.panels)
    assert "nothing to show" not in page
    assert f"color-scheme:{scheme}" in page
    assert not re.search(r"(?:src|href)=", page)
    assert ("<title>New group</title>" in page) == (name == "training-job")
    charts = re.findall(r"<svg.*?</svg>", page)
    assert len(charts) >= sum(panel.kind is Kind.LINES for panel in dashboard.panels)
    trees: list[Any] = [ElementTree.fromstring(chart) for chart in charts]  # noqa: S314 - our own
    assert {tree.tag for tree in trees} == {"svg"}
