"""The variables and windows of a query."""

from __future__ import annotations

from tools.dashboards import DASHBOARDS
from tools.dashboards.prometheus import Window, fill

WINDOW = Window(1000.0, 1100.0, 1.0)


def test_queries_are_filled_with_what_was_chosen_and_the_windows_of_grafana() -> None:
    dashboard = DASHBOARDS["training-job"]
    text = fill(
        dashboard,
        'sum(rate(kdist_x{op="a"}[$__rate_interval]))',
        WINDOW,
        chosen={"kdist_job": "d"},
        scrape_seconds=15,
    )
    assert (
        text == 'sum(rate(kdist_x{namespace=~".*", kdist_job=~"d", job=~".+", instance=~".+", '
        'op="a"}[60s]))'
    )
    assert "[100s]" in fill(
        dashboard, "increase(kdist_x{}[$__range])", WINDOW, chosen={}, scrape_seconds=1
    )
