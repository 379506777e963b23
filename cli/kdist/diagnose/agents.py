"""What agents tell of themselves: the failure that ended their worker group, a full disk, what they
wait for before they try again.
"""

from __future__ import annotations

from typing import Final

from kdist.diagnose.rule import Diagnosis, DiagnosticContext, clip
from kdist.status import LastFailure, Phase
from kdist.units import count
from kdist_trainer.causes.general import SLOW, SLOW_START

FOLLOWS: Final = ("node_lost", "collective_timeout", "rendezvous")
"""Causes that tell only that something else was lost."""


def find_full_disk(ctx: DiagnosticContext) -> Diagnosis | None:
    """A folder that the training writes to had no room when its group ended, and nothing shows that
    it has some since.
    """
    failure = ctx.status.last_failure
    if failure is None or not failure.full or ctx.status.phase.terminal:
        return None
    has_room = failure.is_full is False
    if (has_room and not ctx.stuck) or _has_saved_since(ctx, failure):
        return None
    first = failure.full.partition("; storage: ")[0]
    what, _, advice = first.removeprefix("storage: ").partition(": ")
    if not failure.is_full:
        what = f"{what.replace(' has ', ' had ')} {ctx.ago(failure.time)}".rstrip()
    lines = [f"the group failed {ctx.ago(failure.time)}".rstrip() + f": {failure.cause}"]
    lines += [clip(failure.message, 300)] if failure.message else []
    lines += [ctx.status.waiting_for] if ctx.status.waiting_for else []
    return Diagnosis(
        "storage",
        f"storage: {what}; committed checkpoints are safe"
        + ("; there is room again" if has_room else ""),
        "blocked" if ctx.stuck and not has_room else "waiting",
        tuple(lines),
        "wait a moment: the group starts again"
        if has_room
        else f"{advice}; then the training goes on by itself while restarts are left",
        (ctx.kdist("status", "-w"), ctx.kdist("logs", "--tail", "20")),
    )


def _has_saved_since(ctx: DiagnosticContext, failure: LastFailure) -> bool:
    """Whether a checkpoint was committed after the failure."""
    saved = ctx.status.last_checkpoint_time
    return saved is not None and failure.time is not None and saved > failure.time


def find_failed_saves(ctx: DiagnosticContext) -> Diagnosis | None:
    """The training goes on, and its checkpoints cannot be saved."""
    failed = ctx.status.failed_saves
    if not failed or ctx.status.phase is not Phase.RUNNING:
        return None
    saved, step = ctx.status.last_checkpoint_step, ctx.status.step
    since = f"since step {saved:,}" if saved is not None else "so far"
    room, _, advice = ctx.status.checkpoint_room.removeprefix("storage: ").partition(": ")
    why = f"storage: {room}" if room else "the log says why (checkpoint-failed)"
    at = f" at step {step:,}" if step is not None else ""
    what = f"{count(failed, 'checkpoint')} could not be saved {since}: {why}"
    if step is not None and step == ctx.status.target_steps:
        what = f"{why}: the finished training{at} waits to be saved, {what.partition(':')[0]}"
    else:
        what = f"{ctx.name} trains{at}, and {what}; a failure would lose the steps since then"
    return Diagnosis(
        "storage",
        what,
        "blocked",
        fix=advice or "free space, or repair the volume",
        commands=(ctx.kdist("logs", "--tail", "50"), ctx.kdist("status", "-w")),
    )


def find_slow_start(ctx: DiagnosticContext) -> Diagnosis | None:
    """The latest groups were all lost as they started, and so may be the present one."""
    status = ctx.status
    if not status.slow_start or status.phase.terminal:
        return None
    left = status.restarts_left
    remaining = f"{count(left, 'restart')} {'is' if left == 1 else 'are'} left" if left else ""
    end = f"; {remaining or 'no restart is left'}, then the job ends" if left is not None else ""
    failure = status.last_failure
    return Diagnosis(
        SLOW_START,
        f"{status.slow_start}{end}",
        "blocked",
        (f"the last loss: {failure.cause}: {clip(failure.message)}",) if failure else (),
        SLOW.advice,
        (ctx.kdist("events"), ctx.kdist("status", "-w")),
    )


def find_restart(ctx: DiagnosticContext) -> Diagnosis | None:
    """A failure has ended the worker group, and a new one forms."""
    failure = ctx.status.last_failure
    if failure is None or ctx.status.phase is not Phase.RECOVERING:
        return None
    follows = failure.cause in FOLLOWS or not failure.primary
    where = _locate_failure(failure)
    if follows:
        sentence = f"{where} lost its peers, and which pod or node was lost is not known"
    else:
        sentence = f"{where} failed: {failure.cause}: {clip(failure.message, 300)}"
    ago = ctx.ago(failure.time)
    wait = ctx.status.waiting_for
    state = wait or ctx.status.message or "a new group forms"
    return Diagnosis(
        "peers-lost" if follows else failure.cause.replace("_", "-"),
        f"{sentence}{f' ({ago})' if ago else ''}; the group starts again: {state}",
        "waiting",
        (clip(failure.message),) if follows and failure.message else (),
        "see the log of that rank if it fails again"
        if not follows
        else "see the events and the nodes",
        (
            ctx.kdist("logs", *(["--rank", str(failure.rank)] if failure.rank is not None else [])),
            ctx.kdist("events"),
        ),
    )


def _locate_failure(failure: LastFailure) -> str:
    parts = [f"rank {failure.rank}" if failure.rank is not None else "an agent"]
    parts += [f"on {failure.node}"] if failure.node else []
    parts += [f"at step {failure.step}"] if failure.step is not None else []
    return " ".join(parts)
