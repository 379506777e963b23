"""Gives all ranks of a group the state that one of them has kept in memory, and finds out whether
ranks that ought to hold the same state do.

What the sender holds decides what is received: all of it, or nothing. Ranks that have kept the same
step are compared by digests, not assumed equal.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from kdist_trainer.checkpoint import torch_internals
from kdist_trainer.checkpoint.group import CheckpointGroup, broadcast_state
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
from kdist_trainer.training.context import TrainContext

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
