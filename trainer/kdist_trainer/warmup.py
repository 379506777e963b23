"""The passes before the first step, whose gradients are thrown away: after them every step is like every other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from kdist_trainer.contract import check_loss, refuse_mean, split
from kdist_trainer.heartbeat import Phase
from kdist_trainer.passes import UNWATCHED, flow
from kdist_trainer.randomness import WEIGHTS, derive, generators_of
from kdist_trainer.resources import was_counting
from kdist_trainer.run import Run


def warm_up(run: Run) -> None:
    """Two backward passes whose gradients are thrown away, so that DDP's buckets are what they stay from then on.

    DDP sorts its buckets anew after the first backward pass. From three ranks on another order of sums means other bits: a
    resumed training would differ from the undisturbed one in its first step. So every generation begins like this.
    """
    run.beat(Phase.INIT, run.state.step)
    piece = run.loader.sample()
    run.set_generators(derive(run.state.seed, WEIGHTS))

    def backward(counting: AbstractContextManager[None] | None = None) -> None:
        if run.settings.strategy == "pipeline":
            flow(run, [piece], 1.0, UNWATCHED)
            return
        with run.precision.autocast(), counting or nullcontext():
            loss, count = split(run.workload, run.workload.loss(run.model, piece.batch))
        check_loss(run.workload, loss, count, piece.samples)
        loss.backward()  # type: ignore[no-untyped-call]

    with run.buffers.observed():
        try:
            backward(run.resources.counting(piece.samples))
        except Exception as error:
            if not was_counting(error):
                raise
            backward()
        drawing = generators_of(backward, run.world.device)
        if run.world.generation == 1:
            everywhere: Callable[[bool], bool] = partial(holds_everywhere, run) if run.strategy.sharded else bool
            refuse_mean(run.workload, run.module, piece.batch, piece.samples, everywhere=everywhere)
            run.strategy.let_go()
    if ":" not in run.settings.workload:  # of a user's loss nobody knows what it draws from later
        run.set_generators = drawing
    run.optimizer.zero_grad()


def holds_everywhere(run: Run, own: bool) -> bool:
    """Whether all ranks say so. Collective."""
    return all(run.world.all_gather_object(own))
