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
from kdist_trainer.checkpoint.group import CheckpointGroup, broadcast_state
from kdist_trainer.config import Training
from kdist_trainer.distributed import group_abort
from kdist_trainer.distributed.world import World
from kdist_trainer.errors import ConfigError, PeersLostError
from kdist_trainer.formats.untrusted_text import parse_json
from kdist_trainer.numerics.rng import WEIGHTS, Generators, GeneratorStates, derive
from kdist_trainer.parallel.ddp import Ddp
from kdist_trainer.state import (
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
from kdist_trainer.training import step_log
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
from kdist_trainer.training.training_state import TrainState
from kdist_trainer.workload import Samples, Workload, WorkloadContext


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
    the group.

    Returns:
        The training; where the group had not taken it over yet, what the rank had kept before. None
        if there is neither, or if a checkpoint has overwritten a part of it.
    """
    ctx.buffers.restore()
    ctx.optimizer.zero_grad()
    unrecorded = find_unrecorded(ctx)
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
        warm_up=find_warm_up(ctx),
        moved=moved,
        clock=ctx.checkpointing.clock.to_json(),
        is_due=ctx.checkpointing.is_due_by_clock(),
        committed=ctx.checkpointing.committed_step,
        carried=ctx.checkpointing.carrying.own,
    )


def find_warm_up(ctx: TrainContext) -> WarmUp | None:
    """What the next group need not find out by passes of its own; None if it needs them: code has
    to be compiled, or this group did not come that far.
    """
    buckets = ctx.strategy.buckets if isinstance(ctx.strategy, Ddp) else None
    if buckets is None or ctx.settings.compile != "off":
        return None
    generators = ctx.forward_backward.generators
    return WarmUp(
        buckets=buckets,
        buffers=ctx.buffers.state_dict(),
        has_numpy=generators.has_numpy,
        has_python=generators.has_python,
        flops_per_sample=ctx.device_stats.flops_per_sample,
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


def use_warm_up(ctx: TrainContext, known: WarmUp) -> None:
    """Continue with what the warm-up of a former group has shown."""
    ctx.forward_backward.generators = Generators.of(
        ctx.world.device, numpy=known.has_numpy, python=known.has_python
    )
    ctx.device_stats.flops_per_sample = known.flops_per_sample
    ctx.buffers.load_state_dict(known.buffers)


def take_over(ctx: TrainContext, source: int) -> tuple[TrainState, int | None]:
    """Take over the state of rank `source`, and record the losses of its last steps. Collective.

    If the newest checkpoint is ahead of it, since the ranks that had gone on are all lost, that is
    restored instead.

    Returns:
        The state that was taken over, and the last step of the run if the former group had decided
        on one.
    """
    told: list[_Told] = ctx.world.all_gather_object(tell(ctx, source))
    document = told[source].document
    saved, target = TrainState.from_json(document["state"]), document["target"]
    ctx.checkpointing.skip_load(document["committed"])
    if ctx.checkpointing.committed_step > saved.step:
        ctx.handover = Handover()
        restored = restore(ctx)
        if restored is not None:
            return restored, None
    if ctx.handover.moved:
        names = f"{len(ctx.handover.moved)} values of the model ({ctx.handover.moved[0]})"
        return restart(ctx, f"{names} changed for the first time after the warm-up"), None
    record_losses(ctx, told, last=saved.step)
    problem = find_difference(ctx, source)
    if problem is None:
        own = None
        if not ctx.handover.complete:
            own = receive_state(ctx, source, document)
        if own is None:
            hold(ctx, saved, document)
        if not ctx.handover.complete:
            problem = compare(ctx, source, held_values(ctx), own)
    if problem is not None:
        return restart(ctx, problem), None
    carriers = [one.carrier for one in told]
    ctx.checkpointing.go_on(carriers, source=source, is_due=document["is_due"])
    if ctx.world.is_rank_zero:
        log.event("continued", step=saved.step, samples_seen=saved.samples_seen, source_rank=source)
    return saved, target


def hold(ctx: TrainContext, saved: TrainState, document: dict[str, Any]) -> None:
    """Take what this rank holds for this state, from here on whatever becomes of the group."""
    ctx.checkpointing.continue_from(saved)
    ctx.checkpointing.clock.load(document["clock"])
    ctx.target = document["target"]
    ctx.handover = ctx.handover._replace(kept=None)
    if not ctx.handover.complete:  # while the ranks compare what they hold, one may be lost
        ctx.buffers.track_constants()
    ctx.is_consistent = True


class _Told(NamedTuple):
    """What a rank tells the others once it is known whose state all continue with."""

    document: dict[str, Any]
    """Of that state, from the rank that has it."""
    former: FormerRank | None
    """None if the rank is new."""
    lines: list[dict[str, Any]]
    """The lines of the step ledger that another rank may lack."""
    carrier: Carrier


def tell(ctx: TrainContext, source: int) -> _Told:
    """What this rank tells the others if rank `source` has the state that all continue with."""
    handover, kept = ctx.handover, ctx.handover.kept
    if kept is None:
        return _Told({}, None, [], ctx.checkpointing.carrying.tell())
    lines: list[dict[str, Any]] = []
    if kept.generation == handover.generation:
        # One rank may have received the mean losses of an interval that another one has not.
        lines = kept.lines[-ctx.settings.sync_every_steps :] if handover.leader_kept else kept.lines
    return _Told(
        describe_kept(ctx, kept) if ctx.world.rank == source else {},
        FormerRank(kept.rank, kept.size, kept.generation, kept.state.step, kept.unrecorded),
        lines,
        ctx.checkpointing.carrying.tell(),
    )


def describe_kept(ctx: TrainContext, kept: KeptState) -> dict[str, Any]:
    """What the rank whose state all continue with tells about it, besides its values by name."""
    return {
        "state": kept.state.to_json(),
        "target": kept.target,
        "values": None if ctx.handover.complete else describe_values(ctx),
        "refusals": kept.guard.refusals,
        "clock": kept.clock,
        "is_due": kept.is_due,
        "committed": kept.committed,
    }


def restart(ctx: TrainContext, why: str) -> TrainState:
    """Restore the newest checkpoint, since the state in memory cannot be trusted. Collective.

    Raises:
        PeersLostError: If there is none; the ranks begin again then, with a new model.
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


def record_losses(ctx: TrainContext, told: Sequence[_Told], *, last: int) -> None:
    """Write the ledger's lines that the former group did not write any more.

    Args:
        ctx: The training.
        told: What each rank has told.
        last: The last step to write the line of.
    """
    kept = ctx.handover.kept
    is_of_it = kept is not None and kept.generation == ctx.handover.generation
    own = kept.lines if kept is not None and is_of_it else []
    lines = merge_lines([own, *(one.lines for one in told)])
    known = {(line["generation"], line["step"]) for line in lines}
    merged = [
        line
        for line in merge_losses([one.former for one in told if one.former is not None])
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
    had received the mean, nobody knows it, and the line has null.

    Args:
        survivors: The ranks that have survived. The steps of one that has missed a group count only
            where no rank of that group has come as far.

    Returns:
        The lines in the order of their steps.
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
        lines.append(step_log.to_line(record, mean, generation=generation, world_size=size))
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
    """Build what needs no process group.

    Raises:
        Exception: Whatever the user's code raises.
    """
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
    operators start, and torch imports what it needs for a first optimizer step.

    The generators are as before afterwards. The user's model has no part in it, since a step may
    change what no one can restore.
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


def describe_values(ctx: TrainContext) -> dict[str, Any]:
    """What the values are that this rank holds, for ranks that receive them."""
    changes = ctx.buffers.state_dict()
    return {
        "kinds": describe(held_values(ctx)),
        "absent": changes["absent"],
        "made": changes["made"],
    }


def find_difference(ctx: TrainContext, source: int) -> str | None:
    """How the ranks that have the newest step differ in their states; None if they are equal.
    Collective.
    """
    if ctx.handover.holders <= 1:
        return None
    return compare(ctx, source, held_values(ctx) if ctx.handover.is_current else None)


def compare(
    ctx: TrainContext, source: int, values: dict[str, Any] | None, problem: str | None = None
) -> str | None:
    """How the values of ranks differ from those of rank `source`, by digests; None if they do not.
    Collective: one exchange if they do not, since each takes milliseconds of a recovery.

    Args:
        ctx: The training.
        source: A rank that has values.
        values: Those of this rank; None to take no part.
        problem: Why this rank could not take over values. That of the first rank is returned.
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

    Args:
        ctx: The training.
        source: The rank that sends.
        document: What `describe_kept` has returned there.
    """
    values, problem = make_room(ctx, document["values"])
    receive_values(ctx, source, values if problem is None else {})
    if problem is not None or ctx.handover.is_current:
        return problem
    return load_values(ctx, values, document)


def make_room(ctx: TrainContext, described: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The values to send or to receive into, and why they would not be those of the sender."""
    if ctx.handover.is_current:
        return held_values(ctx), None
    kinds: dict[str, ValueKind] = described["kinds"]
    training = ctx.checkpointing.training
    values: dict[str, Any] = training.template(
        kinds, absent=described["absent"], made=described["made"]
    )
    unsaved, prefix = ctx.buffers.unsaved(), "unsaved."
    values["unsaved"] = {
        name.removeprefix(prefix): (
            held
            if kind_of(held := unsaved.get(name.removeprefix(prefix))) == kind
            else allocate(ctx, kind)
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
        if name not in own or name not in kinds or _differ(own[name], kinds[name])
    }
    return values, f"rank {ctx.world.rank} has other values: {_list(others)}" if others else None


def _differ(own: ValueKind, sent: ValueKind) -> bool:
    return "tensor" in (own.kind, sent.kind) and own != sent


def receive_values(ctx: TrainContext, source: int, values: dict[str, Any]) -> None:
    """Fill the values with those of rank `source`. Collective."""
    flat, paths = torch_internals.flatten(values)
    broadcast_state(flat, CheckpointGroup(ctx.world, has_connections=False), source=source)
    if not ctx.handover.is_current:
        for name, value in flat.items():
            if not isinstance(value, Tensor):
                torch_internals.set_value(values, paths[name], value)


def load_values(ctx: TrainContext, values: dict[str, Any], document: dict[str, Any]) -> str | None:
    """Load what was received; returns why it cannot be loaded. What the rank has kept is
    overwritten, so that it cannot be continued with any more.
    """
    described, ctx.handover = document["values"], ctx.handover._replace(kept=None)
    ctx.guard.refusals = document["refusals"]
    unsaved, training = values.pop("unsaved"), ctx.checkpointing.training
    try:
        training.load(values, absent=described["absent"], made=described["made"])
    except StateMismatchError as error:
        return str(error)
    ctx.buffers.load_unsaved(unsaved)
    training.loading.check.accept_received(training.tensors())
    return None


def allocate(ctx: TrainContext, kind: ValueKind) -> Tensor:
    """Memory for a tensor."""
    return torch.empty(
        kind.shape or (), dtype=getattr(torch, str(kind.dtype)), device=ctx.world.device
    )
