"""A Prometheus in the cluster finds the trainings' pods as the chart says, and sees what becomes of
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.charts.podmonitor import scrape_config
from tests.charts.rules import read_rules
from tests.cluster.monitoring import monitoring
from tests.cluster.namespace import Namespace
from tests.cluster.prometheus_operator import POD, made_scrapes, operated
from tests.cluster.recovery import loaded_rules, see_a_recovery

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

LONG = {"steps": 100_000, "clipGradNorm": 5.0, "loader": {"workers": 1}}


def targets_of(namespace: Namespace, *, with_node: bool = False) -> dict[str, dict[str, str]]:
    """Each pod of the job as a target: the labels by which rules and dashboards find its series,
    and no others.
    """
    known = {
        "namespace": namespace.name,
        "job": "kdist",
        "kdist_job": "digits",
        "container": "trainer",
        "endpoint": "metrics",
    }
    nodes = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in namespace.pods("digits")}
    return {name: {**known, "node": node} if with_node else known for name, node in nodes.items()}


@pytest.mark.sampled
def test_every_panel_and_alert_answers_while_a_job_in_pods_is_killed_and_recovers(
    namespace: Namespace, calm: Callable[..., dict[str, Any]]
) -> None:
    start = time.time()
    namespace.apply(calm(train=LONG))
    with monitoring(namespace) as prometheus:
        assert see_a_recovery(namespace, prometheus, since=start) == targets_of(namespace)


@pytest.mark.wide
@pytest.mark.disruptive  # its kinds come and go for the whole cluster
@pytest.mark.timeout(2400)  # it may build programs that changed
def test_the_real_operator_makes_of_the_chart_what_our_own_prometheus_reads_and_sees_the_same(
    namespace: Namespace, calm: Callable[..., dict[str, Any]]
) -> None:
    with operated(namespace) as prometheus:
        start = time.time()
        namespace.apply(calm(train=LONG))
        (monitor,) = namespace.find("podmonitor")
        assert namespace.until("pods to scrape", lambda: made_scrapes(namespace)) == [
            scrape_config(monitor)
        ]
        (policy,) = [
            one
            for one in namespace.find("networkpolicy")
            if one["metadata"]["name"].endswith("-monitoring")
        ]
        wanted = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
        assert wanted.items() <= namespace.get("pod", POD)["metadata"]["labels"].items()
        assert see_a_recovery(namespace, prometheus, since=start) == targets_of(
            namespace, with_node=True
        )
        off = {"KdistLossSpike"}  # until somebody asks for it
        known = {rule.get("alert") or rule["record"] for rule in read_rules()} - off
        assert {rule["name"] for rule in loaded_rules(prometheus)} == known
        namespace.kdist("delete", "digits", "--purge")
        namespace.until(
            "targets that are gone", lambda: not prometheus.instant("up", at=time.time())
        )
        namespace.apply(calm(train={"steps": 60}))
        namespace.kdist("wait", "digits", "--timeout=3m")
        ended = (
            "last_over_time(kdist_job_state{state='succeeded'}[5m]) == 1 and on(pod) "
            "last_over_time(kdist_last_step[5m]) == 60"
        )
        assert namespace.until(
            "the last numbers of a job that is done",
            lambda: prometheus.instant(ended, at=time.time()),
            30,
        )
