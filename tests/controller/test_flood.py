"""Strangers flood the controller's endpoint: probes from other addresses are answered, TrainingJobs
are looked after as before, and the process does not grow.

KDIST_FLOOD_SECONDS says how long the flood lasts (5).
"""

from __future__ import annotations

import http.client
import os
import re
import sys
import time
from contextlib import suppress

import pytest

from kdist_trainer.network.server import STRANGERS
from tests.charts.rules import CHART
from tests.controller.conftest import JobOf
from tests.controller.kubernetes import Kubernetes
from tests.controller.test_life import change
from tests.controller.test_process import Replica, Start, start, until
from tests.faults.test_floods import MEMORY, Use, flooding, use_of

__all__ = ["start"]

SECONDS = float(os.environ.get("KDIST_FLOOD_SECONDS", "5"))
KUBELET = "127.0.0.2"
pytestmark = [
    pytest.mark.processes,
    pytest.mark.sampled,
    pytest.mark.timeout(SECONDS + 90),
    pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2, and /proc tells what is used"),
]


class Kubelet:
    """Probes a controller as the chart has it probed, from an address of its own, and more often.

    Attributes:
        silent: the longest time without an answer, in seconds.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._probe = probe_of_the_chart()
        self._answered_at = time.monotonic()
        self.asked = self.failed = 0
        self.silent = 0.0

    def probe(self, page: str) -> str:
        """What the page says; "" if that did not come in time."""
        self.asked += 1
        said = ""
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(
                "127.0.0.1",
                self._replica.port,
                self._probe["timeoutSeconds"],
                source_address=(KUBELET, 0),
            )
            connection.request("GET", page)
            response = connection.getresponse()
            said = response.read().decode() if response.status == 200 else ""
            connection.close()
        now = time.monotonic()
        self.failed += not said
        self.silent = max(self.silent, now - self._answered_at)
        if said:
            self._answered_at = now
        return said

    @property
    def patience(self) -> float:
        """The seconds without an answer after which the kubelet ends the container."""
        return float(self._probe["periodSeconds"] * (self._probe["failureThreshold"] - 1))


def probe_of_the_chart() -> dict[str, int]:
    """The numbers of the controller's liveness probe."""
    text = (CHART / "templates/controller.yaml").read_text().partition("livenessProbe:")[2]
    names = ("periodSeconds", "timeoutSeconds", "failureThreshold")
    found = re.findall(rf"^ +({'|'.join(names)}): (\d+)$", text, re.MULTILINE)
    return {name: int(number) for name, number in found[: len(names)]}


def refused(metrics: str) -> float:
    start_of = "kdist_controller_connections_refused_total{"
    return sum(
        float(line.rpartition(" ")[2]) for line in metrics.splitlines() if line.startswith(start_of)
    )


def scale_down_and_up(kubernetes: Kubernetes, times: int = 1) -> None:
    """Scale the job down and up, and wait until its pods are as many."""
    for _ in range(times):
        change(kubernetes, replicas=2)
        until(lambda: ("Pod", "digits-3") not in kubernetes.names())
        change(kubernetes, replicas=4)
        until(lambda: ("Pod", "digits-3") in kubernetes.names())


def test_a_flooded_controller_answers_its_probes_and_looks_after_its_jobs(
    start: Start, kubernetes: Kubernetes, job: JobOf, capsys: pytest.CaptureFixture[str]
) -> None:
    replica = start("first")
    until(replica.leads)
    kubernetes.put("TrainingJob", job())
    scale_down_and_up(kubernetes, times=3)  # all threads have started
    kubelet = Kubelet(replica)
    before = most = use_of(replica.process.pid)
    closed, number = 0.0, 0
    with flooding([f"127.0.0.1:{replica.port}"]):
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            scale_down_and_up(kubernetes)
            number += 1
            for page in ("/healthz", "/readyz"):
                kubelet.probe(page)
            closed = max(closed, refused(kubelet.probe("/metrics")))
            most = Use(*map(max, most, use_of(replica.process.pid)))
    after = use_of(replica.process.pid)
    with capsys.disabled():
        sys.stderr.write(
            f"\n{number} times scaled down and up; {kubelet.failed} of {kubelet.asked} probes "
            f"failed, no answer for {kubelet.silent:.1f} s at most; {closed:.0f} connections "
            f"refused\n{before} ->\n{most} at most ->\n{after}\n"
        )
    assert kubelet.silent < kubelet.patience, "the kubelet would end the controller"
    assert closed > STRANGERS
    assert most.descriptors <= before.descriptors + STRANGERS + 20
    assert most.threads <= before.threads + 4
    assert most.memory <= before.memory + MEMORY
    assert "Traceback" not in replica.log()
