"""What measuring costs a step: timed all-reduces and records for the exporter; and what the record
of collectives costs.

    python -m bench.cost

Two ranks, a step of some 20 ms, one training that is cut into groups of blocks: one block of each
kind, in an order that is drawn. A group meets the same machine, so it is the differences within
groups that count. On a busy machine the time on the clock says little: next to it stands the time
that rank 0's process computes in a step, all of its threads together.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import sys
from collections.abc import Sequence

from bench.loops import kdist_on
from bench.ranks import launch_measured, report
from bench.table import columns, title
from bench.work import take_both
from kdist_trainer.instrumentation import collective_hooks
from kdist_trainer.instrumentation.collective_hooks import FlightRecorder
from kdist_trainer.instrumentation.step_timer import CollectiveTimer
from kdist_trainer.metrics.transport import Reporter
from kdist_trainer.processes.liveness import NullHeartbeat
from kdist_trainer.training import trainer
from kdist_trainer.training.context import TrainContext

SIZE = {"ranks": 2, "width": 384, "depth": 4, "batch": 512, "steps": 6000, "rounds": 1}
STEP_SECONDS = 0.02
KINDS = ("nothing", "collectives noted", "and timed, and reported")
"""Each measures what the one before does, and more: the last is what a training does."""
BLOCK = 6
"""Steps of a block. The first of them pays for the switch and is left out."""
WARM = 2 + len(KINDS) * BLOCK
"""Passes before the first block that counts: two of the warm-up, and a group of blocks."""


class Switch:
    """Takes the measuring out of a run, and puts it back."""

    def __init__(self, ctx: TrainContext) -> None:
        self._ctx = ctx
        self._recorder = next(
            each for each in collective_hooks.launch_hooks if isinstance(each, FlightRecorder)
        )
        self._timer = next(
            each for each in collective_hooks.launch_hooks if each is not self._recorder
        )
        self._measuring = ctx.collective_timer, ctx.reporter, ctx.heartbeat

    def turn(self, kind: int) -> None:
        """Measure what `KINDS` says."""
        for listener, least in ((self._recorder, 1), (self._timer, 2)):
            collective_hooks.unregister_launch_hook(listener)
            if kind >= least:
                collective_hooks.register_launch_hook(listener)
        ctx = self._ctx
        ctx.collective_timer, ctx.reporter, ctx.heartbeat = (
            self._measuring
            if kind == 2
            else (CollectiveTimer(), Silent(ctx.stats), NullHeartbeat())
        )


class Silent(Reporter):
    """Reports nothing."""

    def send(self) -> None:
        """Do nothing."""


def order(steps: int, number: int = len(KINDS)) -> list[int]:
    """The kind of each block of so many steps: in every group all of them, as it is drawn. The same
    on all ranks.
    """
    draw = random.Random(0)
    kinds = range(number)
    return [
        kind for _ in range(steps // (BLOCK * number) + 1) for kind in draw.sample(kinds, number)
    ]


def main() -> None:
    """Measure and print."""
    title(f"Cost of measuring: {SIZE['steps']} steps, of each kind {BLOCK} in turn, two ranks")
    clock, computed = launch_measured("bench.cost", SIZE, 1)
    for what, seconds in (("on the clock", clock), ("computed", computed)):
        print()
        compare(what, seconds)


def compare(what: str, seconds: Sequence[float], names: Sequence[str] = KINDS) -> None:
    """Print each kind's median, and its mean difference to the one before, with the standard error,
    and to the first.
    """
    blocks = [
        statistics.fmean(seconds[at + 1 : at + BLOCK])
        for at in range(0, len(seconds) - BLOCK + 1, BLOCK)
    ]
    kinds = order(len(seconds) + WARM, len(names))[len(names) :]
    taken = [
        [block for block, its in zip(blocks, kinds, strict=False) if its == kind]
        for kind in range(len(names))
    ]
    lines = []
    for kind, name in enumerate(names):
        more, total = (difference(taken[base], taken[kind]) for base in (max(0, kind - 1), 0))
        lines.append((name, f"{statistics.median(taken[kind]) * 1e3:.2f} ms", more, total))
    columns((what, "a step", "more than above, of 20 ms", "more than nothing, of 20 ms"), lines)


def difference(base: Sequence[float], other: Sequence[float]) -> str:
    """By how much the blocks of `other` are longer than their neighbours: mean and standard
    error.
    """
    if base is other:
        return ""
    apart = sorted(b - a for a, b in zip(base, other, strict=False))
    # without what the machine did to single blocks
    middle = apart[len(apart) // 10 : -len(apart) // 10]
    mean, error = statistics.fmean(middle), statistics.stdev(middle) / math.sqrt(len(middle))
    return f"{mean * 1e6:+.0f} ± {error * 1e6:.0f} us {mean / STEP_SECONDS:+.2%}"


def rank() -> None:
    """One rank: a training whose measuring is switched every few steps."""
    size = json.loads(os.environ["KDIST_BENCH"])
    os.environ["MASTER_PORT"] = str(size["ports"][0])
    step, kinds, switches = trainer.train_step, order(size["steps"]), list[Switch]()

    def switched(ctx: TrainContext) -> bool:
        if not switches:
            switches.append(Switch(ctx))
        if ctx.state.step % BLOCK == 0:
            switches[0].turn(kinds[ctx.state.step // BLOCK])
        return step(ctx)

    trainer.train_step = switched
    kdist_on(size)
    report(take_both(warm=WARM))


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main()
