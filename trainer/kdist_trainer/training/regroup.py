"""Recovery in place: a rank leaves a broken worker group with its training in memory, and the ranks
of the next group continue with the newest finished step that one of them holds.

With `ddp` every rank holds the whole state, and after a finished step all hold the same one. Peers
that lose a rank are at most one step apart: some have finished the last all-reduce of a step and
updated their weights, others raised in it. Weights change only after the last collective of a step,
so that a rank holds either the state before a step or the one after it. No step is computed twice
as long as one rank of the former group survives; otherwise the newest checkpoint is restored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kdist_trainer import group_abort, log
from kdist_trainer.checkpoint import torch_internals
from kdist_trainer.checkpoint.group import CheckpointGroup, broadcast_state
from kdist_trainer.config import Training
from kdist_trainer.errors import ConfigError
from kdist_trainer.training import step_log
from kdist_trainer.training.checkpointing import TrainState
from kdist_trainer.training.context import TrainContext
from kdist_trainer.training.kept_state import Handover, KeptState, UnrecordedStep
from kdist_trainer.training.sync import StepRecord
from kdist_trainer.world import World


def is_possible(train: Training, world: World) -> bool:
    """Whether the ranks of this job can continue in place after a failure.

    Raises:
        ConfigError: If they cannot, and the job demands it.
    """
    problem = find_obstacle(train, world)
    if problem is not None and train.recovery == "inPlace":
        raise ConfigError(f"train.recovery: inPlace: {problem}; use recovery: auto or restart")
    return problem is None and train.recovery != "restart"


def find_obstacle(train: Training, world: World) -> str | None:
    """Why the ranks of this job cannot continue in place; None if they can."""
    if train.strategy != "ddp":
        return f"with strategy {train.strategy} no rank holds the whole state"
    if world.device.type != "cpu":
        return (
            "on GPUs a step that the CPU has finished may still run on the device, with gradients "
            "of a collective that NCCL has aborted"
        )
    if not group_abort.is_supported():
        return "this system does not tell which connections a process group has opened"
    return None


def keep(ctx: TrainContext) -> KeptState | None:
    """Leave the training of a broken group, whose connections are cut, and release what belongs to
    the group; returns the training, or None if it was not restored yet.
    """
    ctx.buffers.restore()
    ctx.optimizer.zero_grad()
    unrecorded = find_unrecorded(ctx)
    ctx.collective_timer.close()
    ctx.tensorboard.close()
    ctx.profiler.cancel()
    ctx.checkpointing.abandon()
    ctx.batches = iter(())
    ctx.loader.close()
    if not ctx.is_consistent:
        return None
    training = ctx.checkpointing.training
    training.state.extras = {name: part.state_dict() for name, part in training.extras.items()}
    return KeptState(
        module=ctx.module,
        precision=ctx.precision,
        ema=ctx.ema,
        training=training,
        guard=ctx.guard,
        early_stopping=ctx.early_stopping,
        target=ctx.target,
        rank=ctx.world.rank,
        size=ctx.world.size,
        generation=ctx.world.generation,
        unrecorded=unrecorded,
        lines=ctx.step_log.uncommitted(),
    )


def find_unrecorded(ctx: TrainContext) -> list[UnrecordedStep]:
    """The finished steps whose losses this rank has not recorded, oldest first."""
    found = []
    for payload, losses in ctx.sync_exchange.drain():
        means = losses if losses is not None else [None] * len(payload.records)
        found += [
            UnrecordedStep(record, float(part), mean)
            for record, part, mean in zip(payload.records, payload.losses, means, strict=True)
        ]
    # the step in progress has a loss and no record
    found += [
        UnrecordedStep(record, float(part), None)
        for record, part in zip(ctx.step_records, ctx.losses, strict=False)
    ]
    ctx.step_records.clear()
    ctx.losses.clear()
    return found


def plan_handover(world: World, kept: KeptState | None) -> Handover:
    """Agree on the rank whose state all continue with. Collective after the first generation."""
    if world.generation == 1:
        return Handover()
    offers = world.all_gather_object((kept.position, kept.rank) if kept is not None else None)
    known = [offer[0] for offer in offers if offer is not None]
    if not known:
        return Handover()
    newest = max(known)
    return Handover(
        source=next(rank for rank, offer in enumerate(offers) if offer and offer[0] == newest),
        complete=all(offer is not None and offer[0] == newest for offer in offers),
        leader_kept=offers[0] is not None and offers[0][1] == 0,
        kept=kept,
    )


def take_over(ctx: TrainContext, source: int) -> TrainState:
    """Take over the state of rank `source`, and record the losses of its last steps. Collective.

    Returns:
        The state that was taken over.
    """
    kept = ctx.handover.kept
    document: dict[str, Any] = ctx.world.broadcast_object(
        {"state": kept.state.to_json(), "target": kept.target} if kept is not None else {},
        source=source,
    )
    saved = TrainState.from_json(document["state"])
    record_losses(ctx, last=saved.step)
    ctx.checkpointing.skip_load()
    if not ctx.handover.complete:
        receive_tensors(ctx, source, is_current=kept is not None and kept.state.step == saved.step)
    # Nothing waits for other ranks from here on: what this rank holds is all of one step.
    ctx.checkpointing.continue_from(saved)
    ctx.target = document["target"]
    ctx.is_consistent = True
    if ctx.world.is_rank_zero:
        log.event("continued", step=saved.step, samples_seen=saved.samples_seen, source_rank=source)
    return saved


def receive_tensors(ctx: TrainContext, source: int, *, is_current: bool) -> None:
    """Copy weights and optimizer from rank `source`. Collective.

    A rank that is a step behind receives them into memory of its own first: if the sender dies, it
    still holds what it had.

    Args:
        ctx: The training.
        source: The rank that sends.
        is_current: Whether this rank has the same state already, and only takes part.
    """
    training = ctx.checkpointing.training
    tensors = training.tensors()
    flat, paths = torch_internals.flatten(tensors)
    is_behind = ctx.handover.kept is not None and not is_current
    received = {
        name: torch.empty_like(value) if is_behind and isinstance(value, Tensor) else value
        for name, value in flat.items()
    }
    broadcast_state(received, CheckpointGroup(ctx.world), source=source)
    if is_current:
        return
    with torch.no_grad():
        for name, value in received.items():
            if not isinstance(value, Tensor):
                torch_internals.set_value(tensors, paths[name], value)
            elif is_behind:
                flat[name].copy_(value)
    training.strategy.load_state_dict(tensors, training.optimizer)
    if training.scheduler is not None and tensors["scheduler"][0] is not None:
        training.scheduler.load_state_dict(tensors["scheduler"][0])


def record_losses(ctx: TrainContext, *, last: int) -> None:
    """Write the ledger's lines up to step `last` that the former group did not write any more.
    Collective.
    """
    kept, world = ctx.handover.kept, ctx.world
    lines = kept.lines if kept is not None else []
    if not ctx.handover.leader_kept:
        lines = max(world.all_gather_object(lines), key=len)
    own = (kept.rank, kept.size, kept.generation, kept.unrecorded) if kept is not None else None
    survivors = [one for one in world.all_gather_object(own) if one is not None]
    known = {(line["generation"], line["step"]) for line in lines}
    merged = [
        line
        for line in merge_losses(survivors)
        if line["step"] <= last and (line["generation"], line["step"]) not in known
    ]
    ctx.step_log.complete([*lines, *merged])


def merge_losses(
    survivors: Sequence[tuple[int, int, int, Sequence[UnrecordedStep]]],
) -> list[dict[str, Any]]:
    """The ledger's lines of the steps whose losses were not recorded.

    A loss is the mean of the parts of all ranks. If a rank has died with its part before any other
    had received the mean, nobody knows it, and the line has null.

    Args:
        survivors: Of each rank that has survived: its rank in the former group, that group's size
            and generation, and the rank's unrecorded steps.

    Returns:
        The lines in the order of their steps.
    """
    records: dict[int, StepRecord] = {}
    parts: dict[int, dict[int, float]] = {}
    means: dict[int, float] = {}
    size, generation = max((one[2], one[1]) for one in survivors)[::-1]
    for rank, _, number, steps in survivors:
        for record, part, mean in steps if number == generation else ():
            records[record.step] = record
            parts.setdefault(record.step, {})[rank] = part
            if mean is not None:
                means[record.step] = mean
    for step, found in parts.items():
        if len(found) == size:
            means.setdefault(step, sum(found[rank] for rank in range(size)) * (1 / size))
    return [
        step_log.to_line(records[step], means.get(step), generation=generation, world_size=size)
        for step in sorted(records)
    ]


def describe(error: BaseException) -> str:
    """An error in one line, for the agent."""
    with contextlib.suppress(Exception):
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return type(error).__name__
