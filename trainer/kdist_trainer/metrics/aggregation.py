"""The metrics of one agent: its own, and those that its ranks report, summed over generations. No
I/O, no clock.

After a rendezvous this node may run other ranks. The label `rank` shows only the current ones. What
a vanished rank had counted is added to the ranks that newly appeared on this node (to the lowest
one if there is none), so every series and the sum over the ranks stay monotonic. A carried sum
belongs to this node's worker slots; for the history of one rank use rates.
"""

from __future__ import annotations

import importlib.metadata
import platform
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kdist_trainer import __version__
from kdist_trainer.metrics.declarations import (
    AGENT_METRICS,
    BUILD_INFO,
    COLLECTIVE_FAILURES,
    JOB_INFO,
    RESTARTS_REMAINING,
    WORKER_EXITS,
    WORLD_SIZE_MAX,
    Kind,
    Metric,
    Scope,
)
from kdist_trainer.metrics.step_stats import COLLECTIVES, WALL_CATEGORIES, StepPhase, Wall
from kdist_trainer.metrics.wire import COUNTER_SLOTS, GAUGES, RECORDED, SLOTS, Record

Labels = tuple[str, ...]


class AgentMetrics:
    """Values of `AGENT_METRICS` by the metric's name and label values. Not thread-safe: the caller
    holds a lock.
    """

    def __init__(self) -> None:
        self._values: dict[str, dict[Labels, float]] = {metric.name: {} for metric in AGENT_METRICS}
        self._observed: dict[str, dict[Labels, list[float]]] = {
            metric.name: {} for metric in AGENT_METRICS
        }
        for metric in AGENT_METRICS:
            if metric.kind is Kind.COUNTER:
                self._values[metric.name] = dict.fromkeys(metric.series, 0.0)
        self._budget: int | None = None

    def resume(self, before: Mapping[str, Mapping[Labels, Sequence[float]]]) -> None:
        """Go on from what counters and histograms came to, by the metric's name."""
        for name, series in before.items():
            for labels, numbers in series.items():
                if len(numbers) == 1:
                    self._values[name][labels] = numbers[0]
                else:
                    self._observed[name][labels] = list(numbers)

    def count(self, metric: Metric, labels: Labels = (), amount: float = 1.0) -> None:
        """Let a counter grow. Raises `ValueError` if it would shrink."""
        if not amount >= 0:
            raise ValueError(f"{metric.name} cannot grow by {amount}")
        values = self._values[metric.name]
        values[labels] = values.get(labels, 0.0) + amount

    def count_exit(self, cause: str, signal: str, collective: str | None) -> None:
        """Count the end of a worker, and the failure of the collective that it was in."""
        self.count(WORKER_EXITS, (cause, signal))
        if collective:
            self.count(
                COLLECTIVE_FAILURES, (collective if collective in COLLECTIVES else "other", cause)
            )

    def set(self, metric: Metric, value: float, labels: Labels = ()) -> None:
        """Let a gauge show a value."""
        self._values[metric.name][labels] = value

    def allow(self, restarts: int, *, budget: int) -> None:
        """Let so many restarts be left of the job's budget."""
        self._budget = budget
        self.set(RESTARTS_REMAINING, restarts)

    def refill(self) -> None:
        """Let all of the budget be left again: a rank of this generation has committed a
        checkpoint.
        """
        if self._budget is not None:
            self.set(RESTARTS_REMAINING, self._budget)

    def observe(self, metric: Metric, seconds: float, labels: Labels = ()) -> None:
        """Let a histogram count an observation."""
        counts = self._observed[metric.name].setdefault(labels, [0.0] * (len(metric.buckets) + 2))
        counts[bisect_left(metric.buckets, seconds)] += 1
        counts[-1] += seconds

    def set_info(self, info: Mapping[str, str]) -> None:
        """Let the info metrics show these labels, empty where nobody knows them, and a gauge the
        largest world size.
        """
        try:
            torch_version = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            torch_version = ""
        found = {
            "version": __version__,
            "torch_version": torch_version,
            "python_version": platform.python_version(),
            **info,
        }
        for metric in (BUILD_INFO, JOB_INFO):
            self.set(metric, 1, tuple(str(found.get(label, "")) for label in metric.labels))
        if str(found.get("world_size_max", "")).isdecimal():
            self.set(WORLD_SIZE_MAX, int(found["world_size_max"]))

    def get(self, metric: Metric, labels: Labels = ()) -> float | None:
        """One value; None if it was never told."""
        return self._values[metric.name].get(labels)

    def total(self, metric: Metric) -> float:
        """Sum of a counter's series."""
        return sum(self._values[metric.name].values())

    def snapshot(self) -> dict[str, dict[Labels, list[float]]]:
        """All series by the metric's name, detached: one number each, or a histogram's slots."""
        single = {
            name: {labels: [value] for labels, value in series.items()}
            for name, series in self._values.items()
        }
        several = {
            name: {labels: list(slots) for labels, slots in series.items()}
            for name, series in self._observed.items()
        }
        return {name: single[name] or several[name] for name in single}


ACCEPTED, STALE, MALFORMED = "accepted", "stale", "malformed"

_MOST_EARLY = 1024
_NOTHING = (0.0,) * COUNTER_SLOTS
_WALL = SLOTS["kdist_wall_seconds_total"]
_STEPS = SLOTS["kdist_steps_total"].start
_STEP_SECONDS = SLOTS["kdist_step_duration_seconds"].stop - 1
_DATA_WAIT = SLOTS["kdist_step_phase_seconds_total"].start + StepPhase.DATA_WAIT
_WAITING, _PRODUCTIVE = (
    WALL_CATEGORIES.index(Wall.DATA_WAIT),
    WALL_CATEGORIES.index(Wall.PRODUCTIVE_STEP),
)
_LEADER_GAUGES = {
    GAUGES[metric.name]
    for metric in RECORDED
    if metric.kind is Kind.GAUGE and metric.scope is Scope.LEADER
}


def add(left: Sequence[float], right: Sequence[float]) -> list[float]:
    """Element-wise sum of two vectors of the same length."""
    return [a + b for a, b in zip(left, right, strict=True)]


@dataclass(frozen=True)
class MetricsSnapshot:
    """The reported numbers at one moment; vectors are laid out as `Record.counters` and
    `Record.gauges`.
    """

    generation: int
    world_size: int
    local_ranks: tuple[int, ...]
    by_rank: dict[int, list[float]]
    """Counters of each current local rank, earlier generations included."""
    sums: tuple[tuple[float, ...], ...]
    """The same in the order of ranks; before the first group, those of an earlier agent's ranks."""
    leader: list[float]
    """Counters that rank 0 reported while it was local."""
    gauges: tuple[float | None, ...]
    current: dict[int, Record]
    """The latest record of each local rank in this generation."""
    heard: dict[int, float]
    """Unix time of the latest record of each local rank that sent one."""
    received: dict[str, int]
    """Datagrams by outcome."""


class RankMetrics:
    """Accepts records and forms groups. Not thread-safe: the caller holds a lock."""

    def __init__(self) -> None:
        self.generation = 0
        self.world_size = 0
        self.local_ranks: tuple[int, ...] = ()
        self.received = {ACCEPTED: 0, STALE: 0, MALFORMED: 0}
        self._current: dict[int, Record] = {}
        self._early: dict[int, Record] = {}
        self._carried: dict[int, Sequence[float]] = {}
        self._leader: Sequence[float] = _NOTHING
        self._witness_wall = [0.0] * (_WALL.stop - _WALL.start)
        self._last_gauges: list[float | None] = [None] * len(GAUGES)
        self._heard: dict[int, float] = {}

    def resume(self, ranks: Sequence[Sequence[float]], leader: Sequence[float]) -> None:
        """Go on from the counters of an earlier agent's local ranks, which the first group's take
        over in their order.
        """
        self._carried = {
            number - len(ranks): list(counters) for number, counters in enumerate(ranks)
        }
        self._leader = leader

    @property
    def witness(self) -> Record | None:
        """The latest record of the first local rank."""
        return self._current.get(self.local_ranks[0]) if self.local_ranks else None

    @property
    def has_stepped(self) -> bool:
        """Whether the witness has finished a step in this generation."""
        return self.witness is not None and self.witness.counters[_STEPS] > 0

    def witness_wall(self) -> list[float]:
        """Seconds by wall category that the first local ranks of all generations accounted for."""
        return (
            add(self._witness_wall, _wall(self.witness))
            if self.witness
            else list(self._witness_wall)
        )

    def total(self, slot: int) -> float:
        """One counter, summed over the local ranks."""
        carried = sum(
            self._carried[rank][slot] for rank in self.local_ranks if rank in self._carried
        )
        return carried + sum(record.counters[slot] for record in self._current.values())

    def accept(self, record: Record, *, now: float) -> str:
        """Take one record in at Unix time `now`; the outcome, which is also counted."""
        outcome = self._take(record, now)
        self.received[outcome] += 1
        return outcome

    def reject(self) -> None:
        """Count a datagram that is no record."""
        self.received[MALFORMED] += 1

    def form(self, *, generation: int, world_size: int, local_ranks: Iterable[int]) -> None:
        """A new group: earlier sums become the base, vanished ranks' series end, early records of
        this group count.
        """
        ranks = tuple(sorted(local_ranks))
        self._last_gauges = list(self.gauges())
        for rank in list(self._current):
            self._fold(rank)
        self._move(ranks)
        self.generation, self.world_size, self.local_ranks = generation, world_size, ranks
        early, self._early = self._early, {}
        for record in early.values():
            self._take(record, self._heard.get(record.rank, 0.0))
        self._heard = {rank: time for rank, time in self._heard.items() if rank in self._current}

    def snapshot(self) -> MetricsSnapshot:
        """All of it, detached from what comes next."""
        by_rank = {rank: self._sum(rank) for rank in self.local_ranks}
        leader = (
            add(self._leader, self._current[0].counters)
            if 0 in self._current
            else list(self._leader)
        )
        return MetricsSnapshot(
            generation=self.generation,
            world_size=self.world_size,
            local_ranks=self.local_ranks,
            by_rank=by_rank,
            sums=tuple(tuple(self._sum(rank)) for rank in sorted({*self._carried, *self._current})),
            leader=leader,
            gauges=self.gauges(),
            current=dict(self._current),
            heard=dict(self._heard),
            received=dict(self.received),
        )

    def _take(self, record: Record, now: float) -> str:
        if record.generation > self.generation:
            known = self._early.get(record.rank)
            if known is None and len(self._early) >= _MOST_EARLY:
                return MALFORMED
            if known is not None and not _newer(record, known):
                return STALE
            self._early[record.rank] = record
        else:
            if record.generation < self.generation:
                return STALE
            if record.rank not in self.local_ranks:
                return MALFORMED
            known = self._current.get(record.rank)
            if known is not None and not _newer(record, known):
                return STALE
            floor: Sequence[float] = _NOTHING
            if known is not None and record.started_ns > known.started_ns:
                self._fold(record.rank)
            elif known is not None:
                floor = known.counters
            self._current[record.rank] = replace(
                record, counters=tuple(map(max, floor, record.counters))
            )
        self._heard[record.rank] = now
        return ACCEPTED

    def _fold(self, rank: int) -> None:
        """Make a rank's current sums part of its base."""
        if self.local_ranks and rank == self.local_ranks[0]:
            self._witness_wall = self.witness_wall()
        if rank == 0:
            self._leader = add(self._leader, self._current[0].counters)
        self._carried[rank] = self._sum(rank)
        del self._current[rank]

    def _move(self, ranks: tuple[int, ...]) -> None:
        vanished = [rank for rank in sorted(self._carried) if rank not in ranks]
        appeared = [rank for rank in ranks if rank not in self._carried]
        for index, rank in enumerate(vanished):
            heir = appeared[index] if index < len(appeared) else ranks[0]
            self._carried[heir] = add(self._carried.get(heir, _NOTHING), self._carried.pop(rank))

    def _sum(self, rank: int) -> list[float]:
        base = self._carried.get(rank, _NOTHING)
        return add(base, self._current[rank].counters) if rank in self._current else list(base)

    def gauges(self) -> tuple[float | None, ...]:
        """Rank 0's where they are the leader's, else the largest; the last known one until a new
        group reports.
        """
        found = []
        for index, last in enumerate(self._last_gauges):
            if index in _LEADER_GAUGES:
                records = [self._current[0]] if 0 in self._current else []
                last = last if 0 in self.local_ranks else None
            else:
                records = list(self._current.values())
            values = [value for record in records if (value := record.gauges[index]) is not None]
            found.append(max(values) if values else last)
        return tuple(found)


def _wall(record: Record) -> list[float]:
    """What a rank spent its time on: what it said, and its steps, whose waiting for data was not
    productive.
    """
    seconds = list(record.counters[_WALL])
    waited = record.counters[_DATA_WAIT]
    seconds[_WAITING] += waited
    seconds[_PRODUCTIVE] += max(0.0, record.counters[_STEP_SECONDS] - waited)
    return seconds


def _newer(record: Record, known: Record) -> bool:
    return (record.started_ns, record.sequence) > (known.started_ns, known.sequence)
