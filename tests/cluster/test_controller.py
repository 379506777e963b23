"""The controller on a real cluster, installed by the chart: a job that kubectl sends has its whole
life, notices nothing of a controller that is killed, and continues by itself after its node lost
power. These tests run alone: where the cluster serves TrainingJobs, `kdist apply` sends
one.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from functools import partial

import pytest

from kdist import backends
from kdist.manifest import TRAINING_JOB
from tests.cluster.conftest import Job
from tests.cluster.controller import find_leader, kill_leader, patch, send, wait_for
from tests.cluster.kinds import RESOURCE, every_kind
from tests.cluster.namespace import CLUSTER, Namespace
from tests.cluster.test_dead_node import (
    STEPS,
    describe_spread_job,
    digest_of_an_undisturbed_run,
    doomed,
    place_bystander,
)
from tests.cluster.test_scale_and_suspend import world_of

__all__ = ["doomed"]

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.disruptive,
    pytest.mark.needs("helm", "whole-cluster", "shared-volumes"),
    pytest.mark.timeout(1200),
]

MANY_STEPS = 1500  # of a twentieth of a second


def change_what_needs_new_pods(namespace: Namespace) -> None:
    """Change the environment; the pods have it once the job is restarted."""
    patch(namespace, env=[{"name": "COLOUR", "value": "green"}])
    wait_for(namespace, "Outdated")
    assert "env" in namespace.kubectl(
        *("get", "trainingjob", "digits", "-o"),
        'jsonpath={.status.conditions[?(@.type=="Outdated")].message}',
    )
    before = {pod["metadata"]["uid"] for pod in namespace.pods("digits")}
    patch(namespace, restartedAt="2026-05-01T12:00:00Z")

    def replaced() -> bool:
        pods = namespace.pods("digits")
        colours = [
            each.get("value")
            for pod in pods
            for each in pod["spec"]["containers"][0]["env"]
            if each["name"] == "COLOUR"
        ]
        return colours == ["green"] * 2 and not before & {pod["metadata"]["uid"] for pod in pods}

    namespace.until("new pods have the change", replaced)


@every_kind
@pytest.mark.usefixtures("controller")
def test_a_job_sent_by_kubectl_has_its_whole_life_and_outlives_its_controller(
    namespace: Namespace, calm: Job, kind: str
) -> None:
    document = calm(backend=kind, nodes={"min": 1, "max": 2}, train={"steps": MANY_STEPS})
    send(namespace, document)
    wait_for(namespace, "Accepted", 60)
    assert namespace.until("two nodes train", partial(world_of, namespace, 2))
    wait_for(namespace, "Running")

    uids = {pod["metadata"]["uid"] for pod in namespace.pods("digits")}
    keeps_pods = not backends.get(kind).scalable
    kill_leader(namespace)
    namespace.kubectl("scale", "trainingjob/digits", "--replicas=1")
    if not keeps_pods:
        wait_for(namespace, "Outdated")
        patch(namespace, restartedAt="2026-03-01T12:00:00Z")
    reported = namespace.until("one node trains", partial(world_of, namespace, 1))
    assert reported
    if keeps_pods:
        assert {pod["metadata"]["uid"] for pod in namespace.pods("digits")} <= uids

    patch(namespace, suspend=True)
    wait_for(namespace, "Suspended")
    namespace.until("no pod is left", lambda: not namespace.pods("digits"))
    restart = {} if keeps_pods else {"restartedAt": "2026-04-01T12:00:00Z"}
    patch(namespace, suspend=False, replicas=2, **restart)
    again = partial(world_of, namespace, 2, int(reported["step"]))
    assert namespace.until("two nodes train again", again)

    change_what_needs_new_pods(namespace)
    wait_for(namespace, "Complete", 400)
    _, row = namespace.kubectl("get", "trainingjobs", "-o", "wide").splitlines()
    assert row.split()[1] == "Succeeded"
    volume = namespace.volume("digits")
    assert [each["step"] for each in volume["steps"]] == list(range(1, MANY_STEPS + 1))

    namespace.kubectl("delete", "trainingjob", "digits", "--timeout=120s")
    kinds = f"{RESOURCE[kind]},pods,services,configmaps,serviceaccounts,rolebindings"
    for_it = ("get", kinds, "-l", "kdist.dev/job=digits", "-o", "name")
    namespace.until("its objects are gone", lambda: not namespace.kubectl(*for_it))
    assert namespace.find("persistentvolumeclaims"), "checkpoints are kept"


@pytest.mark.usefixtures("controller")
def test_kdist_acts_on_a_job_through_its_trainingjob(namespace: Namespace, calm: Job) -> None:
    document = calm(nodes={"min": 1, "max": 2}, train={"steps": MANY_STEPS})
    assert "trainingjob.kdist.dev/digits created" in namespace.apply(document)
    owner = dict(zip(("apiVersion", "kind"), TRAINING_JOB, strict=True))
    assert namespace.until("two nodes train", partial(world_of, namespace, 2))
    (reference,) = namespace.get("job", "digits")["metadata"]["ownerReferences"]
    assert owner.items() <= reference.items()
    namespace.kdist("scale", "digits", "--nodes=1")
    assert namespace.until("one node trains", partial(world_of, namespace, 1))
    namespace.kdist("suspend", "digits", "--timeout=3m")
    assert namespace.pods("digits") == []
    assert namespace.status("digits")["phase"] == "Suspended"
    namespace.kdist("resume", "digits")
    namespace.kdist("scale", "digits", "--nodes=2")
    namespace.kdist("restart", "digits", "--timeout=3m")
    namespace.kdist("wait", "digits", "--timeout=6m", timeout=400)
    assert "Succeeded" in namespace.kdist("get")
    namespace.kdist("delete", "digits", "--timeout=3m")
    assert namespace.get("trainingjob", "digits") == {}


LEADERS_OWN = ("job", "pytorchjob", "trainjob")
"""Kinds whose node is lost with the leading controller on it."""


def move_leader(namespace: Namespace, node: str) -> None:
    """Have the controller lead whose pod is on this node."""

    def leads_there() -> bool:
        leader = namespace.until("a controller leads", lambda: find_leader(namespace))
        if namespace.get("pod", leader)["spec"]["nodeName"] == node:
            return True
        kill_leader(namespace)
        return False

    namespace.until(f"the leader is on {node}", leads_there)


def follow_until_missed(namespace: Namespace, node: str) -> int:
    """Wait until Kubernetes misses the node; returns the last step that was done until then."""
    steps = [0]

    def is_missed() -> bool:
        steps.extend(int(each["step"] or 0) for each in namespace.agents("digits"))
        ready = 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'
        return namespace.kubectl("get", "node", node, "-o", ready) == "Unknown"

    namespace.until(f"{node} is missed", is_missed, 120)
    return max(steps)


@pytest.mark.parametrize("doomed", [0, -1], indirect=True, ids=["first", "last"])
@every_kind
@pytest.mark.usefixtures("controller")
def test_a_job_whose_node_lost_power_continues_by_itself(
    namespace: Namespace,
    calm: Job,
    doomed: str,
    kind: str,
    record_property: Callable[[str, object], None],
) -> None:
    document = describe_spread_job(calm, kind)
    weights = digest_of_an_undisturbed_run(namespace, document)
    send(namespace, document)
    assert namespace.until("two nodes train", partial(world_of, namespace, 2))
    (lost,) = (pod for pod in namespace.pods("digits") if pod["spec"]["nodeName"] == doomed)
    bystander = place_bystander(namespace, doomed)
    if kind in LEADERS_OWN:
        move_leader(namespace, doomed)
    subprocess.run([CLUSTER, "lose", doomed], check=True, capture_output=True)
    cut = time.monotonic()

    step = follow_until_missed(namespace, doomed)
    unknown = time.monotonic()
    again = partial(world_of, namespace, 2, step)
    namespace.until("two nodes train again, past the step of the cut", again, 400)
    seconds = time.monotonic() - cut
    record_property(
        "measured",
        f"{kind}, {doomed} lost power: {seconds:.0f} s to the next step, "
        f"{unknown - cut:.0f} s of them until Kubernetes missed the node",
    )
    alive = [pod for pod in namespace.pods("digits") if pod["status"]["phase"] != "Failed"]
    assert doomed not in {pod["spec"]["nodeName"] for pod in alive}
    untouched = namespace.get("pod", "bystander")
    assert untouched["metadata"]["uid"] == bystander["metadata"]["uid"]
    assert untouched["status"]["phase"] == "Running"
    events = namespace.kubectl("get", "events", "-o", "jsonpath={.items[*].message}")
    assert lost["metadata"]["name"] in events

    subprocess.run([CLUSTER, "return", doomed], check=True, capture_output=True)
    wait_for(namespace, "Complete", 400)
    volume = namespace.volume("digits")
    assert volume["done"]["weights"] == weights
    assert [each["step"] for each in volume["steps"]] == list(range(1, STEPS + 1))
