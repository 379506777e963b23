"""Every panel and every rule answers on a real Prometheus that scrapes a real training of two
ranks, one of which is killed. The other restarts with it: in place, no step would be lost and no
checkpoint read, and the panels of both would show nothing.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.charts import browser
from tests.charts.monitored import SCRAPE_SECONDS, SILENT, Training, scraping, until, write_job
from tests.charts.rules import alerts, read_rules
from tests.cli.running import Run
from tools.dashboards import DASHBOARDS
from tools.dashboards.model import Panel
from tools.dashboards.page import render_dashboard
from tools.dashboards.prometheus import Prometheus, Window, fill

pytestmark = pytest.mark.chaos

PANELS = [
    pytest.param(name, panel, id=f"{name}: {panel.title}")
    for name, dashboard in DASHBOARDS.items()
    for panel in dashboard.panels
    if not panel.optional
]


class Seen(NamedTuple):
    """A Prometheus after the kill, the time just before it, and the time at which all had
    recovered.
    """

    prometheus: Prometheus
    before: float
    after: float
    window: Window


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    home = tmp_path_factory.mktemp("monitored")
    start = time.time()
    with scraping(home) as (prometheus, targets):
        run = Run(home, write_job(home, seconds=600, train={"recovery": "restart"}))
        training = Training(run, "digits", targets)

        def has_events(name: str, least: int) -> bool:
            assert run.process.poll() is None, run.errors()
            with suppress(OSError):
                training.write_targets()
            return len(training.events(name)) >= least

        try:
            until(lambda: has_events("commit", 2), "second checkpoint", 240)
            before = time.time()
            training.kill_rank()
            until(lambda: has_events("generation", 2), "second generation", 240)
            saved = len(training.events("commit"))
            until(lambda: has_events("commit", saved + 1), "checkpoint after the kill", 240)
            after = time.time() + 2 * SCRAPE_SECONDS
            until(lambda: time.time() > after, "scrape of that")
            yield Seen(prometheus, before, after, Window(start, after, SCRAPE_SECONDS))
        finally:
            run.close()


def filled(seen: Seen, name: str, query: str) -> str:
    return fill(
        DASHBOARDS[name],
        query,
        seen.window,
        chosen={"kdist_job": "digits"},
        scrape_seconds=SCRAPE_SECONDS,
    )


@pytest.mark.parametrize(("name", "panel"), PANELS)
def test_every_query_of_a_panel_finds_finite_series(seen: Seen, name: str, panel: Panel) -> None:
    for legend, query in panel.queries.items():
        found = seen.prometheus.range(filled(seen, name, query), seen.window)
        points = [value for one in found for _, value in one.points]
        assert any(map(math.isfinite, points)) or legend in SILENT, query


MOVED = {
    "kdist_generation": 1,
    "kdist_worker_group_restarts_total": 1,
    "kdist_lost_steps_total": 1,
    "kdist_lost_progress_seconds_total": 0.0001,
    'kdist_worker_exits_total{signal="SIGKILL"}': 1,
    'kdist_checkpoint_attempts_total{op="restore"}': 1,
    'kdist_wall_seconds_total{category=~"restart|rendezvous|init|checkpoint_restore"}': 0.2,
    "kdist_rendezvous_duration_seconds_count": 1,
    "kdist_time_to_recover_seconds": 0.1,
    "kdist_steps_total": 1,
    "kdist_checkpoint_last_success_step": 1,
}


@pytest.mark.parametrize("metric", MOVED)
def test_the_kill_shows(seen: Seen, metric: str) -> None:
    query = f"sum({metric})"
    before, after = (seen.prometheus.instant(query, at=at) for at in (seen.before, seen.after))
    assert after[0].last - (before[0].last if before else 0) >= MOVED[metric]


def test_no_alert_fires_while_a_training_only_recovers(seen: Seen) -> None:
    assert seen.prometheus.instant('ALERTS{alertstate="firing"}', at=seen.after) == []


@pytest.mark.parametrize("rule", read_rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_has_its_series_and_an_alert_is_silent(seen: Seen, rule: dict[str, Any]) -> None:
    found = seen.prometheus.instant(rule["expr"], at=seen.after)
    if rule.get("alert") in alerts():
        assert found == [] or "for" in rule, (
            "a condition that has to last may be true for a moment on a busy machine"
        )
        names = set(re.findall(r"\bkdist_\w+", rule["expr"])) - {"kdist_job"}
        absent = [
            name
            for name in names
            if not name.endswith(("ratio", "rate5m")) and not _known(seen, name)
        ]
        assert set(absent) <= {
            "kdist_checkpoint_failures_total",
            "kdist_checkpoint_fallbacks_total",
        }
    else:
        assert [one for one in found if math.isfinite(one.last)], rule["expr"]


def _known(seen: Seen, name: str) -> bool:
    return bool(
        seen.prometheus.instant(
            f'last_over_time({{__name__=~"(job:|rank:)?{name}(:.*)?"}}[10m])', at=seen.after
        )
    )


@pytest.mark.parametrize("name", DASHBOARDS)
@pytest.mark.parametrize("theme", ["auto", "dark"])
def test_the_page_shows_every_panel_and_the_kill(
    seen: Seen, name: str, theme: str, tmp_path: Path
) -> None:
    chosen = {"kdist_job": "digits"}
    page = render_dashboard(
        DASHBOARDS[name], seen.prometheus, seen.window, chosen=chosen, theme=theme
    )
    (tmp_path / "page.html").write_text(page)
    assert page.count("<article") == len(
        [panel for panel in DASHBOARDS[name].panels if not panel.optional]
    )
    assert "nothing to show" not in page
    assert "no answer" not in page
    assert ("<title>New group</title>" in page) == (name == "training-job")
    assert not re.search(r"(?:src|href)=", page), "it needs nothing else"


@pytest.mark.wide
@pytest.mark.skipif(not browser.is_here(), reason="there is no Chromium")
@pytest.mark.parametrize("name", DASHBOARDS)
def test_no_text_of_the_page_is_cut(seen: Seen, name: str) -> None:
    page = render_dashboard(
        DASHBOARDS[name],
        seen.prometheus,
        seen.window,
        chosen={"kdist_job": "digits"},
        theme="light",
    )
    assert browser.measure(page).cut == []
