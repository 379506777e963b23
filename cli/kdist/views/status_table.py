"""A job's status as rows of tables."""

from __future__ import annotations

import time
from collections.abc import Iterator

from kdist.status import JobStatus, Phase, Pod, RankStatus
from kdist.units import age, count, number, or_dash, seconds, size

RANK_HEADER = (
    "RANK",
    "POD",
    "STATUS",
    "STEP",
    "STEP TIME",
    "BUSY",
    "ALL-REDUCE",
    "RESTARTS",
    "NODE",
)


def status_rows(status: JobStatus) -> Iterator[tuple[str, str]]:
    """Yield what is known of the job as a whole, as pairs of name and value."""
    yield (
        "phase",
        f"{status.phase}"
        + (f" ({status.reason})" if status.reason and status.reason != status.phase else ""),
    )
    if status.message:
        yield "message", " ".join(status.message.split())[:300]
    if status.fetch is not None:
        yield "fetched", str(status.fetch)
    minimum = f", at least {status.nodes.min}" if status.nodes.min != status.nodes.max else ""
    yield "nodes", f"{status.nodes}{minimum}"
    if status.world_size:
        yield "ranks", f"{status.world_size}, generation {status.generation}"
    if status.devices:
        yield "on each node", status.devices
    if status.tracker:
        yield "tracker", status.tracker
    if status.step is not None:
        target = (
            f"/{status.target_steps:,} ({status.step / status.target_steps:.0%})"
            if status.target_steps
            else ""
        )
        yield "step", f"{status.step:,}{target}"
    if status.loss is not None:
        yield "loss", number(status.loss)
    if status.throughput is not None:
        yield "samples/s", number(round(status.throughput))
    if status.all_reduce_seconds is not None:
        yield "all-reduce", f"{seconds(status.all_reduce_seconds)} per step"
    yield from _checkpoint_rows(status)
    yield "restarts", f"{status.restarts}{describe_left(status.restarts, status.restarts_left)}"
    for machine in status.machine_faults:
        yield "faulty machine", str(machine)
    if status.lost_steps:
        yield "lost steps", f"{status.lost_steps:,}"
    if status.queue:
        yield "queue", status.queue
    for each in status.avoided:
        yield "avoids", str(each)
    if status.exit_record is not None and status.phase.terminal:
        record = status.exit_record
        yield "exit record", f"{record.cause or record.outcome}, code {record.code}"
    if (state := status.resource) is not None:  # what only the TrainingJob says
        if state.refusal:
            yield "not accepted", " ".join(state.refusal.split())[:300]
        elif not state.answered:
            yield "TrainingJob", "its last change has not taken effect yet"
        if state.outdated:
            yield "outdated", " ".join(state.outdated.split())[:300]
    yield "backend", status.backend or "?"
    yield "namespace", status.namespace
    if status.age is not None:
        yield "age", age(status.age)


def describe_left(restarts: int, left: int | None) -> str:
    """How many more restarts a job may make before it has progressed; empty if unknown. A
    checkpoint gives the whole budget back, so these and those that were made do not add up.
    """
    if left is None:
        return ""
    return f" ({left} more without progress)" if restarts else f" ({left} left)"


def _checkpoint_rows(status: JobStatus) -> Iterator[tuple[str, str]]:
    if status.last_checkpoint_step is not None:
        saved_at = status.last_checkpoint_time
        seconds_ago = None if saved_at is None else max(0.0, time.time() - saved_at)
        yield "last checkpoint", describe_checkpoint(status.last_checkpoint_step, seconds_ago)
    if status.at_risk is not None and not status.phase.terminal:
        yield "at risk", f"{age(status.at_risk)} of training, if all ranks were lost now"
    if status.failed_saves and not status.phase.terminal:
        room = status.checkpoint_room.removeprefix("storage: ") or "the log says why"
        waits = status.step is not None and status.step == status.target_steps
        what = "the finished training waits to be saved; " if waits else ""
        yield "storage", f"{what}{count(status.failed_saves, 'save')} failed: {room}"
    if status.checkpoint_interval is not None and not status.phase.terminal:
        written = status.checkpoint_bytes_per_hour
        rate = "" if written is None else f", {size(written)} an hour"
        yield "saves", f"every {seconds(status.checkpoint_interval)}{rate}"


def describe_checkpoint(step: int | None, seconds_ago: float | None) -> str:
    """Describe the last checkpoint: `step 100, committed 30 s ago`; empty without a step."""
    if step is None:
        return ""
    if seconds_ago is None:
        return f"step {step:,}"
    when = f"{age(seconds_ago)} ago" if seconds_ago >= 1 else "just now"
    return f"step {step:,}, committed {when}"


def rank_rows(status: JobStatus) -> list[tuple[str, ...]]:
    """List one row for each known rank, and one for each pod without ranks."""
    ranks: dict[str, list[RankStatus]] = {}
    for rank in status.ranks:
        ranks.setdefault(rank.pod, []).append(rank)
    rows: list[tuple[str, ...]] = []
    for pod in status.pods:
        replaced = any(other.index == pod.index and not other.over for other in status.pods)
        if status.phase is not Phase.FAILED and pod.over and replaced:
            continue
        bare = ("-", pod.name, pod.state, "-", "-", "-", "-", str(pod.restarts), pod.node or "-")
        rows += [_rank_row(pod, rank) for rank in ranks.get(pod.name, [])] or [bare]
    return rows


def _rank_row(pod: Pod, rank: RankStatus) -> tuple[str, ...]:
    return (
        str(rank.rank),
        pod.name,
        pod.state,
        "-" if rank.step is None else f"{rank.step:,}",
        or_dash(rank.step_seconds, seconds),
        or_dash(rank.busy_seconds, seconds),
        or_dash(rank.all_reduce_seconds, seconds),
        str(pod.restarts),
        pod.node or "-",
    )
