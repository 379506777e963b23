"""Machines and controllers are lost under a training. These tests run alone: what they break is
everybody's.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.cluster.conftest import Job
from tests.cluster.namespace import CLUSTER, Namespace
from tests.cluster.test_scale_and_suspend import APART, world_of

pytestmark = [pytest.mark.e2e, pytest.mark.disruptive, pytest.mark.timeout(900)]

Machines = Callable[..., str]
UNDO = {"lose": "return", "cut": "mend"}


@pytest.fixture
def machines(cluster: dict[str, str]) -> Iterator[Machines]:
    """`machines("lose", NODE)`, `machines("return", NODE)`; whatever was lost is back at the
    end.
    """
    lost: set[str] = set()

    def tell(verb: str, node: str) -> str:
        (lost.add if verb == "lose" else lost.discard)(node)
        return subprocess.run(
            [CLUSTER, verb, node], check=True, capture_output=True, text=True
        ).stdout

    yield tell
    for node in list(lost):
        tell("return", node)


def start(namespace: Namespace, calm: Job, *, strictly: bool = True, **spec: Any) -> None:
    """A calm job with one pod on each of the two nodes, at work; unless `strictly`, one node may
    take both later.
    """
    rule = {"requiredDuringSchedulingIgnoredDuringExecution": [APART]}
    wish = {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 100, "podAffinityTerm": APART}
        ]
    }
    apart = {"podAntiAffinity": rule if strictly else wish}
    namespace.apply(
        calm(podTemplate={"spec": {"affinity": apart}}, **{"train": {"steps": 3000}, **spec})
    )
    namespace.until("two nodes train", partial(world_of, namespace, 2))


def node_of(namespace: Namespace, index: int) -> str:
    return str(namespace.pods("digits")[index]["spec"]["nodeName"])


@pytest.mark.parametrize("index", [0, 1])
def test_a_lost_node_leaves_a_smaller_training_within_seconds(
    namespace: Namespace,
    calm: Job,
    machines: Machines,
    index: int,
    record_property: Callable[[str, object], None],
) -> None:
    start(namespace, calm, nodes={"min": 1, "max": 2}, joinWindowSeconds=1)
    reported = world_of(namespace, 2)
    assert reported
    began = time.monotonic()
    machines("lose", node_of(namespace, index))
    namespace.until(
        "one node trains on", partial(world_of, namespace, 1, int(reported["step"])), seconds=120
    )
    record_property("seconds", round(time.monotonic() - began, 1))


def test_a_job_that_needs_both_nodes_names_the_lost_one_and_goes_on_when_it_returns(
    namespace: Namespace, calm: Job, machines: Machines
) -> None:
    start(namespace, calm, nodes=2)
    node = node_of(namespace, 1)
    reported = world_of(namespace, 2)
    assert reported
    machines("lose", node)

    def named() -> bool:
        words = namespace.kdist("why", "digits")
        return node in words and "kubectl delete node" in words and "kdist recover" in words

    namespace.until("`kdist why` names the node and both ways out", named)
    machines("return", node)
    namespace.until("two nodes train again", partial(world_of, namespace, 2, int(reported["step"])))


def test_a_job_goes_on_elsewhere_once_its_lost_node_is_marked_out_of_service(
    namespace: Namespace, calm: Job, machines: Machines
) -> None:
    start(namespace, calm, strictly=False, nodes=2)
    node, other = node_of(namespace, 1), node_of(namespace, 0)
    assert node != other
    reported = world_of(namespace, 2)
    assert reported
    machines("lose", node)
    not_ready = ["wait", f"node/{node}", "--for=condition=Ready=Unknown", "--timeout=120s"]
    namespace.kubectl(*not_ready)
    taint = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    namespace.kubectl("taint", "node", node, taint)
    try:
        namespace.until(
            "two nodes train again", partial(world_of, namespace, 2, int(reported["step"]))
        )
        assert {pod["spec"]["nodeName"] for pod in namespace.pods("digits")} == {other}
    finally:
        namespace.kubectl("taint", "node", node, f"{taint}-")


@pytest.mark.parametrize("state", ["running", "lost"])
def test_a_job_goes_on_elsewhere_once_its_node_is_deleted_and_the_node_may_return(
    namespace: Namespace, calm: Job, machines: Machines, state: str
) -> None:
    start(namespace, calm, strictly=False, nodes=2)
    node, other = node_of(namespace, 1), node_of(namespace, 0)
    assert node != other
    reported = world_of(namespace, 2)
    assert reported
    if state == "lost":
        machines("lose", node)
    namespace.kubectl("delete", "node", node, "--wait=false")

    def elsewhere() -> bool:
        there = {pod["spec"].get("nodeName") for pod in namespace.pods("digits")} == {other}
        now = world_of(namespace, 2, int(reported["step"])) if there else None
        return now is not None and now["generation"] > reported["generation"]

    try:
        namespace.until("two nodes train again, on the other node", elsewhere)
    finally:
        machines("return", node)
    assert namespace.get("node", node)["spec"].get("taints") is None


@pytest.mark.parametrize("kind", ["jobset", "pytorchjob", "trainjob"])
def test_an_operator_that_restarts_is_not_noticed_and_the_job_ends_well(
    namespace: Namespace, calm: Job, kind: str
) -> None:
    where, operator = {
        "jobset": ("jobset-system", "jobset-controller-manager"),
        "pytorchjob": ("kubeflow", "training-operator"),
        "trainjob": ("kubeflow-system", "kubeflow-trainer-controller-manager"),
    }[kind]
    namespace.apply(calm(backend=kind, train={"steps": 400}))
    reported = namespace.until("two nodes train", partial(world_of, namespace, 2))
    assert reported
    subprocess.run(
        ["kubectl", "-n", where, "rollout", "restart", f"deployment/{operator}"],
        env=namespace.environment,
        check=True,
    )
    status = [
        "kubectl",
        "-n",
        where,
        "rollout",
        "status",
        f"deployment/{operator}",
        "--timeout=300s",
    ]
    subprocess.run(status, env=namespace.environment, check=True)
    namespace.kdist("wait", "digits", "--timeout=5m", timeout=400)
    volume = namespace.volume("digits")
    assert volume["done"]["step"] == 400
    assert [
        event["generation"] for event in volume["events"] if event["event"] == "generation"
    ] == [reported["generation"]]


def test_a_kubelet_or_a_control_plane_that_restarts_is_not_noticed(
    namespace: Namespace, calm: Job, machines: Machines
) -> None:
    start(namespace, calm, nodes=2)
    reported = world_of(namespace, 2)
    assert reported
    subprocess.run(
        ["docker", "exec", node_of(namespace, 0), "systemctl", "restart", "kubelet"], check=True
    )
    machines("lose", "kdist-control-plane")
    machines("return", "kdist-control-plane")
    after = namespace.until(
        "the training is seen again", partial(seen, namespace, int(reported["step"]))
    )
    assert after
    assert after["generation"] == reported["generation"]
    assert after["restarts"] == 0


def seen(namespace: Namespace, step: int) -> dict[str, Any] | None:
    """What an agent says, once the API server passes it on again; while it does not, None."""
    try:
        return world_of(namespace, 2, step)
    except AssertionError:
        return None
