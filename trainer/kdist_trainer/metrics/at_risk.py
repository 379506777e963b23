"""The work that a loss of all ranks now would cost, as the agent that runs rank 0 knows it."""

from __future__ import annotations

import threading

from kdist_trainer.metrics import declarations
from kdist_trainer.metrics.wire import GAUGES, SLOTS, Record

_INTERVAL = GAUGES["kdist_checkpoint_interval_seconds"]
_COMMITTED_AT = GAUGES["kdist_checkpoint_last_success_timestamp_seconds"]
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
        self._forget()

    def start_group(self, kept: float, *, has_rank_zero: bool) -> None:
        """Begin again for a new worker group.

        Args:
            kept: The training time that its ranks have kept in memory and no checkpoint holds.
            has_rank_zero: Whether this agent runs rank 0.
        """
        with self._lock:
            self._forget()
            self._kept = kept
            self._is_held = True
            self._saves = self._saves and has_rank_zero

    def add(self, record: Record, *, now: float) -> None:
        """Take in a record of a rank; that of rank 0 counts."""
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
                (declarations.CHECKPOINT_AT_RISK, at_risk),
                (declarations.CHECKPOINT_LAST_DURATION, duration),
            )
        }

    def _forget(self) -> None:
        self._kept = self._spent = 0.0
        self._since = self._committed = None
