"""During an outage of jobs of all kinds, `kdist why` and the TrainingJob name what was done, or say
that it is not known, and never what only follows from it. These tests run alone.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cluster.conftest import Job
from tests.cluster.controller import installed
from tests.cluster.fleet import RESULTS, Fleet, Look, judge, tabulate
from tests.cluster.kinds import RESOURCE
from tests.cluster.namespace import CLUSTER, Namespace
from tests.cluster.test_dead_node import doomed, workers
from tests.draw import read_seed

__all__ = ["doomed"]

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.wide,
    pytest.mark.disruptive,
    pytest.mark.needs("helm", "whole-cluster", "shared-volumes"),
    pytest.mark.timeout(3600),
]

FEW_CORES = 4
"""With fewer, three kinds are drawn: ten pods that start at once would take minutes."""
SEED = read_seed(Path(__file__).parent)
ROUNDS = 7
"""Of looks at what does not mend by itself."""
MOST = 60
LONGEST = 160  # characters of a sentence that is shown
REGISTRY = "kdist-registry"
IN_CONTROL_PLANE = ("docker", "exec", "kdist-control-plane", "pkill")

# The kernel kills what has the highest score first: the training, and not one of many small ones.
GREEDY = """
import os, time
for pid in filter(str.isdigit, os.listdir("/proc")):
    if int(pid) != os.getpid():
        with open(f"/proc/{pid}/oom_score_adj", "w") as score:
            score.write("1000")
for _ in range(32):
    if os.fork() == 0:
        taken = bytearray(48 << 20)
        time.sleep(60)
        os._exit(0)
time.sleep(60)
"""

# Sentences that name what was done, and nothing that follows from it.
POD = r"^pod \S+ (is being deleted|was deleted|is new, made)|^the pod of index \d+ exists no longer"
DRAIN = rf"{POD}|^\S+ was evicted from node"
NODE = (
    r"^node \S+ does not answer|^pod \S+ (on node \S+ does not answer|ended with its node)"
    r"|: its node was tainted or stopped responding"
)
CONFIG_MAP = r"^ConfigMap \S+ does not exist|^configmap \S+ does not exist|ConfigMap was deleted"
ACCOUNT = r"^service account \S+ (does not exist|was deleted)|ServiceAccount was deleted"
ROLE = r"the Role or the RoleBinding"
RESTART = r"starts again, as asked|its pods save and end, then"
IMAGE = r"^the image \S+ .*(registry|pulled)"
MEMORY = r"used more memory than the limit"
SERVER = r"the API server (at \S+ )?does not answer|apiserver is shutting|known HTTP paths"


class Phase(NamedTuple):
    """A part of an outage: what is done, and how it is named. `rounds`: of looks; 0 until all jobs
    train again.
    """

    name: str
    act: Callable[[Fleet], None]
    named: str
    rounds: int = 0


def choose_kinds() -> list[str]:
    """The kinds that go through all outages together."""
    kinds = list(RESOURCE)
    few = (os.cpu_count() or 1) < FEW_CORES
    return random.Random(SEED).sample(kinds, 3) if few else kinds


def delete_pod(*how: str) -> Callable[[Fleet], None]:
    """Delete the first pod of every job."""

    def act(fleet: Fleet) -> None:
        fleet.each(
            lambda kind: fleet.namespace.kubectl(
                "delete", "pod", fleet.pods(kind)[0], "--wait=false", *how
            )
        )

    return act


def delete(what: str) -> Callable[[Fleet], None]:
    """Delete the objects of this kind of every job."""

    def act(fleet: Fleet) -> None:
        fleet.each(
            lambda kind: fleet.namespace.kubectl("delete", what, "-l", f"kdist.dev/job={kind}")
        )

    return act


def apply(fleet: Fleet) -> None:
    fleet.each(fleet.apply)


def restart(fleet: Fleet) -> None:
    fleet.each(lambda kind: fleet.namespace.kdist("restart", kind, "--timeout=8m", timeout=500))


def spread(fleet: Fleet, node: str) -> None:
    """Restart the jobs that have no pod on this node, such as after it was drained."""

    def act(kind: str) -> None:
        pods = fleet.namespace.pods(kind)
        alive = [pod for pod in pods if pod["status"]["phase"] == "Running"]
        if node not in {pod["spec"]["nodeName"] for pod in alive}:
            fleet.namespace.kdist("restart", kind, "--timeout=8m", timeout=500)

    fleet.each(act)


def exhaust_memory(fleet: Fleet) -> None:
    """Take more memory than the limit in the second pod of every job, until it is killed."""
    fleet.each(
        lambda kind: fleet.namespace.type_kubectl(
            "exec", fleet.pods(kind)[1], "--", "python", "-c", GREEDY
        )
    )


def drain(fleet: Fleet) -> None:
    """`kubectl drain` of the second worker, for the pods of the jobs."""
    (node,) = workers(fleet.namespace.environment)[1:]
    fleet.namespace.kubectl(
        *("drain", node, "--pod-selector=kdist.dev/job", "--force", "--timeout=180s"),
        *("--ignore-daemonsets", "--delete-emptydir-data"),
    )


def undo_drain(fleet: Fleet) -> None:
    (node,) = workers(fleet.namespace.environment)[1:]
    fleet.namespace.kubectl("uncordon", node)


def signal_server(name: str) -> Callable[[Fleet], None]:
    """Send a signal to the API server."""

    def act(_: Fleet) -> None:
        _type(*IN_CONTROL_PLANE, f"-{name}", "-x", "kube-apiserver")

    return act


def stop_registry(fleet: Fleet) -> None:
    """Stop the registry, and delete a pod of every job, whose successor needs it."""
    _type("docker", "stop", "-t", "1", REGISTRY)
    delete_pod()(fleet)


def start_registry(_: Fleet) -> None:
    _type("docker", "start", REGISTRY)


def lose(node: str) -> Callable[[Fleet], None]:
    return lambda _: _type(str(CLUSTER), "lose", node)


def bring_back(node: str) -> Callable[[Fleet], None]:
    return lambda _: _type(str(CLUSTER), "return", node)


def _type(*line: str) -> None:
    subprocess.run(line, check=True, capture_output=True)


def apply_and_restart(fleet: Fleet) -> None:
    apply(fleet)
    restart(fleet)


def delete_config_maps_and_pod(fleet: Fleet) -> None:
    delete("configmaps")(fleet)
    delete_pod()(fleet)


OUTAGES: dict[str, list[Phase]] = {
    "pod": [Phase("pod deleted", delete_pod(), POD)],
    "forced": [Phase("pod deleted by force", delete_pod("--grace-period=0", "--force"), POD)],
    "configmaps": [
        Phase("ConfigMaps deleted", delete("configmaps"), CONFIG_MAP, ROUNDS),
        Phase("ConfigMaps applied again", apply, CONFIG_MAP),
    ],
    "configmaps-and-pod": [
        Phase(
            "ConfigMaps and a pod deleted", delete_config_maps_and_pod, rf"{CONFIG_MAP}|{POD}", 7
        ),
        Phase("ConfigMaps applied again, a pod short", apply, rf"{CONFIG_MAP}|{POD}"),
    ],
    "account": [
        Phase("ServiceAccount deleted", delete("serviceaccounts"), ACCOUNT, ROUNDS),
        Phase("applied again and restarted", apply_and_restart, rf"{ACCOUNT}|{RESTART}"),
    ],
    "role": [
        Phase("Role deleted", delete("roles"), ROLE, ROUNDS),
        Phase("Role applied again", apply, ROLE),
    ],
    "restart": [Phase("restart by user", restart, RESTART)],
    "memory": [Phase("out of memory", exhaust_memory, MEMORY)],
    "image": [
        Phase("image cannot be pulled", stop_registry, rf"{IMAGE}|{POD}", 12),
        Phase("registry is back", start_registry, rf"{IMAGE}|{POD}"),
    ],
    "drain": [Phase("drain", drain, DRAIN), Phase("uncordon", undo_drain, DRAIN)],
    "server": [
        Phase("API server paused", signal_server("STOP"), SERVER, ROUNDS),
        Phase("API server goes on", signal_server("CONT"), SERVER),
    ],
}
NODE_ROUNDS = 14
"""More than the 40 s until Kubernetes misses a node."""


@pytest.fixture(scope="module", params=["direct", "controller"])
def fleet(
    request: pytest.FixtureRequest,
    cluster: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Fleet]:
    """A job of each kind, for all outages: one that leaves its job ill is another one's trouble
    only for as long as it takes to send it again.
    """
    space = Namespace(f"e2e-outages-{request.param}", tmp_path_factory.mktemp("home"), cluster)
    space.create()
    try:
        if request.param == "direct":
            yield Fleet(space, choose_kinds(), controlled=False)
        else:
            with installed(space):
                yield Fleet(space, choose_kinds(), controlled=True)
    finally:
        space.remove()


@pytest.fixture
def whole(cluster: dict[str, str]) -> Iterator[None]:
    """At the end all runs again that a test may have stopped."""
    yield
    subprocess.run([*IN_CONTROL_PLANE, "-CONT", "-x", "kube-apiserver"], check=False)
    subprocess.run(["docker", "start", REGISTRY], check=False, capture_output=True)
    for node in workers(cluster):
        subprocess.run(["kubectl", "uncordon", node], env=cluster, check=False, capture_output=True)


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("outage", OUTAGES)
def test_a_look_during_an_outage_names_the_event_and_never_a_consequence(
    fleet: Fleet, calm: Job, outage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert go_through(fleet, calm, OUTAGES[outage], capsys) == []


def test_a_look_while_a_node_is_off_and_comes_back_names_the_event_and_never_a_consequence(
    fleet: Fleet, calm: Job, doomed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    phases = [
        Phase("node off", lose(doomed), NODE, NODE_ROUNDS),
        Phase("node back", bring_back(doomed), NODE),
    ]
    fleet.settle(calm)
    spread(fleet, doomed)
    assert go_through(fleet, calm, phases, capsys) == []


def go_through(
    fleet: Fleet, calm: Job, phases: list[Phase], capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """Go through all phases of an outage, whatever the looks say; tell what they were. Returns the
    looks that named a consequence, and the phases after which not all jobs train.
    """
    fleet.settle(calm)
    wrong: list[str] = []
    for phase in phases:
        seen, whole = fleet.watch(phase.act, rounds=phase.rounds, most=MOST)
        with capsys.disabled():
            sys.stdout.write(describe(phase, seen, controlled=fleet.controlled))
        wrong += [
            f"{phase.name}: {look}"
            for look in dict.fromkeys(each for one in seen for each in one)
            if judge(look, phase.named) == "consequence"
        ]
        told = [each for one in seen for each in one if each.source == "why"]
        if phase.rounds and not any(judge(look, phase.named) == "event" for look in told):
            wrong.append(f"{phase.name}: never named")
        if not (phase.rounds or whole):
            wrong.append(f"{phase.name}: not all jobs train again: {seen[-1]}")
    return wrong


def describe(phase: Phase, seen: list[list[Look]], *, controlled: bool) -> str:
    """The row of the table for each source, and the sentences that differ by more than numbers."""
    lines = [f"\n{phase.name}, {'controller' if controlled else 'direct'}: {len(seen)} rounds"]
    for source, row in tabulate(seen, phase.named).items():
        counts = ", ".join(f"{result} {row[result]}" for result in RESULTS)
        lines.append(f"  {source:6} {counts}")
    said: dict[str, int] = {}
    for look in (each for one in seen for each in one):
        result = judge(look, phase.named)
        words = re.sub(r"\d+(\.\d+)?", "N", look.sentence)[:LONGEST]
        key = f"    {result:11} {look.source:6} {look.kind:11} {look.cause}: {words}"
        said[key] = said.get(key, 0) + 1
    return "\n".join([*lines, *(f"{key} ({times})" for key, times in said.items())]) + "\n"
