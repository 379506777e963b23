"""What the verbs say and refuse on a real cluster: scale, stop, restart, and the looks into a
job.
"""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kdist.agents.metrics import parse
from tests.cluster.conftest import Job
from tests.cluster.kinds import every_kind
from tests.cluster.namespace import Namespace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

LONG = {"steps": 1_000_000, "evaluate": "never", "checkpoint": {"every": {"seconds": 4}}}


def start(space: Namespace, calm: Job, backend: str = "job", **spec: Any) -> None:
    """Apply a job that would run for hours, and wait until all of its nodes train."""
    document = calm(backend=backend, train=LONG, **spec)
    space.apply(document)
    nodes = document["spec"]["nodes"]
    trains(space, nodes if isinstance(nodes, int) else nodes["max"])


def trains(space: Namespace, size: int) -> dict[str, Any]:
    """Its status, once so many ranks train."""

    def look() -> dict[str, Any]:
        status = space.status("digits")
        whole = (status["phase"], status["worldSize"]) == ("Running", size)
        return status if whole and status["step"] else {}

    return space.until(f"{size} ranks train", look)


def ledger(space: Namespace) -> list[dict[str, Any]]:
    """The run's events, as its rank 0 and its leaders wrote them down."""
    found: list[dict[str, Any]] = ask_checkpoints(space, "ledger", "/checkpoints/digits")["events"]
    return found


def ask_checkpoints(space: Namespace, *words: str) -> dict[str, Any]:
    """What the trainer's own command says of checkpoints, in a pod of the job."""
    program = ("python", "-m", "kdist_trainer.checkpoint", *words)
    said: dict[str, Any] = json.loads(space.kdist("exec", "digits", "--", *program))
    return said


def number(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    assert found, text
    return int(found[1].replace(",", ""))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "backend", ["statefulset", pytest.param("pytorchjob", marks=pytest.mark.wide)]
)
def test_a_job_grows_and_shrinks_while_it_trains_and_loses_no_step(
    namespace: Namespace, calm: Job, backend: str
) -> None:
    start(namespace, calm, backend, nodes={"min": 1, "max": 2})
    grown = namespace.kdist("scale", "digits", "--nodes", "3")
    assert "from 2 to 1:3 nodes: 3 ranks train" in grown
    assert len(namespace.pods("digits")) == 3
    assert "from 3 to 1 node: 1 rank trains" in namespace.kdist("scale", "digits", "--nodes", "1")
    assert len(namespace.pods("digits")) == 1
    events = ledger(namespace)
    begun = [event for event in events if event["event"] == "generation"]
    assert [event["world_size"] for event in begun][-2:] == [3, 1]
    reasons = {event["reason"] for event in begun}
    assert "failure" not in reasons, "what was planned counts as no failure"
    assert [event for event in events if event["event"] == "failure"] == []
    assert "has 1 node already" in namespace.kdist("scale", "digits", "--nodes", "1")


@pytest.mark.sampled
def test_a_job_of_a_fixed_size_can_be_given_another(namespace: Namespace, calm: Job) -> None:
    start(namespace, calm, nodes=2)
    assert "from 2 to 3 nodes: 3 ranks train" in namespace.kdist("scale", "digits", "--nodes", "3")
    assert "from 3 to 1 node: 1 rank trains" in namespace.kdist("scale", "digits", "--nodes", "1")


@pytest.mark.sampled
def test_what_a_scale_may_not_do_is_refused_and_changes_nothing(
    namespace: Namespace, calm: Job
) -> None:
    start(namespace, calm, nodes=1)
    before = namespace.get("configmap", "digits")["data"]
    for nodes, code in (("0", 2), ("3:2", 2), ("x", 2), ("9999", 1)):
        assert namespace.type_kdist("scale", "digits", "--nodes", nodes).returncode == code
    for where in ("server", "client"):
        reported = namespace.kdist("scale", "digits", "--nodes", "2", f"--dry-run={where}")
        assert f"{where} dry run" in reported
    assert namespace.get("configmap", "digits")["data"] == before
    assert namespace.type_kdist("scale", "other", "--nodes", "2").returncode == 4


@pytest.mark.sampled
@every_kind
def test_a_suspended_job_keeps_its_checkpoints_and_a_restart_begins_with_the_last_or_with_none(
    namespace: Namespace, calm: Job, kind: str
) -> None:
    start(namespace, calm, kind)
    suspended = namespace.kdist("suspend", "digits")
    saved = number(suspended, r"suspended; step ([\d,]+) is saved")
    assert namespace.status("digits")["phase"] == "Suspended"
    namespace.kdist("wait", "digits", "--for=suspended", "--timeout", "30s")
    listed = json.loads(namespace.kdist("checkpoints", "verify", "digits", "-o", "json"))
    assert listed["checkpoints"][0]["step"] == saved
    assert listed["checkpoints"][0]["state"] == "verified"
    assert listed["resumesFrom"] == listed["latest"] == listed["checkpoints"][0]["name"]
    assert namespace.find("pods") == [], "the pod that looked is gone"
    assert number(namespace.kdist("restart", "digits"), r"resumes after step ([\d,]+)") == saved
    assert namespace.status("digits")["phase"] == "Running"

    trains(namespace, 2)
    before = {pod["metadata"]["uid"] for pod in namespace.pods("digits")}
    assert number(namespace.kdist("restart", "digits"), r"resumes after step ([\d,]+)") > 0
    assert before.isdisjoint(pod["metadata"]["uid"] for pod in namespace.pods("digits"))
    namespace.kdist("restart", "digits", "--fresh", code=2)  # nobody is there to be asked
    said = namespace.kdist("restart", "digits", "--fresh", "--yes")
    assert "starts from scratch" in said
    aside = re.search(r"old checkpoints are in (\S+?)[:;.]? ", said + " ")
    assert aside
    kept = ask_checkpoints(namespace, "verify", aside[1].rstrip(":"))["checkpoints"]
    assert {entry["state"] for entry in kept} <= {"verified", "unfinished"}


@pytest.mark.sampled
def test_looks_into_a_running_job(namespace: Namespace, calm: Job, tmp_path: Path) -> None:
    start(namespace, calm)
    assert json.loads(namespace.kdist("why", "digits", "-o", "json"))["severity"] == "fine"
    holders = {rank["rank"]: rank["pod"] for rank in namespace.status("digits")["ranks"]}
    for rank, pod in holders.items():
        program = ("python", "-c", "import os; print(os.environ['KDIST_POD'])")
        printed = namespace.kdist("exec", "digits", "--rank", str(rank), "--", *program)
        assert printed.strip() == pod
    program = ("python", "-c", "raise SystemExit(7)")
    assert namespace.type_kdist("exec", "digits", "--", *program).returncode == 7
    assert namespace.type_kdist("exec", "digits", "--rank", "9", "--", "true").returncode == 4

    steps = {
        sample.labels["pod"]: sample.value
        for sample in parse(namespace.kdist("top", "digits", "-o", "prom"))
        if sample.name == "kdist_steps_total"
    }
    assert set(steps) == set(holders.values())
    assert min(steps.values()) > 0

    top = json.loads(namespace.kdist("top", "digits", "-o", "json"))
    assert [row["rank"] for row in top["ranks"]] == [0, 1]
    assert all(row["phases"]["backward"] > 0 and row["stepSeconds"] > 0 for row in top["ranks"])

    namespace.until(
        "a checkpoint is listed", lambda: namespace.kdist("checkpoints", "digits", "-o", "name")
    )

    output = tmp_path / "forward"
    words = ("port-forward", "digits", ":9401", "--rank", "1")
    forwarding = namespace.start_kdist(*words, output=output)
    shown = re.compile(r"127\.0\.0\.1:(\d+) -> (\S+):9401")
    try:
        said: Any = namespace.until("it forwards", lambda: shown.search(output.read_text()))
        assert said[2] == holders[1]
        with urllib.request.urlopen(f"http://127.0.0.1:{said[1]}/status", timeout=20) as answer:
            assert json.load(answer)["job"] == "digits"
    finally:
        forwarding.terminate()
        forwarding.wait(30)


@pytest.mark.wide
@pytest.mark.parametrize("backend", ["jobset", "trainjob"])
def test_a_kind_that_cannot_be_scaled_says_why_and_what_can(
    namespace: Namespace, calm: Job, backend: str
) -> None:
    start(namespace, calm, backend)
    done = namespace.type_kdist("scale", "digits", "--nodes", "3")
    assert done.returncode == 1
    assert "cannot be scaled while it exists" in done.stderr
    assert "backend: job can be scaled while it runs" in done.stderr
    assert namespace.status("digits")["nodes"]["max"] == 2
