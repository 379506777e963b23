"""A job leaves a node that it is to avoid, by its own pod there and nothing else, stays away from
it for the time, and uses it again afterwards: a person says so, or the controller does after the
second fault of the machine.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from kdist.recovery.avoidance import name_marker
from tests.cluster.conftest import Job
from tests.cluster.controller import installed, send
from tests.cluster.kinds import every_kind
from tests.cluster.namespace import Namespace
from tests.cluster.test_dead_node import place_bystander, workers
from tests.cluster.test_scale_and_suspend import world_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

HOSTNAME = "kubernetes.io/hostname"
SECONDS = 90.0  # for which the controller has a job avoid a node
STEPS = 80  # which take longer than that


@pytest.mark.sampled
@every_kind
def test_a_job_leaves_a_node_for_the_time_that_it_avoids_it_and_no_other_pod_does(
    namespace: Namespace, cluster: dict[str, str], calm: Job, kind: str
) -> None:
    node = min(workers(cluster))
    pinned = {HOSTNAME: node}
    namespace.apply(calm(backend=kind, nodes=1, nodeSelector=pinned, train={"steps": 1200}))
    before = namespace.until("it trains", partial(world_of, namespace, 1)) or {}
    bystander = place_bystander(namespace, node)
    namespace.kdist("recover", "digits", "--avoid", node, "--for", "60s")

    def cause() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(namespace.kdist("why", "digits", "-o", "json"))
        return found if found["cause"] == "nodes-avoided" else {}

    found = namespace.until("no node takes its pod", cause)
    assert node in found["sentence"]
    assert "--allow" in found["commands"][0]
    marker = name_marker("digits", node)
    namespace.until("a restricted pod sleeps there", partial(_is_ready, namespace, marker))
    namespace.until("the marker is gone", lambda: not namespace.get("job", marker), 120)
    after = partial(world_of, namespace, 1, before["step"])
    namespace.until("it trains on, on the node", after)
    (pod,) = namespace.pods("digits")
    assert pod["spec"]["nodeName"] == node
    assert namespace.get("pod", "bystander")["metadata"]["uid"] == bystander["metadata"]["uid"]


@every_kind
@pytest.mark.disruptive
@pytest.mark.needs("helm", "whole-cluster", "shared-volumes")
def test_the_controller_takes_a_job_from_a_machine_after_its_second_fault_and_no_other_job(
    namespace: Namespace, calm: Job, cluster: dict[str, str], kind: str
) -> None:
    with installed(namespace, avoidNodes={"faults": 2, "hours": SECONDS / 3600}):
        check_that_it_leaves_and_returns(namespace, calm, kind, min(workers(cluster)))


def check_that_it_leaves_and_returns(namespace: Namespace, calm: Job, kind: str, bad: str) -> None:
    """A job that would rather be on the bad machine has two faults there, goes on elsewhere, and
    when the time is over, starts its next pod there and ends. Another job there notices nothing.
    """
    expression = {"key": HOSTNAME, "operator": "In", "values": [bad]}
    wish = {"weight": 100, "preference": {"matchExpressions": [expression]}}
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [wish]}}
    template = {"spec": {"affinity": affinity}}
    env = [{"name": "BAD_MACHINE", "value": bad}]
    training = {"workload": "calm:Faulty", "steps": STEPS}
    document = calm(backend=kind, nodes=1, env=env, train=training, podTemplate=template)
    other = calm(
        nodes=1, nodeSelector={HOSTNAME: bad}, train={"workload": "calm:Sleepy", "steps": 10_000}
    )
    other["metadata"]["name"] = "other"
    send(namespace, other)
    namespace.until("the other job trains", lambda: [*steps_of(namespace, "other")])
    (neighbour,) = namespace.pods("other")
    send(namespace, document)

    def name_avoided() -> list[str]:
        status = namespace.get("trainingjob", "digits").get("status", {})
        return [words.split()[0] for words in status.get("avoidedNodes", [])]

    def trains_there(after: int, *, is_bad: bool) -> dict[str, Any] | None:
        nodes = [pod["spec"].get("nodeName") for pod in namespace.pods("digits")]
        is_there = len(nodes) == 1 and nodes[0] and (nodes[0] == bad) == is_bad
        return world_of(namespace, 1, after) if is_there else None

    namespace.until("the node is avoided", lambda: name_avoided() == [bad])
    assert namespace.get("job.batch", name_marker("digits", bad))["metadata"]["labels"]
    after = namespace.until("it trains elsewhere", partial(trains_there, 0, is_bad=False)) or {}
    (fault,) = after["machine_faults"]
    assert (fault["machine"], fault["faults"], fault["cause"]) == (bad, 2, "device")

    namespace.until("its time is over", lambda: not name_avoided(), 2 * SECONDS)
    (pod,) = namespace.pods("digits")
    namespace.kubectl("delete", "pod", pod["metadata"]["name"], "--timeout=120s")
    namespace.until("the node is used again", partial(trains_there, after["step"], is_bad=True))
    done = ("get", "trainingjob", "digits", "-o", "jsonpath={.status.phase}")
    namespace.until("it is done", lambda: namespace.kubectl(*done) == "Succeeded")
    ended = namespace.volume("digits")
    assert ended["done"]["step"] == STEPS
    (same,) = namespace.pods("other")
    assert same["metadata"]["uid"] == neighbour["metadata"]["uid"]
    assert {each["restarts"] for each in namespace.agents("other")} == {0}


def steps_of(namespace: Namespace, job: str) -> list[int]:
    """The steps that the agents of a job say, once they train."""
    return [each["step"] for each in namespace.agents(job) if each["step"]]


def _is_ready(namespace: Namespace, job: str) -> bool:
    return bool(namespace.get("job", job).get("status", {}).get("ready"))
