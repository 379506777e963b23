"""The numbers of one agent: its own metrics, those that its ranks report, its wall time by category
and the work that no checkpoint holds. Performs no I/O and reads no clock.

`RankMetrics` sums over generations. After a rendezvous this node may run other ranks. The label
`rank` shows only the current ones. The counters of a rank that left are added to a rank that is new
on this node (to the lowest rank if none is new), so every series and the sum over the ranks stay
monotonic. Carried counters belong to the worker slots of this node; for the history of one rank use
rates.

`WallTimeBreakdown` (goodput) has categories that only grow and always add up to the elapsed time.
It has two sources. The first local rank reports the time that it spent, but each step only once it
is over; the agent's state classifies the remaining time. So the exact breakdown of a moment is
known a little later. The published values follow it: each reading distributes the time since the
previous reading over the categories that lag behind the exact breakdown, in proportion to their
lag. Published seconds are never taken back; a wrong guess during one step is corrected in the
next.
"""

from __future__ import annotations

import importlib.metadata
import platform
import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kdist_trainer import __version__
from kdist_trainer.metrics import agent_metrics
from kdist_trainer.metrics.agent_metrics import AGENT_METRICS, BUILD_INFO, JOB_INFO, WORLD_SIZE_MAX
from kdist_trainer.metrics.metric import Kind, Metric, Scope
from kdist_trainer.metrics.rank_metrics import WALL_CATEGORIES, StepPhase, WallCategory
from kdist_trainer.metrics.transport import COUNTER_SLOTS, GAUGES, RECORDED, SLOTS, Record
from kdist_trainer.processes.liveness import Phase

Labels = tuple[str, ...]


class AgentMetrics:
    """Values of `AGENT_METRICS` by the metric's name and label values. Not thread-safe: callers
    hold a lock.
    """

    def __init__(self) -> None:
        self._values: dict[str, dict[Labels, list[float]]] = {
            metric.name: {each: [0.0] for each in metric.series if metric.kind is Kind.COUNTER}
            for metric in AGENT_METRICS
        }
        """One number each, or a histogram's slots."""

    def restore(self, persisted: Mapping[str, Mapping[Labels, Sequence[float]]]) -> None:
        """Set the counters and histograms, given by the metric's name, to persisted values."""
        for name, series in persisted.items():
            self._values[name] |= {labels: list(numbers) for labels, numbers in series.items()}

    def increment(self, metric: Metric, labels: Labels = (), amount: float = 1.0) -> None:
        """Increment a counter. Raises `ValueError` if `amount` is negative."""
        if not amount >= 0:
            raise ValueError(f"{metric.name} cannot be incremented by {amount}")
        self._values[metric.name].setdefault(labels, [0.0])[0] += amount

    def set(self, metric: Metric, value: float, labels: Labels = ()) -> None:
        self._values[metric.name][labels] = [value]

    def observe(self, metric: Metric, seconds: float, labels: Labels = ()) -> None:
        counts = self._values[metric.name].setdefault(labels, [0.0] * (len(metric.buckets) + 2))
        counts[bisect_left(metric.buckets, seconds)] += 1
        counts[-1] += seconds

    def set_info(self, info: Mapping[str, str]) -> None:
        """Set the info metrics from these labels (empty where unknown), and the maximum world size
        from the label `world_size_max`.
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
        """The value of one series; None if it was never set."""
        numbers = self._values[metric.name].get(labels)
        return None if numbers is None else numbers[0]

    def total(self, metric: Metric) -> float:
        """Sum of a counter's series."""
        return sum(numbers[0] for numbers in self._values[metric.name].values())

    def snapshot(self) -> dict[str, dict[Labels, list[float]]]:
        """Copy all series, by the metric's name: one number each, or a histogram's slots."""
        return {
            name: {labels: list(numbers) for labels, numbers in series.items()}
            for name, series in self._values.items()
        }


ACCEPTED, STALE, MALFORMED = "accepted", "stale", "malformed"

_MAX_PENDING = 1024
_ZEROS = (0.0,) * COUNTER_SLOTS
_WALL = SLOTS["kdist_wall_seconds_total"]
_STEPS = SLOTS["kdist_steps_total"].start
_STEP_SECONDS = SLOTS["kdist_step_duration_seconds"].stop - 1
_DATA_WAIT = SLOTS["kdist_step_phase_seconds_total"].start + StepPhase.DATA_WAIT
_WALL_DATA_WAIT = WALL_CATEGORIES.index(WallCategory.DATA_WAIT)
_WALL_PRODUCTIVE = WALL_CATEGORIES.index(WallCategory.PRODUCTIVE_STEP)
_COMMITTED = GAUGES["kdist_checkpoint_last_success_step"]
_COMMITTED_AT = GAUGES["kdist_checkpoint_last_success_timestamp_seconds"]
_RANK_ZERO_GAUGES = {
    GAUGES[metric.name]
    for metric in RECORDED
    if metric.kind is Kind.GAUGE and metric.scope is Scope.RANK_ZERO
}


def add(left: Sequence[float], right: Sequence[float]) -> list[float]:
    """Element-wise sum of two vectors of the same length."""
    return [a + b for a, b in zip(left, right, strict=True)]


@dataclass(frozen=True)
class MetricsSnapshot:
    """The reported values at one moment; vectors are laid out as `Record.counters` and
    `Record.gauges`.
    """

    generation: int
    world_size: int
    local_ranks: tuple[int, ...]
    by_rank: dict[int, list[float]]
    """Counters of each current local rank, earlier generations included."""
    in_order: tuple[tuple[float, ...], ...]
    """The same in the order of ranks; before the first rendezvous, the persisted counters."""
    rank_zero: list[float]
    """Counters that rank 0 reported while it was local."""
    gauges: tuple[float | None, ...]
    current: dict[int, Record]
    """The latest record of each local rank in this generation."""
    received_at: dict[int, float]
    """Unix time at which the latest record of each local rank was received."""
    received: dict[str, int]
    """Datagrams by outcome."""


class RankMetrics:
    """The counters and gauges that the local ranks report. Not thread-safe: callers hold a lock."""

    def __init__(self) -> None:
        self.generation = 0
        self.world_size = 0
        self.local_ranks: tuple[int, ...] = ()
        self.received = {ACCEPTED: 0, STALE: 0, MALFORMED: 0}
        self._current: dict[int, Record] = {}
        self._pending: dict[int, Record] = {}
        self._carried: dict[int, Sequence[float]] = {}
        self._rank_zero: Sequence[float] = _ZEROS
        self._wall_seconds = [0.0] * (_WALL.stop - _WALL.start)
        self._last_gauges: list[float | None] = [None] * len(GAUGES)
        self._received_at: dict[int, float] = {}

    def restore(self, ranks: Sequence[Sequence[float]], rank_zero: Sequence[float]) -> None:
        """Start from persisted counters: those of the previous agent's local ranks, which the local
        ranks of the first worker group continue in this order, and those of rank 0 while it was
        local.
        """
        # negative numbers: ranks that are not in any group
        self._carried = {
            number - len(ranks): list(counters) for number, counters in enumerate(ranks)
        }
        self._rank_zero = rank_zero

    @property
    def first_local(self) -> Record | None:
        return self._current.get(self.local_ranks[0]) if self.local_ranks else None

    @property
    def has_stepped(self) -> bool:
        """Whether the first local rank has completed a step in this generation."""
        return self.first_local is not None and self.first_local.counters[_STEPS] > 0

    def wall_seconds(self) -> list[float]:
        """Seconds by wall-time category that the first local rank accounted for, over all
        generations.
        """
        if self.first_local is None:
            return list(self._wall_seconds)
        return add(self._wall_seconds, _wall_seconds(self.first_local))

    def total(self, slot: int) -> float:
        carried = sum(
            self._carried[rank][slot] for rank in self.local_ranks if rank in self._carried
        )
        return carried + sum(record.counters[slot] for record in self._current.values())

    def accept(self, record: Record, *, now: float) -> str:
        """Process one record received at Unix time `now`. Returns the outcome, which is also
        counted: `ACCEPTED`, `STALE` or `MALFORMED`.
        """
        outcome = self._store(record, now)
        self.received[outcome] += 1
        return outcome

    def reject(self) -> None:
        """Count a datagram that is not a record."""
        self.received[MALFORMED] += 1

    def start_group(
        self,
        *,
        generation: int,
        world_size: int,
        local_ranks: Iterable[int],
        committed: tuple[int | None, float | None] = (None, None),
    ) -> None:
        """Start a new worker group: carry the counters so far, end the series of ranks that left,
        and process the records of this group that arrived early. `committed` are the step and the
        Unix time of the newest checkpoint as it begins, as far as they are known, which count until
        rank 0 reports another.
        """
        ranks = tuple(sorted(local_ranks))
        self._last_gauges = list(self.gauges())
        self._last_gauges[_COMMITTED], self._last_gauges[_COMMITTED_AT] = committed
        for rank in list(self._current):
            self._carry(rank)
        left = [rank for rank in sorted(self._carried) if rank not in ranks]
        joined = [rank for rank in ranks if rank not in self._carried]
        for index, rank in enumerate(left):
            successor = joined[index] if index < len(joined) else ranks[0]
            self._carried[successor] = add(
                self._carried.get(successor, _ZEROS), self._carried.pop(rank)
            )
        self.generation = generation
        self.world_size = world_size
        self.local_ranks = ranks
        pending, self._pending = self._pending, {}
        for record in pending.values():
            self._store(record, self._received_at.get(record.rank, 0.0))
        self._received_at = {
            rank: time for rank, time in self._received_at.items() if rank in self._current
        }

    def snapshot(self) -> MetricsSnapshot:
        by_rank = {rank: self._sum(rank) for rank in self.local_ranks}
        rank_zero = (
            add(self._rank_zero, self._current[0].counters)
            if 0 in self._current
            else list(self._rank_zero)
        )
        ranks = sorted({*self._carried, *self._current})
        return MetricsSnapshot(
            generation=self.generation,
            world_size=self.world_size,
            local_ranks=self.local_ranks,
            by_rank=by_rank,
            in_order=tuple(tuple(self._sum(rank)) for rank in ranks),
            rank_zero=rank_zero,
            gauges=self.gauges(),
            current=dict(self._current),
            received_at=dict(self._received_at),
            received=dict(self.received),
        )

    def _store(self, record: Record, now: float) -> str:
        if record.generation > self.generation:
            known = self._pending.get(record.rank)
            if known is None and len(self._pending) >= _MAX_PENDING:
                return MALFORMED
            if known is not None and not _newer(record, known):
                return STALE
            self._pending[record.rank] = record
        else:
            if record.generation < self.generation:
                return STALE
            if record.rank not in self.local_ranks:
                return MALFORMED
            known = self._current.get(record.rank)
            if known is not None and not _newer(record, known):
                return STALE
            minimum: Sequence[float] = _ZEROS
            if known is not None and record.started_ns > known.started_ns:
                self._carry(record.rank)
            elif known is not None:
                minimum = known.counters
            self._current[record.rank] = replace(
                record, counters=tuple(map(max, minimum, record.counters))
            )
        self._received_at[record.rank] = now
        return ACCEPTED

    def _carry(self, rank: int) -> None:
        """Move the current counters of a rank to those carried over."""
        if self.local_ranks and rank == self.local_ranks[0]:
            self._wall_seconds = self.wall_seconds()
        if rank == 0:
            self._rank_zero = add(self._rank_zero, self._current[0].counters)
        self._carried[rank] = self._sum(rank)
        del self._current[rank]

    def _sum(self, rank: int) -> list[float]:
        base = self._carried.get(rank, _ZEROS)
        return add(base, self._current[rank].counters) if rank in self._current else list(base)

    def gauges(self) -> tuple[float | None, ...]:
        """The gauges: that of rank 0 or the maximum over the local ranks, by the metric's scope.
        Until a new group reports, the last known value.
        """
        found = []
        for index, last in enumerate(self._last_gauges):
            if index in _RANK_ZERO_GAUGES:
                records = [self._current[0]] if 0 in self._current else []
                last = last if 0 in self.local_ranks else None
            else:
                records = list(self._current.values())
            values = [value for record in records if (value := record.gauges[index]) is not None]
            found.append(max(values) if values else last)
        return tuple(found)


def _wall_seconds(record: Record) -> list[float]:
    """Seconds by wall-time category: those reported, and the time of the steps, of which waiting
    for data is not productive.
    """
    seconds = list(record.counters[_WALL])
    data_wait = record.counters[_DATA_WAIT]
    seconds[_WALL_DATA_WAIT] += data_wait
    seconds[_WALL_PRODUCTIVE] += max(0.0, record.counters[_STEP_SECONDS] - data_wait)
    return seconds


def _newer(record: Record, known: Record) -> bool:
    return (record.started_ns, record.sequence) > (known.started_ns, known.sequence)


_CATEGORY_BY_STATE = {
    "pending": WallCategory.STARTUP,
    "rendezvous": WallCategory.RENDEZVOUS,
    "standby": WallCategory.IDLE,
    "initializing": WallCategory.INIT,
    "running": WallCategory.IDLE,
    "checkpointing": WallCategory.IDLE,
    "restarting": WallCategory.RESTART,
    "hung": WallCategory.STALLED,
    "succeeded": WallCategory.IDLE,
    "failed": WallCategory.IDLE,
}
_RANKS_RUNNING = {"initializing", "running", "checkpointing"}
_CATEGORY_BY_PHASE = {
    Phase.START: WallCategory.INIT,
    Phase.RENDEZVOUS: WallCategory.INIT,
    Phase.INIT: WallCategory.INIT,
    Phase.RESTORE: WallCategory.CHECKPOINT_RESTORE,
    Phase.DATA: WallCategory.DATA_WAIT,
    Phase.STEP: WallCategory.PRODUCTIVE_STEP,
    Phase.SYNC: WallCategory.PRODUCTIVE_STEP,
    Phase.SAVE: WallCategory.CHECKPOINT_SAVE,
    Phase.EVALUATE: WallCategory.EVALUATION,
    Phase.EXIT: WallCategory.IDLE,
}
_GUESSED = (WallCategory.IDLE, WallCategory.INIT, WallCategory.UNOBSERVED)
_NO_SECONDS = [0.0] * len(WALL_CATEGORIES)


class WallTimeBreakdown:
    """Seconds by category since `now`. Not thread-safe: callers hold a lock."""

    def __init__(
        self, now: float, persisted: Mapping[str, float] | None = None, *, observed: bool = True
    ) -> None:
        """Start the breakdown, at monotonic time `now`, and continue the seconds of previous
        agents. `observed` says whether ranks report what they do from their start, as the managed
        loop does; a script may never report.
        """
        known = [persisted[category] for category in WALL_CATEGORIES] if persisted else _NO_SECONDS
        self._start = now - sum(known)
        self._state = "pending"
        self._before_steps = WallCategory.INIT if observed else WallCategory.UNOBSERVED
        self._reported: Sequence[float] = _NO_SECONDS
        self._has_stepped = False
        self._classified = list(known)
        self._persisted = known
        self._published = list(known)

    def enter(self, state: str, *, now: float) -> None:
        """Change the agent's state; unreported time until now belongs to the previous state."""
        self._classify(now, self._default_category())
        self._state = state

    def report(self, reported: Sequence[float], *, has_stepped: bool, now: float) -> None:
        """Update the seconds by category that the ranks reported, over all generations. Time before
        `now` that they do not account for was idle; before the first step of this generation it was
        init, or unobserved.
        """
        category = self._default_category()  # before has_stepped changes: time so far was no idling
        self._reported = reported
        self._has_stepped = has_stepped
        if self._state in _RANKS_RUNNING:
            self._classify(now, category)
        # undo guesses about time that a late report accounts for
        excess = sum(self._exact()) - (now - self._start)
        for guessed in _GUESSED:
            index = WALL_CATEGORIES.index(guessed)
            undone = min(max(0.0, excess), self._classified[index] - self._persisted[index])
            self._classified[index] -= undone
            excess -= undone

    def read(self, now: float, *, phase: Phase | None = None) -> dict[str, float]:
        """Return the seconds by category: they add up to the time since the start, and none is less
        than in the previous reading. Unreported time is attributed to the phase of the first local
        rank, by its heartbeat, for the time being.
        """
        exact = self._exact()
        exact[WALL_CATEGORIES.index(self._current_category(phase))] += self._unaccounted(now)
        lags = [
            max(0.0, seconds - shown) for seconds, shown in zip(exact, self._published, strict=True)
        ]
        elapsed = max(0.0, now - self._start - sum(self._published))
        if (total_lag := sum(lags)) > 0:
            self._published = [
                shown + lag * elapsed / total_lag
                for shown, lag in zip(self._published, lags, strict=True)
            ]
        return dict(zip(WALL_CATEGORIES, self._published, strict=True))

    def _current_category(self, phase: Phase | None) -> WallCategory:
        """The category of time that is not over yet."""
        if self._state not in _RANKS_RUNNING:
            return _CATEGORY_BY_STATE[self._state]
        if self._before_steps is WallCategory.UNOBSERVED and not self._has_stepped:
            return WallCategory.UNOBSERVED
        if phase:
            return _CATEGORY_BY_PHASE[phase]
        return WallCategory.PRODUCTIVE_STEP if self._has_stepped else WallCategory.INIT

    def _default_category(self) -> WallCategory:
        """The category of time that is over and that no rank accounted for."""
        if self._state in _RANKS_RUNNING and not self._has_stepped:
            return self._before_steps
        return _CATEGORY_BY_STATE[self._state]

    def _exact(self) -> list[float]:
        return [
            reported + classified
            for reported, classified in zip(self._reported, self._classified, strict=True)
        ]

    def _unaccounted(self, now: float) -> float:
        return max(0.0, now - self._start - sum(self._exact()))

    def _classify(self, now: float, category: WallCategory) -> None:
        """Attribute all unaccounted time until now to a category."""
        self._classified[WALL_CATEGORIES.index(category)] += self._unaccounted(now)


_INTERVAL = GAUGES["kdist_checkpoint_interval_seconds"]
_STEPPED_AT = GAUGES["kdist_last_step_timestamp_seconds"]
_STEP_EWMA = GAUGES["kdist_step_duration_ewma_seconds"]
_SAVE_SECONDS = SLOTS["kdist_checkpoint_duration_seconds"].stop - 1
"""The sum of the durations until a save was durable."""


class WorkAtRisk:
    """The training time that is in memory and in no checkpoint. Thread-safe; all times are Unix
    seconds.

    It is not known, and not shown, without a checkpoint folder, where rank 0 is on another node,
    while no rank of this node holds anything, and once the agent's work has ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept = self._spent = 0.0
        self._since: float | None = None
        self._committed: float | None = None
        self._last_duration: float | None = None
        self._saves = False
        self._is_held = True

    def start_group(self, kept: float, *, has_rank_zero: bool) -> None:
        """Begin again for a new worker group: `kept` is the training time that its ranks hold in
        memory and no checkpoint has.
        """
        with self._lock:
            self._kept, self._spent = kept, 0.0
            self._since = self._committed = None
            self._is_held = True
            self._saves = self._saves and has_rank_zero

    def add(self, record: Record, *, now: float) -> None:
        """Update from the record of a rank; only that of rank 0 counts."""
        if record.rank != 0:
            return
        gauges = record.gauges
        committed = gauges[_COMMITTED_AT]
        with self._lock:
            self._saves |= gauges[_INTERVAL] is not None or committed is not None
            if self._since is None:
                stepped = gauges[_STEPPED_AT]
                self._since = now if stepped is None else stepped - (gauges[_STEP_EWMA] or 0.0)
            if committed is None or committed == self._committed:
                return
            self._committed = committed
            before, self._spent = self._spent, record.counters[_SAVE_SECONDS]
            self._last_duration = max(0.0, self._spent - before)
            self._kept = 0.0
            self._since = max(self._since, committed - self._last_duration)

    def stop(self, *, now: float, is_kept: bool) -> None:
        """The group has ended: what ranks of this node have kept grows no more. If none has, and
        another node's may have, it is not known here until the next group begins.
        """
        with self._lock:
            self._is_held = is_kept
            if self._since is not None:
                self._kept += max(0.0, now - self._since)
            self._since = None

    def end(self) -> None:
        """The agent's work has ended: nothing is at risk any more."""
        with self._lock:
            self._saves = False

    def seconds(self, *, now: float) -> float | None:
        """The work at risk, in seconds; None if it is not known here."""
        with self._lock:
            if not (self._saves and self._is_held):
                return None
            return self._kept + (0.0 if self._since is None else max(0.0, now - self._since))

    def series(self, *, now: float) -> dict[str, dict[tuple[str, ...], list[float]]]:
        """The series of it and of the duration of the last save, as far as they are known."""
        at_risk = self.seconds(now=now)
        duration = None if at_risk is None else self._last_duration
        return {
            metric.name: {} if value is None else {(): [value]}
            for metric, value in (
                (agent_metrics.CHECKPOINT_AT_RISK, at_risk),
                (agent_metrics.CHECKPOINT_LAST_DURATION, duration),
            )
        }
