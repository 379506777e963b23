"""Compares what the ranks hold after a recovery in place. A rank that has stayed has also what its
model and optimizer keep in plain attributes, and a rank that is new has not: from the next step on
their weights may differ, and nothing else would show it.

The digests travel with the losses: those of the first step, and before each save, so that no
checkpoint is of ranks that differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kdist_trainer import log
from kdist_trainer.errors import ReplicasDifferError
from kdist_trainer.state import digest_of
from kdist_trainer.training.sync import IntervalResult

if TYPE_CHECKING:
    from kdist_trainer.training.context import TrainContext

_HEX_DIGITS: Final = 12
"""48 bits, which a float of 64 bits holds exactly."""


def take_digest(ctx: TrainContext) -> int | None:
    """The digest of the weights and of the optimizer's state after this step; None if all ranks
    have begun alike, or have compared this step before.
    """
    if not ctx.continues_in_place or ctx.world.size == 1 or ctx.compared_step == ctx.state.step:
        return None
    ctx.compared_step = ctx.state.step
    trained = {one for group in ctx.optimizer.param_groups for one in group["params"]}
    weights = {name: one for name, one in ctx.module.named_parameters() if one in trained}
    optimizer = ctx.strategy.state_dict(ctx.optimizer)["optimizer"]
    return int(digest_of([weights, optimizer])[:_HEX_DIGITS], 16)


def check_replicas(ctx: TrainContext, result: IntervalResult) -> None:
    """End this group if ranks have posted different digests. Collective.

    Raises:
        ReplicasDifferError: If they have; on all ranks.
    """
    digests = result.digests
    if not digests:
        return
    others = [rank for rank, one in enumerate(digests) if one != digests[0]]
    if not others:
        return
    step = result.records[-1].step if result.records else ctx.state.step
    committed = max(0, ctx.checkpointing.committed_step)
    which = f"rank{'s'[: len(others) - 1]} {', '.join(map(str, others))}"
    what = (
        f"{which} hold{'s'[len(others) - 1 :]} other weights or optimizer states after step {step} "
        f"than rank 0, since a recovery in place before step {ctx.first_step}"
    )
    if ctx.world.is_rank_zero:
        message = (
            f"{what}: the optimizer or the model counts in plain attributes, which a new rank does "
            f"not have. All ranks start again from step {committed}, and from now on also where "
            "one is lost"
        )
        log.warn("replicas-differ", step=step, ranks=others, message=message)
        why = f"{what}, so that all ranks start again with new plain attributes"
        log.event(
            "not-reproducible",
            why=why,
            message=f"the training continues correctly, but is not bitwise identical: {why}",
        )
        ctx.step_log.add_event("replicas_differ", step=step, ranks=others)
    ctx.world.barrier()  # a rank that misses it would take the end of the others for a failure
    raise ReplicasDifferError(
        f"{what}; the training starts again from its newest checkpoint, of step {committed}"
    )
