"""A pod is taken away between the last step and the job's completion: the job succeeds, and nothing
is trained again.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from tests.cluster.conftest import Job
from tests.cluster.kinds import RESOURCE
from tests.cluster.namespace import Namespace
from tests.cluster.test_scale_and_suspend import world_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 120
# The agent is what tini, process 1, has started; a process that was brought in by `exec` is
# nobody's child there.
STOP_AGENT = """
import os, signal
for name in filter(str.isdigit, os.listdir("/proc")):
    with open(f"/proc/{name}/stat") as stat:
        parent = stat.read().rpartition(")")[2].split()[1]
    if parent == "1":
        os.kill(int(name), signal.SIGSTOP)
"""
every_kind = pytest.mark.parametrize(
    "kind",
    [kind if kind == "job" else pytest.param(kind, marks=pytest.mark.wide) for kind in RESOURCE],
)


def take_away(namespace: Namespace, pod: str) -> None:
    """Delete a pod whose processes get a second to end."""
    namespace.kubectl("delete", "pod", pod, "--grace-period=1", "--wait=false")


def trained_once(namespace: Namespace) -> dict[str, Any]:
    """Wait for the job's success; its volume, in which each step was done once and the end is
    recorded once.
    """
    namespace.kdist("wait", "digits", "--timeout=8m", timeout=500)
    assert namespace.status("digits")["phase"] == "Succeeded"
    volume = namespace.volume("digits")
    assert volume["done"]["outcome"] == "done"
    assert [step["step"] for step in volume["steps"]] == list(range(1, STEPS + 1))
    assert [event["step"] for event in volume["events"] if event["event"] == "done"] == [STEPS]
    assert volume["checkpoints"][0]["step"] == STEPS
    assert {each["state"] for each in volume["checkpoints"]} == {"verified"}
    return volume


def end_is_recorded(namespace: Namespace) -> bool:
    """Whether a rank has logged that the training is done, which it does once DONE is written."""
    logs = [namespace.kubectl("logs", pod["metadata"]["name"]) for pod in namespace.pods("digits")]
    return any(
        json.loads(line)["event"] == "done"
        for log in logs
        for line in log.splitlines()
        if line.startswith("{")
    )


@pytest.mark.sampled
@every_kind
def test_a_pod_lost_after_the_end_was_recorded_is_replaced_by_one_that_ends_at_once(
    namespace: Namespace, calm: Job, kind: str
) -> None:
    namespace.apply(calm(backend=kind, train={"steps": STEPS}))
    reported = namespace.until("both nodes train", partial(world_of, namespace, 2))
    assert reported
    # Rank 0 writes and logs the end, through its agent, which must not be the one that is stopped.
    last = next(each["pod"] for each in namespace.status("digits")["ranks"] if each["rank"] == 1)
    # its rank goes on, and the pod cannot complete
    namespace.kubectl("exec", last, "--", "python", "-c", STOP_AGENT)
    namespace.until("the end is recorded", partial(end_is_recorded, namespace))
    take_away(namespace, last)
    volume = trained_once(namespace)
    assert [
        event["generation"] for event in volume["events"] if event["event"] == "generation"
    ] == [reported["generation"]]


@pytest.mark.sampled
def test_a_pod_lost_while_the_model_is_measured_costs_no_step(
    namespace: Namespace, calm: Job
) -> None:
    namespace.apply(calm(train={"workload": "calm:Pensive", "steps": STEPS}))
    namespace.until("the last step is done", partial(world_of, namespace, 2, STEPS - 1))
    take_away(namespace, namespace.pods("digits")[-1]["metadata"]["name"])
    volume = trained_once(namespace)
    formed = [event for event in volume["events"] if event["event"] == "generation"]
    assert [event["from_step"] for event in formed] == [0, STEPS]
