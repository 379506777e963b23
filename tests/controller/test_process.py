"""The controller as a process: it leads, is relieved, says how it is, and ends when asked to."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.cli.cluster.api import Api, Asked, Reply, refusal, write_kubeconfig
from tests.controller.conftest import JobOf
from tests.controller.kubernetes import Kubernetes
from tests.controller.rights import TOKEN, right_of
from tests.controller.test_life import END, change

pytestmark = [pytest.mark.processes, pytest.mark.timeout(90)]
T = TypeVar("T")


def until(condition: Callable[[], T]) -> T:
    """The first true answer; what never comes, the test's own time limit ends."""
    while not (answer := condition()):
        time.sleep(0.05)
    return answer


class Replica:
    """One process of the controller."""

    def __init__(self, folder: Path, api: Api, identity: str) -> None:
        kubeconfig = folder / "kubeconfig"
        write_kubeconfig(kubeconfig, api.url, user={"token": TOKEN})
        self._log = folder / f"{identity}.log"
        options = ["--identity", identity, "--metrics-port", "0", "--agents", "proxy"]
        options += ["--lease-namespace", "kdist"]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kdist_controller", *options],
                env=os.environ | {"KUBECONFIG": str(kubeconfig)},
                stderr=log,
            )
        found = until(lambda: re.search(r"serving on port (\d+)", self.log()))
        self.port = int(found[1]) if found else 0

    def log(self) -> str:
        """What it has logged so far."""
        return self._log.read_text()

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a page."""
        url = f"http://127.0.0.1:{self.port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, ""

    def leads(self) -> bool:
        """Whether it says that it leads."""
        return "kdist_controller_leader 1.0" in self.get("/metrics")[1]


Start = Callable[[str], Replica]


@pytest.fixture
def start(tmp_path: Path, api: Api) -> Iterator[Start]:
    """Start a replica of this identity; it ends with the test."""
    started: list[Replica] = []

    def begin(identity: str) -> Replica:
        started.append(Replica(tmp_path, api, identity))
        return started[-1]

    yield begin
    for replica in started:
        with suppress(ProcessLookupError):
            replica.process.kill()
        replica.process.wait()


def test_a_replica_makes_the_objects_and_tells_how_it_is(
    start: Start, kubernetes: Kubernetes, job: JobOf
) -> None:
    replica = start("first")
    kubernetes.put("TrainingJob", job())
    until(lambda: ("Pod", "digits-3") in kubernetes.names())
    until(lambda: 'kdist_controller_jobs{phase="Running"} 1.0' in replica.get("/metrics")[1])
    assert replica.get("/healthz")[0] == 200
    assert replica.get("/readyz")[0] == 200
    assert replica.get("/other")[0] == 404


@pytest.mark.sampled
def test_a_standby_takes_over_at_once_when_the_leader_is_told_to_end(
    start: Start, kubernetes: Kubernetes, job: JobOf
) -> None:
    first = start("first")
    until(first.leads)
    second = start("second")
    until(lambda: second.get("/readyz")[0] == 200)
    assert not second.leads()
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(30) == 0
    until(second.leads)
    kubernetes.put("TrainingJob", job())
    until(lambda: ("Pod", "digits-3") in kubernetes.names())


@pytest.mark.sampled
def test_a_standby_takes_over_when_the_leader_is_killed(
    start: Start, kubernetes: Kubernetes, job: JobOf
) -> None:
    first = start("first")
    until(first.leads)
    second = start("second")
    first.process.kill()
    kubernetes.put("TrainingJob", job())
    until(lambda: ("Pod", "digits-3") in kubernetes.names())
    assert second.leads()


@pytest.mark.sampled
def test_a_leader_that_cannot_renew_its_lease_ends(start: Start, api: Api) -> None:
    replica = start("first")
    until(replica.leads)
    until(lambda: replica.get("/readyz")[0] == 200)
    api.close()
    assert replica.process.wait(60) == 1
    assert "the Lease is lost" in replica.log()


def test_a_bad_job_delays_no_other(start: Start, kubernetes: Kubernetes, job: JobOf) -> None:
    kubernetes.put("TrainingJob", job("bad", podTemplate={"spec": {"volumes": "none"}}))
    kubernetes.put("TrainingJob", job("worse", nodes="many"))
    kubernetes.put("TrainingJob", job("digits"))
    replica = start("first")
    until(lambda: ("Pod", "digits-3") in kubernetes.names())
    for name in ("bad", "worse"):
        found = until(partial(_status, kubernetes, name))
        accepted = next(each for each in found["conditions"] if each["type"] == "Accepted")
        assert accepted["status"] == "False", name
    assert replica.get("/healthz")[0] == 200
    assert "Traceback" not in replica.log()


@pytest.mark.sampled
def test_a_job_whose_objects_are_refused_counts_as_failing_until_they_are_made(
    start: Start, api: Api, kubernetes: Kubernetes, job: JobOf
) -> None:
    answer, is_full = api.answer, True

    def limit(asked: Asked) -> Reply:
        if is_full and asked.method == "PATCH" and "/services/" in asked.path:
            return refusal(403, "exceeded quota: services", "Forbidden")
        return answer(asked)

    api.answer = limit
    kubernetes.put("TrainingJob", job())
    replica = start("first")
    until(lambda: "kdist_controller_failing_jobs 1.0" in replica.get("/metrics")[1])
    is_full = False
    until(lambda: "kdist_controller_failing_jobs 0.0" in replica.get("/metrics")[1])
    assert ("Pod", "digits-3") in kubernetes.names()


def _status(kubernetes: Kubernetes, name: str) -> dict[str, Any]:
    return dict((kubernetes.find("TrainingJob", name) or {}).get("status") or {})


def test_without_a_cluster_it_says_so_and_ends(tmp_path: Path) -> None:
    environment = os.environ | {"KUBECONFIG": str(tmp_path / "none")}
    done = subprocess.run(
        [sys.executable, "-m", "kdist_controller"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5
    assert "Traceback" not in done.stderr


def test_it_asks_for_nothing_that_its_rights_do_not_give(
    start: Start, kubernetes: Kubernetes, api: Api, job: JobOf
) -> None:
    start("first")
    kubernetes.put("TrainingJob", job(checkpoints={"size": "1Gi"}))
    until(lambda: ("Pod", "digits-3") in kubernetes.names())
    change(kubernetes, replicas=2)
    until(lambda: ("Pod", "digits-3") not in kubernetes.names())
    change(kubernetes, suspend=True)
    until(lambda: ("Pod", "digits-0") not in kubernetes.names())
    change(kubernetes, suspend=False, restartedAt="2026-05-01T12:00:00Z")
    until(lambda: ("Pod", "digits-1") in kubernetes.names())
    end = {**END, "lastTransitionTime": "2026-01-01T00:00:00Z"}
    kubernetes.put("Job", {"metadata": {"name": "digits"}, "status": {"conditions": [end]}})
    until(lambda: ("Role", "digits") not in kubernetes.names())
    asked = set(map(right_of, api.asked))
    assert {("patch", "batch", "jobs"), ("delete", "batch", "jobs")} <= asked
