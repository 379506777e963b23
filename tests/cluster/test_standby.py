"""A pod that stands by takes the place of one that is lost, without a restart of the others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.conftest import Job
from tests.cluster.namespace import Namespace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
NODES = {"min": 2, "max": 2, "standby": 1}


def states(namespace: Namespace) -> dict[str, str]:
    """The states of the pods by their names."""
    return {pod["name"]: pod["state"] for pod in namespace.status("digits")["pods"]}


def training(namespace: Namespace, generation: int) -> list[dict[str, Any]]:
    """What the agents of a generation of two ranks say, once both have done a step in it."""
    found = [each for each in namespace.agents("digits") if each["generation"] == generation]
    return found if len(found) == 2 and all(each["step"] for each in found) else []


@pytest.mark.sampled
def test_a_pod_that_stands_by_takes_the_place_of_a_lost_one(
    namespace: Namespace, calm: Job
) -> None:
    namespace.apply(calm(nodes=NODES, train={"steps": 600}))
    namespace.until("two nodes train", lambda: training(namespace, 1))
    namespace.until("a pod stands by", lambda: "Standby" in states(namespace).values())
    before = namespace.status("digits")
    assert before["nodes"] == {"ready": 2, "min": 2, "max": 2}
    lost = next(name for name, state in states(namespace).items() if state == "Running")
    namespace.kubectl("delete", "pod", lost, "--grace-period=0", "--force")
    namespace.until("the next group trains", lambda: training(namespace, 2))
    namespace.kdist("wait", "digits", "--timeout=6m", timeout=400)
    ended = namespace.volume("digits")
    assert [each["step"] for each in ended["steps"]] == list(range(1, 601))
    second = [each["nodes"] for each in ended["events"] if each["event"] == "generation"][1]
    assert sorted(second) == sorted({pod["name"] for pod in before["pods"]} - {lost})
    assert len({line["generation"] for line in ended["steps"]}) == 2
