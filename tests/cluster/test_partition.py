"""A node is cut off with a whole group on it, and another group is started elsewhere: one of them
commits, the other ends.
"""

from __future__ import annotations

import json
import subprocess
from functools import partial
from typing import Any

import pytest

from tests.cluster.conftest import Job
from tests.cluster.namespace import Namespace
from tests.cluster.test_nodes import Machines, machines
from tests.cluster.test_scale_and_suspend import APART, world_of

pytestmark = [pytest.mark.e2e, pytest.mark.disruptive, pytest.mark.timeout(900)]

__all__ = ["machines"]  # a fixture
PEERS_LOST = 201
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"


def containers(namespace: Namespace, node: str) -> dict[str, dict[str, Any]]:
    """State of the training's containers on a node, by pod, as its own runtime tells it."""
    crictl = ["docker", "exec", node, "crictl"]
    labels = [
        "--label",
        f"io.kubernetes.pod.namespace={namespace.name}",
        "--label",
        "io.kubernetes.container.name=trainer",
    ]
    listed = subprocess.run(
        [*crictl, "ps", "-a", "-q", *labels], check=True, capture_output=True, text=True
    ).stdout.split()
    reported = [
        json.loads(
            subprocess.run(
                [*crictl, "inspect", each], check=True, capture_output=True, text=True
            ).stdout
        )["status"]
        for each in listed
    ]
    return {status["labels"]["io.kubernetes.pod.name"]: status for status in reported}


def test_of_two_groups_of_one_run_the_later_one_commits_and_the_other_ends(
    namespace: Namespace, calm: Job, machines: Machines
) -> None:
    together = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [APART]}}
    spec = {"affinity": together}
    namespace.apply(
        calm(podTemplate={"spec": spec}, rendezvousTimeoutSeconds=75, train={"steps": 10_000})
    )
    reported = namespace.until("two nodes train", partial(world_of, namespace, 2, 25))
    assert reported
    (node,) = {pod["spec"]["nodeName"] for pod in namespace.pods("digits")}
    old = [
        pod["metadata"]["name"]
        for pod in namespace.pods("digits")
        if pod["status"]["phase"] == "Running"
    ]

    machines("cut", node)
    try:
        namespace.kubectl("wait", f"node/{node}", "--for=condition=Ready=Unknown", "--timeout=120s")
        # which says that nothing runs there, and is not true
        namespace.kubectl("taint", "node", node, OUT_OF_SERVICE)
        new = namespace.until("two nodes train elsewhere", partial(world_of, namespace, 2, 25))
        assert new
        assert new["generation"] > reported["generation"]
        assert {pod["spec"]["nodeName"] for pod in namespace.pods("digits")} != {node}

        def codes() -> list[int]:
            there = containers(namespace, node)
            return [
                there[pod]["exitCode"] for pod in old if there[pod]["state"] == "CONTAINER_EXITED"
            ]

        namespace.until("the group that was cut off has ended", lambda: len(codes()) == len(old))
        assert codes() == [PEERS_LOST, PEERS_LOST]
    finally:
        machines("mend", node)
        namespace.kubectl("taint", "node", node, f"{OUT_OF_SERVICE}-")

    namespace.until("the other trains on", partial(world_of, namespace, 2, int(new["step"])))
    namespace.kdist("suspend", "digits", "--timeout=3m")
    volume = namespace.volume("digits")
    newest = volume["checkpoints"][0]
    assert newest["epoch"] == new["generation"]
    assert newest["name"] == volume["latest"] == volume["resumesFrom"]
    assert {each["state"] for each in volume["checkpoints"]} <= {"verified", "superseded"}
    assert volume["done"] is None
