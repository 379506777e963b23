"""What it costs that all ranks have the same buffers: kdist's one broadcast after a step, compared
with DDP's own and with none.

    python -m bench.buffers

Two ranks, a perceptron with a batch norm after every layer, one training that is cut into groups of
blocks: one block of each kind, in an order that is drawn, so that the kinds of a group meet the
same machine.
"""

from __future__ import annotations

import json
import os
import sys

from bench import cost
from bench.loops import kdist_off
from bench.ranks import launch_measured, report
from bench.table import title
from bench.work import take_both
from kdist_trainer.parallel.buffers import Buffers
from kdist_trainer.training import trainer
from kdist_trainer.training.context import TrainContext

SIZE = {"ranks": 2, "width": 384, "depth": 8, "norms": 1, "batch": 256, "steps": 3000, "rounds": 1}
KINDS = ("nothing sent", "kdist, after the step", "DDP, before the pass")


def main() -> None:
    """Measure and print."""
    title(f"Cost of equal buffers: {SIZE['depth']} batch norms, {SIZE['steps']} steps, two ranks")
    clock, computed = launch_measured("bench.buffers", SIZE, 1)
    for what, seconds in (("on the clock", clock), ("computed", computed)):
        print()
        cost.compare(what, seconds, KINDS)


def rank() -> None:
    """One rank: a training that sends its buffers another way every few steps."""
    size = json.loads(os.environ["KDIST_BENCH"])
    os.environ["MASTER_PORT"] = str(size["ports"][0])
    step, kinds = trainer.train_step, cost.order(size["steps"], len(KINDS))

    def switched(ctx: TrainContext) -> bool:
        if ctx.state.step % cost.BLOCK == 0:
            turn(ctx, kinds[ctx.state.step // cost.BLOCK])
        return step(ctx)

    trainer.train_step = switched
    kdist_off(size)
    report(take_both(warm=2 + len(KINDS) * cost.BLOCK))


def turn(ctx: TrainContext, kind: int) -> None:
    """Send buffers as `KINDS` says from now on."""
    send = Buffers.synchronize.__get__(ctx.buffers) if kind == 1 else _nothing
    ctx.buffers.synchronize = send  # type: ignore[method-assign]
    # torch 2.13 has another word than 2.10
    for word in ("forward_sync_buffers", "broadcast_buffers"):
        setattr(ctx.model, word, kind == 2)


def _nothing() -> bool:
    """Sends nothing."""
    return False


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main()
