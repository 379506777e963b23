"""Drawn runs that lose ranks: what a training loses that saves at fixed intervals, and by itself.

A run is a row of generations of drawn lengths. A save begins when the training time since the last
commit has reached the interval; it stops the training for its cost and is durable after its
duration. Lost is all time that did not bring the training on: what saves cost, and what was trained
after the last commit. The clock goes on after a loss where it stood.
"""

from __future__ import annotations

from dataclasses import replace
from math import exp, gamma
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kdist_trainer.checkpoint.interval import AutoInterval, MeasuredSave, SaveHistory

Floats = NDArray[np.float64]
KNOWN: Final = 20
"""Losses after which an interval should be good."""
LOSSES: Final = 60
_GROWTH: Final = 0.4
"""How much longer a run may become, as a share, until the interval is looked at again."""
_NOISE: Final = 0.3
"""Of the measured costs, as the deviation of their logarithm."""


class Case(NamedTuple):
    """What runs meet, in seconds."""

    between_losses: float
    cost: float
    duration: float
    """From the start of a save until it is durable."""
    shape: float
    """Of the Weibull distribution of the time between losses; 1 is exponential."""

    def draw(self, generator: np.random.Generator, *, seeds: int) -> Floats:
        """The lengths of the generations of each run."""
        scale = self.between_losses / gamma(1 + 1 / self.shape)
        return scale * generator.weibull(self.shape, (seeds, LOSSES))

    def intervals(self) -> Floats:
        """Fixed intervals within the bounds after a loss."""
        least = max(10.0, 2 * self.duration)
        return np.geomspace(least, max(least, min(3600.0, max(600.0, 30 * self.cost))), 25)


class Comparison(NamedTuple):
    """What was lost over all runs, as a share of what the best fixed interval loses."""

    first: float
    """In the generations before `KNOWN` losses."""
    later: float
    beyond_default: float
    """How much more is lost than with 300 s, as a share of all time."""


def compare(case: Case, generator: np.random.Generator, *, seeds: int) -> Comparison:
    """Let drawn runs save by themselves and at fixed intervals."""
    lengths = case.draw(generator, seeds=seeds)
    auto = np.array([lose_auto(case, each, generator) for each in lengths])
    fixed = lose_fixed(case, lengths, case.intervals())
    (default,) = lose_fixed(case, lengths, np.array([max(300.0, 2 * case.duration)]))
    first, later = (
        float(auto[:, part].sum() / fixed[:, :, part].sum((1, 2)).min())
        for part in (slice(KNOWN), slice(KNOWN, None))
    )
    return Comparison(first, later, float((auto.sum() - default.sum()) / lengths.sum()))


def lose_fixed(case: Case, lengths: Floats, intervals: Floats) -> Floats:
    """The time that is lost, by interval, run and generation."""
    every = intervals[:, None]
    clock = np.zeros((len(intervals), len(lengths)))
    lost = np.empty((len(intervals), *lengths.shape))
    for number in range(lengths.shape[1]):
        length = lengths[:, number][None, :]
        first = np.maximum(0.0, every - clock)
        more = np.floor((length - case.duration - first) / every)  # commits after the first one
        kept = np.where(more >= 0, first + more * (every - case.cost), 0.0)
        lost[:, :, number] = length - kept
        since = np.where(more >= 0, length - first - more * every, clock + length)
        clock = np.minimum(since, every)
    return lost


def lose_auto(case: Case, lengths: Floats, generator: np.random.Generator) -> Floats:
    """The time that is lost in each generation of one run."""
    history, clock = SaveHistory(), 0.0
    lost = np.empty(len(lengths))
    for number, length in enumerate(lengths):
        kept, clock, cost = _train(case, float(length), history, clock, generator)
        lost[number] = length - kept
        history = history.followed_by(float(length))
        if cost is not None:
            history = replace(history, cost=cost, duration=case.duration)
    return lost


def measure(cost: float, *, duration: float, is_first: bool = False) -> MeasuredSave:
    """A save that has cost training time."""
    return MeasuredSave(1, cost, duration, 0, 0.0, 0.0, is_first)


def _train(
    case: Case, length: float, history: SaveHistory, clock: float, generator: np.random.Generator
) -> tuple[float, float, float | None]:
    """How far a generation brings the training on, the clock at its end, and what saves cost."""
    interval = AutoInterval(history)
    is_known = history.cost is not None
    at, kept, work = 0.0, 0.0, 0.0  # until `at` there is `work`
    while True:
        every = interval.seconds(at)
        saved = at + max(0.0, every - clock)
        if saved + case.duration > length:
            return kept, min(clock + length - at, every), interval.cost
        more = 0
        if is_known:  # several alike at once, as long as the interval stays
            known = history.mean_seconds(at) * (len(history.losses) + 1)
            until = min(length - case.duration, at + _GROWTH * known)
            more = max(0, int((until - saved) / every))
        kept = work + saved - at + more * (every - case.cost)
        at, clock, work, is_known = saved + more * every, 0.0, kept - case.cost, True
        measured = case.cost * exp(generator.normal(0, _NOISE))
        interval.add_save(measure(measured, duration=case.duration))
        interval.take_costs(interval.cost or 0.0)
