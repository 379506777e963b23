"""A Prometheus in the cluster finds the trainings' pods as the chart says, and sees what becomes of them."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from kdist.dashboards.prometheus import Prometheus, Window
from tests.charts.monitored import firing, unanswered
from tests.cluster.monitoring import SCRAPE_SECONDS, monitoring, signal_rank
from tests.cluster.namespace import Namespace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def rules_without_an_answer(prometheus: Prometheus) -> list[str]:
    """Rules that Prometheus could not evaluate, or has not yet."""
    with urllib.request.urlopen(f"{prometheus.url}/api/v1/rules", timeout=30) as answer:  # noqa: S310 - our own
        groups = json.load(answer)["data"]["groups"]
    return [rule["name"] for group in groups for rule in group["rules"] if rule["health"] != "ok"]


def test_every_panel_and_alert_answers_while_a_job_in_pods_is_killed_and_recovers(
    namespace: Namespace, calm: Callable[..., dict[str, Any]]
) -> None:
    start = time.time()
    namespace.apply(calm(train={"steps": 100_000, "clipGradNorm": 5.0, "loader": {"workers": 1}}))
    with monitoring(namespace) as prometheus:

        def seen(query: str) -> bool:
            return bool(prometheus.instant(query, at=time.time()))

        namespace.until("a second checkpoint", lambda: seen("kdist_checkpoint_last_success_step >= 40"))
        before = time.time()
        targets = prometheus.instant("up == 1", at=before)
        signal_rank(namespace, "digits")
        namespace.until("two agents in a second generation", lambda: seen("count(kdist_generation == 2) == 2"))
        namespace.until("the time it took", lambda: seen("kdist_time_to_recover_seconds > 0"))
        again = time.time()
        namespace.until("a checkpoint after that", lambda: seen(f"kdist_checkpoint_last_success_timestamp_seconds > {again}"))
        after = time.time()
        window = Window(start, after, SCRAPE_SECONDS)
        assert unanswered(prometheus, window, job="digits", at=(before, after - SCRAPE_SECONDS, after)) == []
        assert rules_without_an_answer(prometheus) == []
        assert firing(prometheus) == set()
        assert seen('kdist_worker_group_restarts_total{cause="signal"} == 1')
        assert seen('kdist_worker_exits_total{signal="SIGKILL"} == 1')
        assert not seen('{exported_kdist_job!=""}')
    names = {pod["metadata"]["name"] for pod in namespace.pods("digits")}
    assert {one.labels["pod"] for one in targets} == names
    known = {"namespace": namespace.name, "job": "kdist", "kdist_job": "digits", "container": "trainer", "endpoint": "metrics"}
    for one in targets:
        assert {name: value for name, value in one.labels.items() if name not in ("__name__", "pod", "instance")} == known
