"""Scales a job: changes the limits on its number of nodes while it runs.

The agents learn the new limits before the number of pods changes. So no agent rejects a new node as
foreign, or waits for one that will not come. New nodes join at a planned restart, after a step that
all ranks have saved; nodes that leave save first.
"""

from __future__ import annotations

import re

from kdist.cluster.polling import wait_until
from kdist.errors import KdistError, UsageError
from kdist.job.cluster import agents, suspend
from kdist.job.cluster.applied import AppliedJob
from kdist.job.job import Change, Changed
from kdist.status import documents
from kdist.units import count


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
    dry_run = how.dry_run == "server"
    before = target.job.spec.nodes
    if (before.min, before.max) == (least, most):
        return f"{target.name} has {describe_nodes(least, most)} already"
    state = target.state()
    if state.finished:
        raise KdistError(
            f"job {target.name} has finished ({state.finished})",
            next_command=target.command("restart"),
        )
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
    wanted = target.with_nodes(least, most)
    target.changes.resize(wanted, state, dry_run=dry_run)
    if dry_run:
        return f"{target.name} has {describe_nodes(least, most)} (server dry run)"
    if state.suspended:
        return f"{target.name} has {describe_nodes(least, most)}, once it is resumed"
    if most == before.max:
        return f"{target.name} has {describe_nodes(least, most)}"
    change = f"from {before.max} to {describe_nodes(least, most)}"
    if not how.wait:
        return Changed(f"{target.name} scales {change}", target.command("status", "-w"))
    return f"{target.name} scaled {change}{_wait_for_size(wanted, before.max, how.timeout)}"


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

    limit = suspend.STARTING_SECONDS if timeout is None else timeout
    what = f"{most} nodes of {wanted.name} to train together"
    return wait_until(
        poll, timeout=limit, what=what, notify=notify, next_command=wanted.command("why")
    )


def describe_nodes(least: int, most: int) -> str:
    """The limits in words: `1 node`, `4 nodes`, `1:4 nodes`."""
    if least != most:
        return f"{least}:{most} nodes"
    return count(most, "node")
