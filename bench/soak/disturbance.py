"""Causes the accidents of a scenario in turn, and takes how long the training took to come back."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

from bench.soak.scenarios import HOLD_SECONDS, Accident, Scenario
from tests.faults.training_run import TrainingRun, kill


class Disturbance:
    """Disturbs one run; `advance` is called again and again, and never waits."""

    def __init__(self, run: TrainingRun, scenario: Scenario, hold: Path) -> None:
        self._run, self._scenario, self._hold = run, scenario, hold
        self._accidents = itertools.cycle(scenario.accidents)
        self._next = next(self._accidents)
        self._struck_at: float | None = None
        self._gone: set[int] = set()
        self._generation = 0
        self._begun: int | None = None  # the step from which the newer group has gone on
        self._calm_since = time.monotonic()
        self._hold_until: float | None = None
        self._recoveries: list[float] = []
        self._count = 0

    def advance(self) -> None:
        """Cause the next accident if it is time, or see whether the last one is over."""
        now = time.monotonic()
        if self._hold_until is not None:
            if now >= self._hold_until:
                self._hold.unlink(missing_ok=True)
                self._hold_until, self._calm_since = None, now
        elif self._struck_at is not None:
            if self._has_recovered():
                self._recoveries.append(round(now - self._struck_at, 2))
                self._struck_at, self._calm_since = None, now
        elif now >= self._calm_since + self._scenario.pause and self._trains():
            self._strike(self._next, now)
            self._next = next(self._accidents)

    def take(self) -> dict[str, Any]:
        """The accidents and the recoveries, in seconds, since the last call."""
        found = {"accidents": self._count, "recoveries": self._recoveries}
        self._count, self._recoveries = 0, []
        return found

    def _strike(self, accident: Accident, now: float) -> None:
        ranks = self._run.ranks()
        if accident.what == "storage":
            self._hold.touch()
            self._hold_until = now + HOLD_SECONDS
        elif accident.what == "agent":
            self._gone = {rank.pid for rank in ranks if rank.node == accident.node}
            pids = [pid for node, pid in self._run.agents().items() if node == accident.node]
        else:
            key = (accident.node, accident.rank)
            self._gone = {rank.pid for rank in ranks if (rank.node, rank.number) == key}
            pids = [*self._gone]
        if accident.what != "storage":
            self._struck_at, self._begun = now, None
            self._generation = max(rank.beat.generation for rank in ranks)
            for pid in pids:
                kill(pid)
        self._count += 1

    def _trains(self) -> bool:
        ranks = self._run.ranks()
        return len(ranks) == self._size and all(rank.beat.step > 0 for rank in ranks)

    def _has_recovered(self) -> bool:
        """Whether all ranks are in a newer group, and have finished a step in it."""
        ranks = self._run.ranks()
        if (
            len(ranks) < self._size
            or any(rank.pid in self._gone for rank in ranks)
            or min(rank.beat.generation for rank in ranks) <= self._generation
        ):
            return False
        step = min(rank.beat.step for rank in ranks)
        if self._begun is None:
            self._begun = step
        return step > self._begun

    @property
    def _size(self) -> int:
        return self._scenario.nodes * self._scenario.procs
