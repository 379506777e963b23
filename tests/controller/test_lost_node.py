"""A node that is gone: its pods are given up by the controller, and by nobody who is not sure."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.controller.conftest import JobOf
from tests.controller.kubernetes import Kubernetes
from tests.controller.test_life import change, condition, read
from tests.controller.test_process import Start, start, until

__all__ = ["start"]

pytestmark = [pytest.mark.processes, pytest.mark.timeout(90)]


@pytest.fixture
def four_nodes(kubernetes: Kubernetes) -> Kubernetes:
    """Nodes that are ready, with agents on them that hear each other."""
    for number in range(4):
        set_node(kubernetes, number, "True", late=0.0)
        peers = {"heard": ["127.0.0.1"], "silent": [], "age_seconds": 0.5}
        kubernetes.reports[f"digits-{number}"] = {"state": "running", "peers": peers}
    return kubernetes


def set_node(kubernetes: Kubernetes, number: int, ready: str, *, late: float) -> None:
    """A node whose Lease was renewed so many seconds ago."""
    renewed = datetime.fromtimestamp(time.time() - late, UTC)
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": "2026-01-01T00:00:00Z"}
    name = {"metadata": {"name": f"node-{number}"}}
    kubernetes.put("Node", {**name, "status": {"conditions": [condition]}}, "")
    spec = {"renewTime": renewed.strftime("%Y-%m-%dT%H:%M:%S.%fZ"), "leaseDurationSeconds": 40}
    kubernetes.put("Lease", {**name, "spec": spec}, "kube-node-lease")


def lose(kubernetes: Kubernetes, *numbers: int) -> None:
    """Cut the power of nodes: their agents answer no longer, and the others do not hear them."""
    with kubernetes.at_once():
        for number in numbers:
            del kubernetes.reports[f"digits-{number}"]
        for report in kubernetes.reports.values():
            report["peers"] = {"heard": [], "silent": ["127.0.0.1"], "age_seconds": 0.5}
        for number in numbers:
            set_node(kubernetes, number, "Unknown", late=120.0)


def phase(kubernetes: Kubernetes, pod: str) -> str:
    """The phase of a pod."""
    return str(read(kubernetes, "Pod", pod)["status"]["phase"])


@pytest.mark.parametrize("refused", [False, True], ids=["accepted", "refused"])
@pytest.mark.sampled
def test_the_pod_of_a_lost_node_is_marked_as_failed_and_nothing_else_is_touched(
    four_nodes: Kubernetes, start: Start, job: JobOf, refused: bool
) -> None:
    start("first")
    four_nodes.put("TrainingJob", job())
    until(lambda: condition(four_nodes, "Running")[0] == "True")
    if refused:  # a newer spec, which leaves alone what runs
        change(four_nodes, nodes={"min": 9, "max": 2})
        until(lambda: condition(four_nodes, "Accepted")[0] == "False")
    other: dict[str, Any] = {"metadata": {"name": "other"}, "spec": {"nodeName": "node-3"}}
    four_nodes.put("Pod", {**other, "status": {"phase": "Running"}})
    lose(four_nodes, 3)
    until(lambda: phase(four_nodes, "digits-3") == "Failed")
    (disrupted,) = read(four_nodes, "Pod", "digits-3")["status"]["conditions"]
    assert (disrupted["type"], disrupted["reason"]) == ("DisruptionTarget", "NodeLost")
    assert [phase(four_nodes, f"digits-{number}") for number in range(3)] == ["Running"] * 3
    assert phase(four_nodes, "other") == "Running"


def test_nothing_is_given_up_where_most_nodes_are_silent(
    four_nodes: Kubernetes, start: Start, job: JobOf
) -> None:
    start("first")
    four_nodes.put("TrainingJob", job())
    until(lambda: condition(four_nodes, "Running")[0] == "True")
    lose(four_nodes, 1, 2, 3)
    until(lambda: "3 of 4 nodes" in read(four_nodes, "TrainingJob")["status"]["message"])
    assert [phase(four_nodes, f"digits-{number}") for number in range(4)] == ["Running"] * 4
