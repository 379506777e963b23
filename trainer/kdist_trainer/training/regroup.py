"""Recovery in place: a rank leaves a broken worker group with its training in memory, and the ranks
of the next group continue with the newest finished step that one of them holds.

With `ddp` every rank holds the whole state, and after a finished step all hold the same one. Peers
that lose a rank are at most one step apart: some have finished the last all-reduce of a step and
updated their weights, others raised in it. Weights change only after the last collective of a step,
so that a rank holds either the state before a step or the one after it. No step is computed twice
as long as one rank of the former group survives; otherwise the newest checkpoint is restored.

What the sender holds decides what is received: all of it, or nothing. Ranks that have kept the same
step are compared by digests, not assumed equal.

A worker that is started while others train builds the workload, the model and the
training split before it has a group, and then joins theirs without making them wait for it.
Everything is made in the order in which a group's rank makes it, from generators with the same
seed, and the generators continue from the same states: what a training computes does not depend on
whether its ranks were prepared.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kdist_trainer import log, workloads
from kdist_trainer.checkpoint import torch_internals
from kdist_trainer.config import Training
from kdist_trainer.config.training import NO_REPLICA
from kdist_trainer.distributed import group_abort
from kdist_trainer.distributed.checkpoint_group import CheckpointGroup, broadcast_state
from kdist_trainer.distributed.world import World
from kdist_trainer.errors import ConfigError, PeersLostError
from kdist_trainer.formats.untrusted_text import parse_json
from kdist_trainer.numerics.rng import WEIGHTS, Generators, GeneratorStates, derive
from kdist_trainer.parallel.buffers import LATE, name_values
from kdist_trainer.parallel.ddp import Ddp
from kdist_trainer.state import (
    BufferNames,
    StateMismatchError,
    ValueKind,
    describe,
    digest_of,
    digests_of,
    flatten,
    kind_of,
    put,
)
from kdist_trainer.stream import Stream
from kdist_trainer.training.carrying import Carrier
from kdist_trainer.training.context import (
    FormerRank,
    Handover,
    KeptState,
    Position,
    TrainContext,
    UnrecordedStep,
    WarmUp,
)
from kdist_trainer.training.model import BuiltModule, build_module
from kdist_trainer.training.step_log import StepLine
from kdist_trainer.training.training_state import TrainState
from kdist_trainer.workload import Samples, Workload, WorkloadContext


def is_possible(train: Training, world: World) -> bool:
    """Whether the ranks of this job can continue in place after a failure. Raises `ConfigError` if
    they cannot, and the job demands it.
    """
    problem = why_refused(train, world)
    if problem is not None and train.recovery == "inPlace":
        raise ConfigError(f"train.recovery: inPlace: {problem}; use recovery: auto or restart")
    return problem is None and train.recovery != "restart"


def why_refused(train: Training, world: World) -> str | None:
    """Why the ranks of this job cannot continue in place; None if they can."""
    if train.strategy != "ddp":
        return f"with strategy {train.strategy} {NO_REPLICA}"
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
    the group. Returns the training; where the group had not taken it over yet, what the rank had
    kept before. None if there is neither, or if a checkpoint has overwritten a part of it.
    """
    ctx.buffers.restore()
    ctx.optimizer.zero_grad()
    unrecorded = []
    for payload, losses in ctx.sync_exchange.drain():
        means = losses if losses is not None else [None] * len(payload.records)
        unrecorded += [
            UnrecordedStep(record, float(part), mean)
            for record, part, mean in zip(payload.records, payload.losses, means, strict=True)
        ]
    # the step in progress has a loss and no record
    unrecorded += [
        UnrecordedStep(record, float(part), None)
        for record, part in zip(ctx.step_records, ctx.losses, strict=False)
    ]
    ctx.step_records.clear()
    ctx.losses.clear()
    ctx.collective_timer.close()
    ctx.tensorboard.close()
    ctx.profiler.cancel()
    ctx.checkpointing.abandon()
    ctx.step_log.close()
    ctx.batches = iter(())
    ctx.loader.close()
    if isinstance(ctx.strategy, Ddp):
        ctx.strategy.release()
    if not ctx.is_consistent:
        return ctx.handover.kept
    moved = ctx.buffers.find_moved()
    training = ctx.checkpointing.training
    training.state.extras = {name: part.state_dict() for name, part in training.extras.items()}
    # the next group needs passes of its own if code has to be compiled, or this group did not come
    # that far
    buckets = ctx.strategy.buckets if isinstance(ctx.strategy, Ddp) else None
    generators = ctx.forward_backward.generators
    warm_up = None
    if buckets is not None and ctx.settings.compile == "off":
        warm_up = WarmUp(
            buckets=buckets,
            buffers=ctx.buffers.state_dict(),
            has_numpy=generators.has_numpy,
            has_python=generators.has_python,
            flops_per_sample=ctx.device_stats.flops_per_sample,
        )
    return KeptState(
        module=ctx.module,
        precision=ctx.precision,
        ema=ctx.ema,
        training=replace(training, extras={}),
        samples=ctx.loader.opened,
        guard=ctx.guard,
        early_stopping=ctx.early_stopping,
        target=ctx.target,
        rank=ctx.world.rank,
        size=ctx.world.size,
        generation=ctx.world.generation,
        unrecorded=unrecorded,
        lines=ctx.step_log.uncommitted(),
        warm_up=warm_up,
        moved=moved,
        clock=ctx.checkpointing.clock.to_json(),
        is_due=ctx.checkpointing.is_due_by_clock(),
        best_at=ctx.checkpointing.best_at,
        committed=ctx.checkpointing.committed_step,
        carried=ctx.checkpointing.carrying.own,
    )


class _Offer(NamedTuple):
    """What a rank tells the others about what it has kept."""

    position: Position
    rank: int
    warm_up: WarmUp | None
    moved: Sequence[str]
    carried: str | None
    """Name of the folder of the save that the rank writes alone."""


def plan_handover(world: World, kept: KeptState | None) -> Handover:
    """Agree on the rank whose state all continue with. Collective after the first generation."""
    if world.generation == 1:
        return Handover()
    own = None
    if kept is not None:
        folder = None if kept.carried is None else kept.carried.folder
        own = _Offer(kept.position, kept.rank, kept.warm_up, kept.moved, folder)
    offers: list[_Offer | None] = world.all_gather_object(own)
    made = [offer for offer in offers if offer is not None]
    if not made:
        return Handover()
    newest, _, warm_up, *_ = max(made, key=lambda offer: offer.position)
    positions = [offer.position if offer is not None else None for offer in offers]
    former = max(offer.position.generation for offer in made)
    first = offers[0]
    return Handover(
        source=positions.index(newest),
        complete=all(one == newest for one in positions),
        is_current=positions[world.rank] == newest,
        holders=positions.count(newest),
        generation=former,
        leader_kept=first is not None and (first.position.generation, first.rank) == (former, 0),
        kept=kept,
        warm_up=warm_up,
        moved=tuple(sorted({name for offer in made for name in offer.moved})),
        carried=tuple(offer.carried for offer in made if offer.carried is not None),
    )


def take_over(ctx: TrainContext, source: int) -> tuple[TrainState, int | None]:
    """Take over the state of rank `source`, and record the losses of its last steps. Collective.
    Returns the state that was taken over, and the last step of the run if the former group had
    decided on one.

    If the newest checkpoint is ahead of it, since the ranks that had continued are all lost, that
    is restored instead.
    """
    peers: list[_PeerState] = ctx.world.all_gather_object(describe_own_state(ctx, source))
    document = peers[source].document
    saved, target = TrainState.from_json(document["state"]), document["target"]
    ctx.checkpointing.skip_load(document["committed"])
    if ctx.checkpointing.committed_step > saved.step:
        ctx.handover = Handover()
        restored = restore(ctx)
        if restored is not None:
            return restored, None
    if ctx.handover.moved:
        return restart(ctx, f"{name_values(ctx.handover.moved)} {LATE}"), None
    record_losses(ctx, peers, last=saved.step)
    problem = None
    if ctx.handover.holders > 1:  # the ranks that have the newest step may differ in their states
        problem = compare(ctx, source, held_values(ctx) if ctx.handover.is_current else None)
    if problem is None:
        own = None
        if not ctx.handover.complete:
            own = receive_state(ctx, source, document)
        if own is None:  # from here on this rank holds the state, whatever becomes of the group
            ctx.checkpointing.continue_from(saved)
            ctx.checkpointing.clock.load(document["clock"])
            ctx.target = document["target"]
            ctx.handover = ctx.handover._replace(kept=None)
            if not ctx.handover.complete:  # while the ranks compare, one may be lost
                ctx.buffers.track_constants()
            ctx.is_consistent = True
        if not ctx.handover.complete:
            problem = compare(ctx, source, held_values(ctx), own)
    if problem is not None:
        return restart(ctx, problem), None
    ctx.checkpointing.best_at = document["best_at"]
    carriers = [one.carrier for one in peers]
    ctx.checkpointing.continue_saving(carriers, source=source, is_due=document["is_due"])
    if ctx.world.is_rank_zero:
        log.event("continued", step=saved.step, samples_seen=saved.samples_seen, source_rank=source)
    return saved, target


class _PeerState(NamedTuple):
    """What a rank sends to the others once it is known whose state all continue with."""

    document: dict[str, Any]
    """Of that state, from the rank that has it."""
    former: FormerRank | None
    """None if the rank is new."""
    lines: list[dict[str, Any]]
    """The lines of the step ledger that another rank may lack."""
    carrier: Carrier


def describe_own_state(ctx: TrainContext, source: int) -> _PeerState:
    """What this rank sends to the others if all continue with the state of rank `source`."""
    handover, kept = ctx.handover, ctx.handover.kept
    if kept is None:
        return _PeerState({}, None, [], ctx.checkpointing.carrying.describe())
    lines: list[dict[str, Any]] = []
    if kept.generation == handover.generation:
        # One rank may have received the mean losses of an interval that another one has not.
        lines = kept.lines[-ctx.settings.sync_every_steps :] if handover.leader_kept else kept.lines
    document: dict[str, Any] = {}
    if ctx.world.rank == source:
        values = None
        if not handover.complete:  # for the ranks that receive them
            changes = ctx.buffers.state_dict()
            buffers = BufferNames(changes["absent"], changes["made"])
            values = {"kinds": describe(held_values(ctx)), "buffers": buffers}
        document = {
            "state": kept.state.to_json(),
            "target": kept.target,
            "values": values,
            "refusals": kept.guard.refusals,
            "clock": kept.clock,
            "is_due": kept.is_due,
            "committed": kept.committed,
            "best_at": kept.best_at,
        }
    return _PeerState(
        document,
        FormerRank(kept.rank, kept.size, kept.generation, kept.state.step, kept.unrecorded),
        lines,
        ctx.checkpointing.carrying.describe(),
    )


def restart(ctx: TrainContext, why: str) -> TrainState:
    """Restore the newest checkpoint, since the state in memory cannot be trusted. Collective.
    Raises `PeersLostError` if there is none; the ranks begin again then, with a new model.
    """
    moved, ctx.handover, ctx.is_consistent = ctx.handover.moved, Handover(), False
    if ctx.world.is_rank_zero:
        log.warn(
            "recovery-restarts",
            why=why,
            message=f"the training continues from its newest checkpoint, not in place: {why}",
        )
    restored = restore(ctx, moved=moved)
    if restored is None:
        raise PeersLostError(f"the training begins again, it has no checkpoint: {why}")
    return restored


def restore(ctx: TrainContext, *, moved: Sequence[str] = ()) -> TrainState | None:
    """Restore the newest checkpoint on ranks of which some have trained before; None if there is
    none. What no checkpoint has, such as a buffer that is not persistent, is rank 0's. Collective.
    """
    restored = ctx.checkpointing.restore()
    if restored is not None:
        ctx.buffers.load_state_dict({"known": moved})
        ctx.buffers.synchronize()
        ctx.buffers.accept()
    return restored


def record_losses(ctx: TrainContext, peers: Sequence[_PeerState], *, last: int) -> None:
    """Write the ledger's lines, up to step `last`, that the former group did not write any more."""
    kept = ctx.handover.kept
    is_of_it = kept is not None and kept.generation == ctx.handover.generation
    own = kept.lines if kept is not None and is_of_it else []
    lines = merge_lines([own, *(one.lines for one in peers)])
    known = {(line["generation"], line["step"]) for line in lines}
    merged = [
        line
        for line in merge_losses([one.former for one in peers if one.former is not None])
        if line["step"] <= last and (line["generation"], line["step"]) not in known
    ]
    ctx.step_log.complete([*lines, *merged])


def merge_lines(every: Iterable[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The ledger's lines that several ranks have, each once and in the order of the steps."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for line in chain.from_iterable(every):
        key = (line["generation"], line["step"])
        if key not in found or found[key]["loss"] is None:
            found[key] = line
    return [found[key] for key in sorted(found)]


def merge_losses(survivors: Sequence[FormerRank]) -> list[dict[str, Any]]:
    """The ledger's lines of the steps whose losses were not recorded.

    A loss is the mean of the parts of all ranks. If a rank has died with its part before any other
    had received the mean, nobody knows it, and the line has null. The steps of a survivor that has
    missed a group count only where no rank of that group has come as far.
    """
    lines = []
    for step in sorted({one.record.step for each in survivors for one in each.unrecorded}):
        generation = max(each.generation for each in survivors if each.step >= step)
        found = {
            each.rank: one
            for each in survivors
            for one in each.unrecorded
            if each.generation == generation and one.record.step == step
        }
        if not found:
            continue  # that group has recorded it
        size = next(each.size for each in survivors if each.generation == generation)
        mean = next((one.loss for one in found.values() if one.loss is not None), None)
        if mean is None and len(found) == size:
            mean = sum(found[rank].part for rank in range(size)) * (1 / size)
        record = next(iter(found.values())).record
        lines.append(StepLine(record, mean, generation, size).to_json())
    return lines


def describe_error(error: BaseException) -> str:
    """An error in one line, for the agent."""
    with contextlib.suppress(Exception):
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return type(error).__name__


@dataclass(frozen=True, kw_only=True)
class PreparedTraining:
    """What a worker has built before it has a group.

    Attributes:
        workload: The workload.
        built: The model, with the weights that a new run begins with.
        samples: The training split.
        generators: The states of the generators after these were made.
    """

    workload: Workload
    built: BuiltModule
    samples: Samples | Stream | None
    generators: GeneratorStates


def prepare(train: Training, device: torch.device) -> PreparedTraining:
    """Build what needs no process group. Raises whatever the user's code raises."""
    workload = load_workload(train, device)
    Generators.all(device).seed(derive(train.seed, WEIGHTS))
    built = build_module(train, workload, device)
    samples = workload.dataset("train")
    return PreparedTraining(
        workload=workload, built=built, samples=samples, generators=GeneratorStates.read()
    )


def load_workload(train: Training, device: torch.device) -> Workload:
    """Make the workload that the job names."""
    data = {
        mount: Path(path) for mount, path in parse_json(os.environ.get("KDIST_DATA", "{}")).items()
    }
    return workloads.load(train.workload)(WorkloadContext(train.options, data, train.seed, device))


def warm_up_torch() -> None:
    """Train a tiny model for a step on the CPU: the threads of the autograd engine and of the
    operators start, and torch imports what it needs for a first optimizer step. It is not the
    user's model, since a step may change what no one can restore.
    """
    before = GeneratorStates.read()
    layer = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(4, 8)).square().sum().backward()
    optimizer.step()
    before.restore()


_MAX_NAMES = 3


def held_values(ctx: TrainContext) -> dict[str, Any]:
    """All values of the training, those that no checkpoint has too."""
    return {**ctx.checkpointing.training.tensors(), "unsaved": ctx.buffers.unsaved()}


def compare(
    ctx: TrainContext, source: int, values: dict[str, Any] | None, problem: str | None = None
) -> str | None:
    """How the values of ranks differ from those of rank `source`, by digests; None if they do not.
    Collective: one exchange if they do not, since each takes milliseconds of a recovery.

    `values` is None on a rank that takes no part. `problem` says why this rank could not take over
    values; that of the first rank is returned.
    """
    own = None if values is None or problem is not None else digest_of(values)
    found: list[tuple[str | None, str | None]] = ctx.world.all_gather_object((own, problem))
    if problems := [one for _, one in found if one is not None]:
        return problems[0]
    if len({one for one, _ in found if one is not None}) == 1:
        return None
    every = ctx.world.all_gather_object(None if values is None else digests_of(values))
    expected = every[source]
    names = {
        name
        for one in every
        if one is not None
        for name in one.keys() | expected.keys()
        if one.get(name) != expected.get(name)
    }
    return f"ranks hold {_list(names)} of the same step in different bits"


def _list(names: Collection[str]) -> str:
    return f"{len(names)} values ({', '.join(sorted(names)[:_MAX_NAMES])})"


def receive_state(ctx: TrainContext, source: int, document: dict[str, Any]) -> str | None:
    """Take over all values of rank `source`; returns why this rank cannot. Collective.

    A rank that is a step behind receives them into memory of its own: if the sender dies, it still
    holds what it had. One that cannot take them over receives them all the same, and drops them:
    the others wait for it.
    """
    values, problem = make_room(ctx, document["values"])
    flat, paths = torch_internals.flatten(values if problem is None else {})
    broadcast_state(flat, CheckpointGroup(ctx.world, has_connections=False), source=source)
    if not ctx.handover.is_current:
        for name, value in flat.items():
            if not isinstance(value, Tensor):
                torch_internals.set_value(values, paths[name], value)
    if problem is not None or ctx.handover.is_current:
        return problem
    return load_values(ctx, values, document)


def make_room(ctx: TrainContext, described: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The values to send or to receive into, and why they would not be those of the sender."""
    if ctx.handover.is_current:
        return held_values(ctx), None
    kinds: dict[str, ValueKind] = described["kinds"]
    training = ctx.checkpointing.training
    values: dict[str, Any] = training.template(kinds, buffers=described["buffers"])
    unsaved, prefix = ctx.buffers.unsaved(), "unsaved."
    values["unsaved"] = {
        name.removeprefix(prefix): (
            held
            if kind_of(held := unsaved.get(name.removeprefix(prefix))) == kind
            else torch.empty(
                kind.shape or (), dtype=getattr(torch, str(kind.dtype)), device=ctx.world.device
            )
        )
        for name, kind in kinds.items()
        if name.startswith(prefix)
    }
    if ctx.handover.kept is not None:  # a step behind
        for path, value in flatten(values).values():
            if isinstance(value, Tensor):
                put(values, path, torch.empty_like(value, requires_grad=False))
    own = describe(values)
    others = {
        name
        for name in own.keys() | kinds.keys()
        if name not in own
        or name not in kinds
        or ("tensor" in (own[name].kind, kinds[name].kind) and own[name] != kinds[name])
    }
    return values, f"rank {ctx.world.rank} has other values: {_list(others)}" if others else None


def load_values(ctx: TrainContext, values: dict[str, Any], document: dict[str, Any]) -> str | None:
    """Load what was received; returns why it cannot be loaded. What the rank has kept is
    overwritten, so that it cannot be continued with any more.
    """
    described, ctx.handover = document["values"], ctx.handover._replace(kept=None)
    ctx.guard.refusals = document["refusals"]
    unsaved, training = values.pop("unsaved"), ctx.checkpointing.training
    try:
        training.load(values, buffers=described["buffers"])
    except StateMismatchError as error:
        return str(error)
    ctx.buffers.load_unsaved(unsaved)
    training.loading.check.accept_received(training.tensors())
    return None
