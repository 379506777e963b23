"""What the ranks of this node have reported, summed over generations so that no counter ever goes back. No I/O, no clock.

A rank's number belongs to the group of the day: after a rendezvous this node may hold other ranks. The label `rank` shows
only the current ones. What a vanished rank had counted moves, in order, to the ranks that newly appeared here (to the
lowest one where none did), so every series and the sum over the ranks stay monotone. A carried sum says what this node's
worker slots did; who needs one rank's own history takes rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kdist_trainer.stats import COUNTER_SLOTS, GAUGES, RECORDED, SLOTS, WALL_CATEGORIES, Kind, Record, Scope, StepPhase, Wall

ACCEPTED, STALE, MALFORMED = "accepted", "stale", "malformed"

_MOST_EARLY = 1024
_NOTHING = (0.0,) * COUNTER_SLOTS
_WALL = SLOTS["kdist_wall_seconds_total"]
_STEPS = SLOTS["kdist_steps_total"].start
_STEP_SECONDS = SLOTS["kdist_step_duration_seconds"].stop - 1
_DATA_WAIT = SLOTS["kdist_step_phase_seconds_total"].start + StepPhase.DATA_WAIT
_WAITING, _PRODUCTIVE = WALL_CATEGORIES.index(Wall.DATA_WAIT), WALL_CATEGORIES.index(Wall.PRODUCTIVE_STEP)
_LEADER_GAUGES = {GAUGES[metric.name] for metric in RECORDED if metric.kind is Kind.GAUGE and metric.scope is Scope.LEADER}


def add(left: Sequence[float], right: Sequence[float]) -> list[float]:
    """Element-wise sum of two vectors of the same length."""
    return [a + b for a, b in zip(left, right, strict=True)]


@dataclass(frozen=True)
class Snapshot:
    """The reported numbers at one moment; vectors are laid out as `Record.counters` and `Record.gauges`."""

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


class Totals:
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
        """Go on from the counters of an earlier agent's local ranks, which the first group's take over in their order."""
        self._carried = {number - len(ranks): list(counters) for number, counters in enumerate(ranks)}
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
        return add(self._witness_wall, _wall(self.witness)) if self.witness else list(self._witness_wall)

    def total(self, slot: int) -> float:
        """One counter, summed over the local ranks."""
        carried = sum(self._carried[rank][slot] for rank in self.local_ranks if rank in self._carried)
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
        """A new group: earlier sums become the base, vanished ranks' series end, early records of this group count."""
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

    def snapshot(self) -> Snapshot:
        """All of it, detached from what comes next."""
        by_rank = {rank: self._sum(rank) for rank in self.local_ranks}
        leader = add(self._leader, self._current[0].counters) if 0 in self._current else list(self._leader)
        return Snapshot(
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
            self._current[record.rank] = replace(record, counters=tuple(map(max, floor, record.counters)))
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
        """Rank 0's where they are the leader's, else the largest; the last known one until a new group reports."""
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
    """What a rank spent its time on: what it said, and its steps, whose waiting for data was not productive."""
    seconds = list(record.counters[_WALL])
    waited = record.counters[_DATA_WAIT]
    seconds[_WAITING] += waited
    seconds[_PRODUCTIVE] += max(0.0, record.counters[_STEP_SECONDS] - waited)
    return seconds


def _newer(record: Record, known: Record) -> bool:
    return (record.started_ns, record.sequence) > (known.started_ns, known.sequence)
