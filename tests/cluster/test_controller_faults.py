"""What may go wrong around the controller on a real cluster: it is killed at drawn moments, a lost
node returns while it acts, jobs are invalid, and the chart is upgraded, rolled back and
uninstalled under jobs. These tests run alone.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.charts.rules import CHART
from tests.cluster.conftest import Job
from tests.cluster.controller import (
    SELECTOR,
    kill_leader,
    patch,
    remove,
    send,
    wait_for,
    write_values,
)
from tests.cluster.helm import call_helm
from tests.cluster.namespace import CLUSTER, Namespace
from tests.cluster.test_dead_node import STEPS, describe_spread_job, doomed
from tests.cluster.test_scale_and_suspend import world_of
from tests.draw import read_seed

__all__ = ["doomed"]

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.disruptive,
    pytest.mark.needs("helm", "whole-cluster", "shared-volumes"),
    pytest.mark.timeout(3600),
]

SEED = read_seed(Path(__file__).parent)
KILLS = int(os.environ.get("KDIST_CONTROLLER_KILLS", "6"))
LONGEST = 2.0  # seconds between a change and a kill
ENDLESS = 10**6  # steps
OF_A_JOB = "kdist.dev/job=digits"


def train(namespace: Namespace, nodes: int) -> bool:
    """Whether exactly so many pods train as one group."""
    running = [pod for pod in namespace.pods("digits") if pod["status"]["phase"] == "Running"]
    return len(running) == nodes and world_of(namespace, nodes) is not None


def is_gone(namespace: Namespace) -> bool:
    """Whether nothing of the job is left but its claim."""
    kinds = "jobs,pods,services,configmaps,serviceaccounts,rolebindings"
    return not namespace.kubectl("get", kinds, "-l", OF_A_JOB, "-o", "name")


def pod_uids(namespace: Namespace) -> set[str]:
    return {str(pod["metadata"]["uid"]) for pod in namespace.pods("digits")}


Change = Callable[[], Callable[[], bool]]
"""Makes a change; what it returns becomes true."""


def changes_of(namespace: Namespace, document: dict[str, Any]) -> list[Change]:
    """The changes of a job's life, in order."""

    def apply() -> Callable[[], bool]:
        send(namespace, document)
        return partial(train, namespace, 2)

    def scale() -> Callable[[], bool]:
        namespace.kubectl("scale", "trainingjob/digits", "--replicas=1")
        return partial(train, namespace, 1)

    def suspend() -> Callable[[], bool]:
        patch(namespace, suspend=True)
        return lambda: not namespace.pods("digits")

    def resume() -> Callable[[], bool]:
        patch(namespace, suspend=False, replicas=2)
        return partial(train, namespace, 2)

    def restart() -> Callable[[], bool]:
        before = pod_uids(namespace)
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        patch(namespace, restartedAt=moment)
        return lambda: not before & pod_uids(namespace) and train(namespace, 2)

    def delete() -> Callable[[], bool]:
        namespace.kubectl("delete", "trainingjob", "digits", "--wait=false")
        return partial(is_gone, namespace)

    return [apply, scale, suspend, resume, restart, delete]


@pytest.mark.usefixtures("controller")
def test_a_controller_that_is_killed_at_any_moment_does_all_that_was_asked_once(
    namespace: Namespace, calm: Job
) -> None:
    document = calm(backend="job", nodes={"min": 1, "max": 2}, train={"steps": ENDLESS})
    chance = random.Random(SEED)
    changes = changes_of(namespace, document)
    for number, change in zip(range(KILLS), itertools.cycle(changes), strict=False):
        reached = change()
        time.sleep(chance.uniform(0, LONGEST))  # the drawn moment
        kill_leader(namespace)
        namespace.until(f"what change {number} asks for is there", reached)
        for kind in ("jobs", "services", "serviceaccounts"):
            names = [each["metadata"]["name"] for each in namespace.find(kind, OF_A_JOB)]
            assert len(names) <= 1, f"{names} after change {number}"
    namespace.kubectl("delete", "trainingjob", "digits", "--ignore-not-found", "--wait=false")
    namespace.until("nothing of the job is left", partial(is_gone, namespace))


MOMENTS = (0, 10, 20, 30, 40, 45, 50, 60, 75, 100)
"""Seconds after the cut, of which a node is missed after about 40."""
DRAWN = random.Random(SEED).choice(MOMENTS)


@pytest.mark.parametrize(
    "seconds",
    [each if each == DRAWN else pytest.param(each, marks=pytest.mark.wide) for each in MOMENTS],
)
@pytest.mark.usefixtures("controller")
def test_a_lost_node_that_returns_at_any_moment_never_makes_two_writers(
    namespace: Namespace, calm: Job, doomed: str, seconds: int
) -> None:
    send(namespace, describe_spread_job(calm, "job"))
    namespace.until("two nodes train", partial(train, namespace, 2))
    assert doomed in {pod["spec"]["nodeName"] for pod in namespace.pods("digits")}
    cut = time.monotonic()
    subprocess.run([CLUSTER, "lose", doomed], check=True, capture_output=True)
    kill_leader(namespace)
    time.sleep(max(0.0, cut + seconds - time.monotonic()))  # the moment in question
    subprocess.run([CLUSTER, "return", doomed], check=True, capture_output=True)
    wait_for(namespace, "Complete", 500)
    volume = namespace.volume("digits")
    assert [each["step"] for each in volume["steps"]] == list(range(1, STEPS + 1))

    def left() -> list[str]:
        pods = namespace.find("pods", OF_A_JOB)
        running = [pod for pod in pods if pod["status"]["phase"] == "Running"]
        return [pod["metadata"]["name"] for pod in running]

    namespace.until("no pod of the job runs, the old one included", lambda: not left())


REFUSAL = re.compile(r"is invalid:[\s*]+spec\.|unknown field \"spec\.")

INVALID: dict[str, dict[str, Any]] = {
    "nodes": {"nodes": 10_000},
    "unknown": {"nodse": 2},
    "large": {"env": [{"name": "LARGE", "value": "x" * (1 << 20)}]},
    "image": {"image": "x:1\n  command: [sh]"},
    "variable": {"env": [{"name": "A\nB", "value": "1"}]},
    "mount": {"data": [{"claim": "data", "mountPath": "/a:b"}]},
    "folder": {"code": "./src"},
    "workload": {"train": {"workload": "{{ 1 + 1 }}:X"}},
    "quantity": {"resources": {"memory": "1Gi; reboot"}},
}
"""Changes to the spec of a good job, some of them attempts to add something to its objects."""


@pytest.mark.usefixtures("controller")
def test_invalid_jobs_are_refused_or_not_accepted_and_delay_no_other(
    namespace: Namespace, calm: Job
) -> None:
    before = {pod["metadata"]["uid"] for pod in namespace.find("pods", SELECTOR)}
    good = calm(backend="job", nodes=1, code={"configMap": "code"})
    taken = []
    for name, changes in INVALID.items():
        document = {**good, "metadata": {"name": name}, "spec": {**good["spec"], **changes}}
        done = namespace.type_kubectl("create", "-f", "-", stdin=json.dumps(document))
        if done.returncode == 0:
            taken.append(name)
        else:
            assert REFUSAL.search(done.stderr), done.stderr
    send(namespace, good)
    wait_for(namespace, "Accepted", 30)
    for name in taken:
        line = ("wait", f"trainingjob/{name}", "--for=condition=Accepted=False", "--timeout=30s")
        namespace.kubectl(*line)
        message = 'jsonpath={.status.conditions[?(@.type=="Accepted")].message}'
        assert len(namespace.kubectl("get", "trainingjob", name, "-o", message)) > 20
    pods = namespace.find("pods", SELECTOR)
    assert {pod["metadata"]["uid"] for pod in pods} == before
    counts = [each["restartCount"] for pod in pods for each in pod["status"]["containerStatuses"]]
    assert counts == [0, 0]


def test_jobs_notice_nothing_of_a_chart_that_is_upgraded_rolled_back_and_uninstalled(
    namespace: Namespace, calm: Job
) -> None:
    endless = calm(backend="job", nodes={"min": 1, "max": 2}, train={"steps": ENDLESS})
    direct = {**endless, "metadata": {"name": "direct"}}
    options = write_values(namespace)
    call_helm(namespace, "install", str(CHART), *options, "--set", "controller.enabled=false")
    try:
        namespace.apply(direct, "--direct")
        namespace.until("the first job has pods", lambda: namespace.pods("direct"))
        before = [pod["metadata"]["uid"] for pod in namespace.pods("direct")]

        call_helm(namespace, "upgrade", str(CHART), *options)
        send(namespace, endless)
        namespace.until("two nodes of the second job train", partial(train, namespace, 2))
        uids = pod_uids(namespace)
        call_helm(namespace, "upgrade", str(CHART), *write_values(namespace, replicas=1))
        namespace.kubectl("scale", "trainingjob/digits", "--replicas=1")
        namespace.until("one node trains", partial(train, namespace, 1))
        assert pod_uids(namespace) <= uids

        call_helm(namespace, "rollback", "2", "--wait")
        patch(namespace, replicas=2)
        namespace.until("two nodes train again", partial(train, namespace, 2))
        call_helm(namespace, "rollback", "1", "--wait")
        call_helm(namespace, "uninstall", "--wait")
        assert namespace.get("trainingjob", "digits")["spec"]["replicas"] == 2
        assert world_of(namespace, 2), "its pods train without chart and controller"
        assert [pod["metadata"]["uid"] for pod in namespace.pods("direct")] == before
        namespace.kubectl("delete", "trainingjob", "digits", "--timeout=60s")
        namespace.until("its objects have gone with it", partial(is_gone, namespace))
    finally:
        remove(namespace)
