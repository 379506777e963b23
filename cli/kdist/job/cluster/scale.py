"""Scales a job: changes the limits on its number of nodes while it runs.

The agents learn the new limits before the number of pods changes. So no agent rejects a new node as
foreign, or waits for one that will not come. New nodes join at a planned restart, after a step that
all ranks have saved; nodes that leave save first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kdist import rbac
from kdist.agents.metrics import AgentSample
from kdist.errors import KdistError, UsageError
from kdist.job.cluster import agents, applied, review, suspend, wait
from kdist.job.cluster.applied import AppliedJob
from kdist.job.job import Change
from kdist.manifest import NODES_ANNOTATION
from kdist.status import Pod, documents
from kdist.units import count

_LIMITS_TIMEOUT = 120.0


def parse_nodes(text: str, target: AppliedJob) -> tuple[int, int]:
    """(min, max) of N or MIN:MAX. Raises `UsageError`. See `Job.scale`."""
    found = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", text)
    if found is None or int(found[1]) < 1 or (found[2] and int(found[2]) < int(found[1])):
        raise UsageError(f"--nodes takes a number from 1 or MIN:MAX, found `{text}`")
    if found[2]:
        return int(found[1]), int(found[2])
    nodes, most = target.job.spec.nodes, int(found[1])
    return (min(nodes.min, most) if nodes.min < nodes.max else most), most


def scale(target: AppliedJob, nodes: str, how: Change) -> str:
    """Change the job's number of nodes. See `Job.scale`."""
    least, most = parse_nodes(nodes, target)
    if how.dry_run == "client":
        return f"{target.name} would have {describe_nodes(least, most)} (client dry run)"
    dry_run, notify = how.dry_run == "server", target.dialog.notify
    before = target.job.spec.nodes
    if (before.min, before.max) == (least, most):
        return f"{target.name} has {describe_nodes(least, most)} already"
    workload = {} if target.is_resource else target.workload()
    state = target.state() if target.is_resource else target.backend.read(workload)
    if state.finished:
        raise KdistError(
            f"job {target.name} has finished ({state.finished})",
            next_command=target.command("restart"),
        )
    _check_scalable(target)
    wanted = target.with_nodes(least, most)
    if target.is_resource:
        _resize_resource(wanted, dry_run=dry_run)
    else:
        now = applied.render_objects(target, suspended=state.suspended)
        now = review.keep_immutable(target, now, workload)
        sent = rbac.to_send(now)
        rbac.require(target.cluster, (right for right in sent if right.verb != "create"))
        review.check(target, now, workload, notify=notify if dry_run else None)
        _resize(wanted, workload, suspended=state.suspended, dry_run=dry_run)
    if dry_run:
        return f"{target.name} has {describe_nodes(least, most)} (server dry run)"
    if state.suspended:
        return f"{target.name} has {describe_nodes(least, most)}, once it is resumed"
    if most == before.max:
        return f"{target.name} has {describe_nodes(least, most)}"
    change = f"from {before.max} to {describe_nodes(least, most)}"
    if not how.wait:
        return f"{target.name} scales {change}. Next: {target.command('status', '-w')}"
    return f"{target.name} scaled {change}{_wait_for_size(wanted, before.max, how.timeout)}"


def _resize(
    wanted: AppliedJob, workload: Mapping[str, Any], *, suspended: bool, dry_run: bool
) -> None:
    """Apply the objects with their new size: the workload last."""
    rendered = applied.render_objects(wanted, suspended=suspended)
    manifests = review.keep_immutable(wanted, rendered, workload)
    applied.apply_objects(wanted, manifests, dry_run=True)  # apply all or nothing
    if dry_run:
        return
    pods = [pod for pod in wanted.pods() if not pod.over]
    if any(pod.working for pod in pods):
        rbac.require(wanted.cluster, rbac.on_pods("patch"))
    applied.apply_objects(
        wanted, [one for one in manifests if not applied.is_workload(wanted, one)]
    )
    if not suspended:
        _announce_bounds(wanted, pods)
    applied.apply_objects(wanted, [one for one in manifests if applied.is_workload(wanted, one)])


def _resize_resource(wanted: AppliedJob, *, dry_run: bool) -> None:
    """Change a TrainingJob, and let the controller do the rest: `replicas`, as `kubectl scale`
    does, where its `nodes` allow the new size, else `nodes`.
    """
    if not dry_run:
        rbac.require(wanted.cluster, wanted.patch_rights())
    least, most = wanted.job.spec.nodes.min, wanted.job.spec.nodes.max
    found = documents.at(wanted.resource(), "spec", "nodes")
    nodes = {"min": found, "max": found} if isinstance(found, int) else found or {}
    low, high = documents.integer(nodes, "min"), documents.integer(nodes, "max")
    spec: dict[str, Any] = {"nodes": {"min": least, "max": most}, "replicas": None}
    if least == low and high is not None and most <= high:
        spec = {"replicas": most if most < high else None}
    changed = wanted.change_resource(spec, dry_run=dry_run)
    if not dry_run:
        wait.wait_for_answer(wanted.cluster, changed)


def _check_scalable(target: AppliedJob) -> None:
    if target.backend.scalable:
        raise KdistError(
            (
                f"{target.name} is a {target.backend.kind} and cannot be scaled while it "
                f"exists: {target.backend.scalable}"
            ),
            hint="change nodes in its job file; `kdist delete` keeps the checkpoints, and "
            "`kdist apply` resumes from them. "
            "backend: job can be scaled while it runs",
            next_command=target.command("delete"),
        )
    if suspend.is_queued(target) and target.backend.name != "job":
        raise KdistError(
            f"{target.name} is in a queue, and Kueue does not let a {target.backend.kind} change "
            "its size",
            hint="`kdist suspend` it, or use backend: job",
        )


def _announce_bounds(wanted: AppliedJob, pods: list[Pod]) -> None:
    """Wait until every running agent knows the new limits. Annotating a pod makes its kubelet
    update the mounted ConfigMap at once.
    """
    nodes = wanted.job.spec.nodes
    running = [pod for pod in pods if pod.working]
    objects = wanted.pod_objects() if running else wanted.objects
    for pod in running:
        body = {"metadata": {"annotations": {NODES_ANNOTATION: f"{nodes.min}:{nodes.max}"}}}
        objects.change("v1", "Pod", pod.name, body)

    def poll() -> bool | None:
        samples = agents.fetch_samples(wanted, wanted.pods(), timeout=agents.TIMEOUT)
        reported = [sample.status.get("nodes") for sample in samples.values()]
        known = [bounds for bounds in reported if isinstance(bounds, dict)]
        return (
            True
            if all((one.get("min"), one.get("max")) == (nodes.min, nodes.max) for one in known)
            else None
        )

    if running:
        limits = describe_nodes(nodes.min, nodes.max)
        what = f"the agents of {wanted.name} to learn the new limits, {limits}"
        wait.wait_until(poll, timeout=_LIMITS_TIMEOUT, what=what, notify=wanted.dialog.notify)


def _wait_for_size(wanted: AppliedJob, before: int, timeout: float | None) -> str:
    """Wait until as many nodes train as may; returns the end of the message."""
    most, notify = wanted.job.spec.nodes.max, wanted.dialog.notify
    if most < before:
        remaining = most + wanted.job.spec.nodes.standby
        leaving = [pod for pod in wanted.pods() if not pod.over and (pod.index or 0) >= remaining]
        exits = suspend.wait_for_pods(wanted, leaving, timeout=timeout)
        if exits.failures:
            pod, record = exits.failures[0]
            notify(f"{pod} ended with code {record.code}: {record.message or record.cause}")

    def poll() -> str | None:
        if (state := wanted.state()).finished:
            return f" and has finished ({state.finished})"
        samples = agents.fetch_samples(wanted, wanted.pods(), timeout=agents.TIMEOUT)
        return _describe_group(samples, most)

    limit = suspend.STARTING_SECONDS if timeout is None else timeout
    what = f"{most} nodes of {wanted.name} to train together"
    return wait.wait_until(
        poll, timeout=limit, what=what, notify=notify, next_command=wanted.command("why")
    )


def _describe_group(samples: Mapping[str, AgentSample], most: int) -> str | None:
    """The worker group as the end of a message, once `most` nodes are in it; None before."""
    newest = max((sample.generation for sample in samples.values()), default=0)
    group = [
        sample
        for sample in samples.values()
        if sample.generation == newest
        and sample.status.get("state") in ("running", "checkpointing")
    ]
    if len(group) != most or not newest:
        return None
    world = documents.integer(group[0].status, "world_size") or 0
    verb = "trains" if world == 1 else "train"
    return f": {count(world, 'rank')} {verb}, generation {newest}"


def describe_nodes(least: int, most: int) -> str:
    """The limits in words: `1 node`, `4 nodes`, `1:4 nodes`."""
    if least != most:
        return f"{least}:{most} nodes"
    return count(most, "node")
