"""Where a step's time goes: its phases by the clock, and its all-reduces by a communication hook.

The hook does what DDP would do without one - multiply by 1/world, all-reduce - so the weights stay the same to the bit,
and reads the clock twice per bucket. Latencies of buckets overlap: their sum lies, so what is kept is the time with at
least one all-reduce in flight (busy) and the tail between the last one's launch and its end, which no computation hides.
"""

from __future__ import annotations

from time import perf_counter

from kdist_trainer.stats import StepPhase, StepStats


class Laps:
    """A stopwatch that hands every moment to one phase of the step, so that the phases sum to the time it ran."""

    def __init__(self, stats: StepStats) -> None:
        self._phase = stats.phase
        self._last = perf_counter()

    def lap(self, phase: StepPhase) -> None:
        """The time since the last lap went to `phase`."""
        now = perf_counter()
        self._phase[phase] += now - self._last
        self._last = now

    def skip(self) -> float:
        """The time since the last lap belonged to no step (a save, an evaluation); it is returned, in seconds."""
        now = perf_counter()
        seconds, self._last = now - self._last, now
        return seconds
