"""Alerts meet the faults that they are for in pods: a Prometheus in the cluster fires, and sees the
job well again.

The rules are the chart's; only `for` is shorter. Faults for which a pod adds nothing are tried by
tests/charts/test_faults.py.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.charts.monitored import firing
from tests.cluster.monitoring import monitoring, signal_process, signal_rank
from tests.cluster.namespace import Namespace
from tools.dashboards.prometheus import Prometheus

pytestmark = [pytest.mark.e2e, pytest.mark.wide, pytest.mark.timeout(1200)]

LONG = 1_000_000


class Watched:
    """A job in pods, and the Prometheus that watches it."""

    def __init__(self, namespace: Namespace, prometheus: Prometheus) -> None:
        self.namespace = namespace
        self._prometheus = prometheus

    def fires(self, alert: str) -> bool:
        """Whether Prometheus says that this alert fires for the job."""
        return (alert, "digits") in firing(self._prometheus)

    def sees(self, query: str) -> bool:
        """Whether the query finds anything now."""
        return bool(self._prometheus.instant(query, at=time.time()))

    def until_it_fires(self, alert: str, seconds: float = 240) -> None:
        self.namespace.until(alert, lambda: self.fires(alert), seconds)

    def until_it_is_silent(self, alert: str, seconds: float = 240) -> None:
        self.namespace.until(f"the end of {alert}", lambda: not self.fires(alert), seconds)

    def until_step(self, step: int) -> None:
        """Return once Prometheus has seen this step of the job."""
        self.namespace.until(f"step {step}", lambda: self.sees(f"kdist_last_step >= {step}"), 600)

    def type_in_pod(self, *command: str, index: int = 0) -> None:
        """Run a command in a pod of the job."""
        self.namespace.kubectl(
            "exec", self.namespace.pods("digits")[index]["metadata"]["name"], "--", *command
        )


@pytest.fixture
def watched(namespace: Namespace) -> Iterator[Watched]:
    with monitoring(namespace, immediate=True) as prometheus:
        yield Watched(namespace, prometheus)


def test_a_rank_that_stands_still_is_reported_until_it_goes_on(
    watched: Watched, calm: Callable[..., dict[str, Any]]
) -> None:
    watched.namespace.apply(
        calm(train={"steps": LONG}, hangTimeoutSeconds=3600, collectiveTimeoutSeconds=3600)
    )
    watched.until_step(20)
    assert not watched.fires("KdistTrainingStalled")
    signal_rank(watched.namespace, "digits", signal.SIGSTOP)
    watched.until_it_fires("KdistTrainingStalled")
    signal_rank(watched.namespace, "digits", signal.SIGCONT)
    watched.until_it_is_silent("KdistTrainingStalled")


def test_a_loss_that_is_none_is_reported_though_its_pods_are_gone(
    watched: Watched, job: Callable[..., dict[str, Any]]
) -> None:
    sick = {"workload": "sick:Sick", "epochs": None, "steps": LONG, "syncEverySteps": 2}
    flags = [{"name": "FLAGS", "value": "/tmp"}]  # noqa: S108 - the pod's own
    watched.namespace.apply(
        job(code="./src", env=flags, train=sick, resources={"cpu": 0.4, "memory": "1Gi"})
    )
    watched.until_step(20)
    watched.type_in_pod("touch", "/tmp/nan")  # noqa: S108
    watched.namespace.kdist("wait", "digits", "--timeout=3m", code=10)
    watched.until_it_fires("KdistLossNotFinite", 30)
    watched.namespace.until("pods that are gone from Prometheus", lambda: not watched.sees("up"))
    assert watched.fires("KdistLossNotFinite")
    watched.until_it_is_silent("KdistLossNotFinite", 900)


def test_a_volume_that_takes_no_checkpoint_is_reported_until_it_takes_them(
    watched: Watched, calm: Callable[..., dict[str, Any]]
) -> None:
    watched.namespace.apply(calm(train={"steps": LONG, "checkpoint": {"every": {"seconds": 5}}}))
    watched.namespace.until(
        "a checkpoint", lambda: watched.sees("kdist_checkpoint_last_success_step > 0")
    )
    assert not watched.fires("KdistCheckpointStale")
    watched.type_in_pod("chmod", "500", "/checkpoints/digits")
    watched.until_it_fires("KdistCheckpointStale")
    watched.until_it_fires("KdistCheckpointFailing")
    watched.type_in_pod("chmod", "700", "/checkpoints/digits")
    watched.until_it_is_silent("KdistCheckpointStale")
    watched.until_it_is_silent("KdistCheckpointFailing")


def test_an_exporter_that_is_gone_is_reported_until_its_container_was_started_again(
    watched: Watched, calm: Callable[..., dict[str, Any]]
) -> None:
    watched.namespace.apply(calm(train={"steps": LONG}))
    watched.until_step(20)
    assert not watched.fires("KdistExporterDown")
    pods = [pod["metadata"]["name"] for pod in watched.namespace.pods("digits")]
    for pod, agent in zip(pods, watched.namespace.agents("digits"), strict=True):
        signal_process(watched.namespace, pod, agent["pid"], signal.SIGSTOP)
    watched.until_it_fires("KdistExporterDown")
    watched.until_it_is_silent("KdistExporterDown", 600)
    watched.namespace.until(
        "both agents again",
        lambda: watched.sees("count(kdist_job_state{state='running'} == 1) == 2"),
        600,
    )
