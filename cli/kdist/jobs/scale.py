"""Scale: other bounds for the number of nodes, while the job runs.

First the agents are told the new bounds, then the number of pods changes: so no agent takes a
newcomer for a stranger or waits for one that will not come. Nodes that join are let in by plan, at
a step that all have saved; nodes that leave save first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from kdist import rbac
from kdist.agent_metrics import AgentSample
from kdist.errors import KdistError, UsageError
from kdist.jobs import agents, job, suspend, wait
from kdist.jobs.job import ClusterJob
from kdist.jobs.wait import Tell
from kdist.status import Pod

_BOUNDS_SECONDS = 120.0
_TOUCH: Final = "kdist.dev/nodes"


def read_bounds(text: str, target: ClusterJob) -> tuple[int, int]:
    """What `--nodes` asks for, as (min, max). One number keeps an elastic job elastic: its min
    stays where it can.

    Raises `UsageError` for anything but N or MIN:MAX.
    """
    found = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", text)
    if found is None or int(found[1]) < 1 or (found[2] and int(found[2]) < int(found[1])):
        raise UsageError(f"--nodes takes a number from 1 or MIN:MAX, found `{text}`")
    if found[2]:
        return int(found[1]), int(found[2])
    nodes, most = target.job.spec.nodes, int(found[1])
    return (min(nodes.min, most) if nodes.min < nodes.max else most), most


def scale(
    target: ClusterJob,
    least: int,
    most: int,
    *,
    wait: bool,
    timeout: float | None,
    tell: Tell,
    dry_run: bool = False,
) -> str:
    """Give the job these bounds; returns the sentence that says what became of it.

    Raises `KdistError` for a job that is over, for a kind that cannot be scaled while it is there,
    and where the pods do not come or go in time.
    """
    before = target.job.spec.nodes
    if (before.min, before.max) == (least, most):
        return f"{target.name} has {shown(least, most)} already"
    workload = target.workload()
    state = target.backend.read(workload)
    if state.finished:
        raise KdistError(
            f"{target.name} is over ({state.finished})", next_command=target.command("restart")
        )
    _refuse(target)
    wanted = target.with_nodes(least, most)
    manifests = job.fit(wanted, job.render_anew(wanted, suspended=state.suspended), workload)
    job.send(wanted, manifests, dry_run=True)  # all of it, before any of it
    pods = [pod for pod in target.pods() if not pod.over]
    if dry_run:
        return f"{target.name} has {shown(least, most)} (server dry run)"
    if any(pod.working for pod in pods):
        rbac.require(target.cluster, rbac.on_pods("patch"))
    job.send(wanted, [one for one in manifests if not job.is_workload(wanted, one)])
    if state.suspended:
        job.send(wanted, [one for one in manifests if job.is_workload(wanted, one)])
        return f"{target.name} has {shown(least, most)}, once it is resumed"
    _tell_agents(wanted, pods, tell=tell)
    job.send(wanted, [one for one in manifests if job.is_workload(wanted, one)])
    if most == before.max:
        return f"{target.name} has {shown(least, most)}"
    change = f"from {before.max} to {shown(least, most)}"
    if not wait:
        return f"{target.name} scales {change}. Next: {target.command('status', '-w')}"
    return f"{target.name} scaled {change}{_await_size(wanted, before.max, timeout, tell)}"


def _refuse(target: ClusterJob) -> None:
    if target.backend.scalable:
        raise KdistError(
            (
                f"{target.name} is a {target.backend.kind} and cannot be scaled while it is "
                f"there: {target.backend.scalable}"
            ),
            hint="change nodes in its job file; `kdist delete` keeps the checkpoints, and "
            "`kdist apply` goes on from them. "
            "backend: job can be scaled while it runs",
            next_command=target.command("delete"),
        )
    if suspend.is_queued(target) and target.backend.name != "job":
        raise KdistError(
            f"{target.name} is in a queue, and Kueue lets no {target.backend.kind} change its size",
            hint="`kdist suspend` it, or use backend: job",
        )


def _tell_agents(wanted: ClusterJob, pods: list[Pod], *, tell: Tell) -> None:
    """Wait until every running agent knows the new bounds. Touching a pod makes its kubelet look at
    the ConfigMap at once.
    """
    nodes = wanted.job.spec.nodes
    running = [pod for pod in pods if pod.working]
    for pod in running:
        body = {"metadata": {"annotations": {_TOUCH: f"{nodes.min}:{nodes.max}"}}}
        wanted.cluster.patch("v1", "Pod", pod.name, body)

    def look() -> bool | None:
        readings = agents.read(wanted, wanted.pods(), timeout=3.0).values()
        told = [reading.status.get("nodes") for reading in readings]
        known = [bounds for bounds in told if isinstance(bounds, dict)]
        return (
            True
            if all((one.get("min"), one.get("max")) == (nodes.min, nodes.max) for one in known)
            else None
        )

    if running:
        what = (
            f"the agents of {wanted.name} to know that there are {shown(nodes.min, nodes.max)} now"
        )
        wait.wait_until(look, timeout=_BOUNDS_SECONDS, what=what, tell=tell)


def _await_size(wanted: ClusterJob, before: int, timeout: float | None, tell: Tell) -> str:
    """Wait until as many nodes train as may; the end of the sentence."""
    most = wanted.job.spec.nodes.max
    if most < before:
        leaving = [pod for pod in wanted.pods() if not pod.over and (pod.index or 0) >= most]
        exits = suspend.wait_for_pods(wanted, leaving, timeout=timeout, tell=tell)
        if exits.failures:
            pod, record = exits.failures[0]
            tell(f"{pod} ended with code {record.code}: {record.message or record.cause}")

    def look() -> str | None:
        if (state := wanted.state()).finished:
            return f" and is over ({state.finished})"
        readings = agents.read(wanted, wanted.pods(), timeout=3.0)
        return _group(readings, most)

    limit = suspend.STARTING_SECONDS if timeout is None else timeout
    what = f"{most} nodes of {wanted.name} to train together"
    return wait.wait_until(
        look, timeout=limit, what=what, tell=tell, next_command=wanted.command("why")
    )


def _group(readings: Mapping[str, AgentSample], most: int) -> str | None:
    """Who trains together, once so many nodes do."""
    newest = max((_integer(reading, "generation") for reading in readings.values()), default=0)
    group = [
        reading
        for reading in readings.values()
        if _integer(reading, "generation") == newest
        and reading.status.get("state") in ("running", "checkpointing")
    ]
    if len(group) != most or not newest:
        return None
    world = _integer(group[0], "world_size")
    return f": {world} rank{'s'[: world - 1]} train{'s' if world == 1 else ''}, generation {newest}"


def _integer(reading: AgentSample, name: str) -> int:
    found = reading.status.get(name)
    return found if isinstance(found, int) else 0


def shown(least: int, most: int) -> str:
    """The bounds in words."""
    if least != most:
        return f"{least}:{most} nodes"
    return "1 node" if most == 1 else f"{most} nodes"
