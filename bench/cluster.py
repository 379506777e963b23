"""How long a training in a cluster stalls when it loses a rank, pods or a machine: the time between
two steps of a rank that survives.

    eval "$(tests/cluster/cluster env)"
    python -m bench.cluster [ROUNDS]

An elastic job of one to three pods on the two worker nodes of the tests' cluster, without a volume:
what survives continues in place. Each loss has a job of its own, since a Job replaces failed pods
more and more slowly. A step takes 50 ms. The clocks of the pods are that of this machine.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import yaml

from bench.table import columns, quantile, title

T = TypeVar("T")

ROUNDS = 5
PODS = 3
STEPS_BEFORE = 20
PATIENCE = 300.0
NAMESPACE = "kdist-bench"
CLUSTER = str(Path(__file__).parents[1] / "tests" / "cluster" / "cluster")
KDIST = str(Path(sys.executable).with_name("kdist"))
LINE = re.compile(r"finished (\d+) (\d+) (\d+) ([\d.]+)$", re.MULTILINE)


class Finished(NamedTuple):
    """A rank has finished a step."""

    pid: int
    """In its pod."""
    generation: int
    world_size: int
    time: float


class Pod(NamedTuple):
    """A pod of the job with its steps, oldest first."""

    name: str
    number: int
    node: str
    steps: list[Finished]


def main(rounds: int) -> None:
    """Measure and print."""
    title(f"Recovery in place in a cluster: pause of the ranks that survive, {rounds} of each")
    lines = []
    for name, lose in LOSSES.items():
        seconds = [measure(lose) for _ in range(rounds)]
        middle, late = quantile(seconds, 0.5), quantile(seconds, 0.95)
        lines.append((name, f"{middle:.2f} s", f"{late:.2f} s"))
    columns(("", "p50", "p95"), lines)


def measure(lose: Callable[[list[Pod]], Callable[[], object]]) -> float:
    """The longest pause of the ranks that survive a loss, in a job of its own."""
    kubectl("create", "namespace", NAMESPACE)
    try:
        apply_job()
        before = wait_for_group()
        generation, began = before[0].steps[-1].generation, time.time()
        restore = lose(before)
        try:
            survivors = wait_for(lambda: find_survivors(before, generation))
            return max(longest_pause(pod.steps, after=began) for pod in survivors)
        finally:
            restore()
    finally:
        kubectl("delete", "namespace", NAMESPACE)


def apply_job() -> None:
    """Send the job."""
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"kdist.dev/job": "bench"}},
    }
    spec = {
        "image": os.environ["KDIST_IMAGE"],
        "backend": "job",
        "code": str(Path(__file__).with_name("code")),
        "nodes": {"min": 1, "max": PODS},
        "maxRestarts": 1000,
        "resources": {"cpu": 0.3, "memory": "1Gi"},
        "podTemplate": {"spec": {"topologySpreadConstraints": [spread]}},
        "train": {
            "workload": "noted:Noted",
            "steps": 10**6,
            "globalBatch": 96,
            "evaluate": "never",
            "recovery": "inPlace",
        },
    }
    job = {
        "apiVersion": "kdist.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "bench"},
        "spec": spec,
    }
    command = [KDIST, "apply", "-", "-n", NAMESPACE]
    subprocess.run(command, input=yaml.safe_dump(job), text=True, check=True, capture_output=True)


def lose_rank(pods: list[Pod]) -> Callable[[], object]:
    """Kill the rank of the last pod."""
    execute(pods[-1], f"kill -9 {pods[-1].steps[-1].pid}")
    return lambda: None


def lose_first(pods: list[Pod]) -> Callable[[], object]:
    """Kill all processes of pod 0."""
    execute(pods[0], "kill -9 -1")
    return lambda: None


def lose_two(pods: list[Pod]) -> Callable[[], object]:
    """Kill all processes of two pods."""
    for pod in pods[1:]:
        execute(pod, "kill -9 -1")
    return lambda: None


def lose_machine(pods: list[Pod]) -> Callable[[], object]:
    """Cut the power of the machine of the last pod that is not alone."""
    node = pods[-1].node
    subprocess.run([CLUSTER, "lose", node], check=True)
    return lambda: subprocess.run([CLUSTER, "return", node], check=True)


LOSSES = {
    "a rank is killed": lose_rank,
    "pod 0 is killed": lose_first,
    "two pods of three are killed": lose_two,
    "a machine loses its power": lose_machine,
}


def wait_for_group() -> list[Pod]:
    """Wait for a group with all pods that has lasted for some steps; returns the pods in the order
    of their numbers.
    """

    def lasts() -> list[Pod]:
        pods = find_pods()
        last = {pod.steps[-1][1:3] for pod in pods if pod.steps}
        if len(pods) < PODS or len(last) != 1 or not all(pod.steps for pod in pods):
            return []
        ((generation, size),) = last
        steps = [sum(step.generation == generation for step in pod.steps) for pod in pods]
        ready = size == PODS and min(steps) > STEPS_BEFORE
        return pods if ready else []

    return wait_for(lasts)


def find_survivors(before: list[Pod], generation: int) -> list[Pod]:
    """The pods whose rank has finished a step in a later generation, in the process that it had."""
    pids = {pod.name: pod.steps[-1].pid for pod in before}
    return [
        pod
        for pod in find_pods()
        if pod.steps
        and pod.steps[-1].generation > generation
        and pod.steps[-1].pid == pids.get(pod.name)
    ]


def longest_pause(steps: list[Finished], *, after: float) -> float:
    """The longest time between two steps, of those that ended after a moment."""
    pairs = itertools.pairwise(step.time for step in steps)
    return max(end - start for start, end in pairs if end > after)


def find_pods() -> list[Pod]:
    """The running pods on machines that answer."""
    found = []
    answer = kubectl("get", "pods", "-l", "kdist.dev/job=bench", "-o", "json")
    for item in json.loads(answer)["items"]:
        name, annotations = item["metadata"]["name"], item["metadata"]["annotations"]
        number = int(annotations["batch.kubernetes.io/job-completion-index"])
        node = item["spec"].get("nodeName")
        if item["status"]["phase"] == "Running" and "deletionTimestamp" not in item["metadata"]:
            found.append(Pod(name, number, node, read_steps(name)))
    return sorted(found, key=lambda pod: pod.number)


def read_steps(pod: str) -> list[Finished]:
    """The steps in the log of a pod, of the last minute; none if its machine does not answer."""
    try:
        log = kubectl("logs", pod, "--since=60s", timeout=5)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return []
    return [
        Finished(int(pid), int(generation), int(size), float(moment))
        for pid, generation, size, moment in LINE.findall(log)
    ]


def execute(pod: Pod, command: str) -> None:
    """Run a shell command in a pod, which may kill itself."""
    words = ["kubectl", "-n", NAMESPACE, "exec", pod.name, "--", "sh", "-c", command]
    subprocess.run(words, capture_output=True, check=False)


def kubectl(*words: str, timeout: float | None = None) -> str:
    """What kubectl prints. Raises `CalledProcessError`, and `TimeoutExpired` if it is late."""
    command = ["kubectl", "-n", NAMESPACE, *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=timeout
    ).stdout


def wait_for(condition: Callable[[], T]) -> T:
    """Wait until it returns something true. Raises `RuntimeError` if it is late."""
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        if time.monotonic() > end:
            raise RuntimeError(f"the training does not go on\n{kubectl('get', 'pods')}")
        time.sleep(0.2)
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)
