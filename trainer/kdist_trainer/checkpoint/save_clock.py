"""When a save is due by the clock: `SaveClock`, for the training loop, scripts and frameworks.

The clock counts training time since the state of the run's last commit. It goes on where a worker
group is lost: otherwise a run that loses a rank more often than the interval would never save.
Ranks that continue in place hand it over; at a start the agent reads it from the run's events.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from kdist_trainer.checkpoint.commit import SaveResult
from kdist_trainer.checkpoint.training_time import UNSAVED_VARIABLE

_FIRST_RETRY_SECONDS = 10.0
_MAX_DOUBLINGS = 30


class MeasuredSave(NamedTuple):
    """What a save that was committed has cost on this rank.

    Attributes:
        step: The step that it is of.
        stall: Seconds that the training stood still.
        duration: Seconds from its start until it was durable.
        steps_during: The steps that were finished meanwhile.
        step_seconds_during: Their mean time; 0 if there were none.
        step_seconds_outside: Mean time of the steps before it, since the save before; 0 if there
            were none.
        is_first: Whether it is the first one of this process.
    """

    step: int
    stall: float
    duration: float
    steps_during: int
    step_seconds_during: float
    step_seconds_outside: float
    is_first: bool


class SaveInterval(Protocol):
    """How much training may lie between two saves."""

    @property
    def cost(self) -> float | None:
        """What a save costs this rank, in seconds of training time; None if it is not known, or
        does not matter.
        """
        ...

    def seconds(self, trained: float, /) -> float | None:
        """The interval after `trained` seconds of training of this group; None to save by the clock
        never.
        """
        ...

    def add_save(self, save: MeasuredSave, /) -> None:
        """Take in a save that was committed; called on every rank."""
        ...

    def take_costs(self, cost: float, /) -> None:
        """Take in the greatest `cost` of all ranks; 0 is not known yet."""
        ...

    def take_news(self, trained: float, /) -> dict[str, float] | None:
        """What to tell of an interval that has changed; None if there is nothing."""
        ...

    def to_json(self, trained: float, /) -> dict[str, Any]:
        """What another rank needs to go on with it, after `trained` seconds of this group."""
        ...

    def load(self, document: Mapping[str, Any], /) -> None:
        """Go on with what `to_json` describes."""
        ...


class FixedInterval:
    """The interval that the user has set, or None: then saves are not due by the clock. What they
    cost does not matter.
    """

    cost = None

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds

    def seconds(self, _trained: float) -> float | None:
        """See `SaveInterval`."""
        return self._seconds

    def add_save(self, _save: MeasuredSave) -> None:
        """See `SaveInterval`."""

    def take_costs(self, _cost: float) -> None:
        """See `SaveInterval`."""

    def take_news(self, _trained: float) -> dict[str, float] | None:
        """See `SaveInterval`."""
        return None

    def to_json(self, _trained: float) -> dict[str, Any]:
        """See `SaveInterval`."""
        return {}

    def load(self, _document: Mapping[str, Any]) -> None:
        """See `SaveInterval`."""


class _Steps:
    """Number and time of steps."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    @property
    def mean(self) -> float:
        return self.seconds / self.count if self.count else 0.0


class SaveClock:
    """Says when a save is due. Each rank has one; rank 0's decides.

    Not thread-safe: used on the thread of the training.
    """

    _saves_of_process = 0

    def __init__(
        self,
        interval: SaveInterval,
        *,
        lost: float = 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Stand still until `start`.

        Args:
            interval: How much training may lie between two saves.
            lost: Seconds of training since the last commit that are lost, and done again.
            now: The time in seconds.
        """
        self.interval = interval
        self.failures = 0
        """The saves in a row that have failed, other than for a rank that was lost."""
        self.cuts = 0
        """The saves in a row that a lost rank has ended."""
        self._now = now
        self._trained = 0.0
        self._running_since: float | None = None
        self._lost = self._clamp(lost)
        self._saved_at = 0.0
        self._started: dict[int, float] = {}
        """Of saves that may be committed, the time at which their state was copied."""
        self._in_progress: int | None = None
        """The step of the save that has not ended."""
        self._last_step = -1
        self._retry_at = 0.0
        self._stall = 0.0
        self._ticked: float | None = None
        self._outside, self._during = _Steps(), _Steps()

    @classmethod
    def from_environment(cls, interval: SaveInterval) -> SaveClock:
        """The clock of a rank that starts: it continues what the agent has read."""
        lost = 0.0
        with suppress(ValueError):
            lost = float(os.environ.get(UNSAVED_VARIABLE, "0"))
        return cls(interval, lost=lost)

    @property
    def at_risk(self) -> float:
        """The training time that is in memory and in no checkpoint."""
        return self._total() - self._saved_at

    @property
    def unsaved(self) -> float:
        """The training time since the state of the last commit, work that was lost included."""
        return self._lost + self.at_risk

    @property
    def trained(self) -> float:
        """The training time of this worker group, in seconds."""
        return self._total()

    @property
    def interval_seconds(self) -> float | None:
        """How much training may lie between two saves; None to save by the clock never."""
        return self.interval.seconds(self._total())

    @property
    def pause_seconds(self) -> float:
        """How long the next save is to wait, since those before were not committed."""
        return max(0.0, self._retry_at - self._total())

    def take_news(self) -> dict[str, float] | None:
        """See `SaveInterval.take_news`."""
        return self.interval.take_news(self._total())

    @property
    def must_block(self) -> bool:
        """Whether the next save must be committed before training goes on, since a lost rank has
        ended the ones before.
        """
        return self.cuts >= 2

    def start(self) -> None:
        """Begin to count, or begin again."""
        self._running_since = self._now()

    def pause(self) -> None:
        """Stop counting."""
        self._trained = self._total()
        self._running_since = None

    def add_steps(self, count: int, seconds: float) -> None:
        """Take in how many steps are done, and their time."""
        steps = self._outside if self._in_progress is None else self._during
        steps.count += count
        steps.seconds += seconds

    def tick(self) -> None:
        """Take in that a step of a script is done, which lasts since the one before."""
        now = self._now()
        if self._ticked is not None:
            self.add_steps(1, now - self._ticked)
        self._ticked = now

    def is_due(self, step: int, *, answered_after: float = 0.0) -> bool:
        """Whether `step` is to be saved: training has gone on since the last save, none is in
        progress, and enough training is unsaved.

        Args:
            step: The last finished step.
            answered_after: Seconds of training until the ranks act on the answer, and again until
                they would act on the next one. Of the two moments, the one that is nearer to the
                interval's end is chosen: otherwise all saves would be one and a half of them late.
        """
        seconds = self.interval_seconds
        if seconds is None or self._in_progress is not None or step <= self._last_step:
            return False
        is_enough = self.unsaved + 1.5 * answered_after >= seconds
        return is_enough and self._total() >= self._retry_at

    def restored(self, step: int) -> None:
        """Continue from the checkpoint of `step`: what is newer is lost."""
        self._lost = self._clamp(self.unsaved)
        self._saved_at = self._total()
        self._last_step = step
        self._begin_again()

    def follow(self, step: int, *, carried: int | None = None) -> None:
        """Continue from memory; the newest checkpoint is of `step`. It may be one whose save the
        rank that handed the clock over has not seen to end. The save of step `carried` goes on.
        """
        is_lost = self._in_progress != carried and (self._in_progress or 0) > step
        at = self._started.get(-1 if carried is None else carried, self._total())
        self._last_step = step
        if step in self._started:
            self._commit(step)
        self.cuts += is_lost  # the rank that carried it is gone
        self._begin_again()
        if carried is not None:
            self._started[carried] = at
            self._in_progress = carried

    def save_started(self, step: int) -> None:
        """Take in that the state of `step` is copied now."""
        self._started[step] = self._total()
        self._last_step = self._in_progress = step
        self._during = _Steps()
        self._ticked = None  # the next step would last as long as the save

    def save_stalled(self, seconds: float) -> None:
        """Take in how long the training has stood still for the save that was started."""
        self._stall = seconds

    def save_ended(self, result: SaveResult) -> None:
        """Take in the result of a save. One that a lost rank has cut may be committed all the same:
        `follow` says so.
        """
        if self._in_progress == result.step:
            self._in_progress = None
        if result.ok:
            measured = MeasuredSave(
                step=result.step,
                stall=self._stall,
                duration=result.total_seconds,
                steps_during=self._during.count,
                step_seconds_during=self._during.mean,
                step_seconds_outside=self._outside.mean,
                is_first=SaveClock._saves_of_process == 0,
            )
            SaveClock._saves_of_process += 1
            self._commit(result.step)
            self._outside, self._during = _Steps(), _Steps()
            self.interval.add_save(measured)
        elif result.secondary:
            self.cuts += 1
            self._pause_saves(self.cuts)
        else:
            self._started.pop(result.step, None)
            self.failures += 1
            self._pause_saves(self.failures)

    def to_json(self) -> dict[str, Any]:
        """What another rank needs to go on with this clock."""
        total = self._total()
        return {
            "lost": self._lost,
            "at_risk": self.at_risk,
            "started": [[step, total - at] for step, at in self._started.items()],
            "in_progress": self._in_progress,
            "failures": self.failures,
            "cuts": self.cuts,
            "retry": max(0.0, self._retry_at - total),
            "interval": self.interval.to_json(total),
        }

    def load(self, document: Mapping[str, Any]) -> None:
        """Go on with the clock that `to_json` describes, from memory."""
        total = self._total()
        self.interval.load(document["interval"])
        self._lost = self._clamp(document["lost"])
        self._saved_at = total - document["at_risk"]
        self._started = {step: total - ago for step, ago in document["started"]}
        self._in_progress = document["in_progress"]
        self.failures, self.cuts = document["failures"], document["cuts"]
        self._retry_at = total + document["retry"]

    def _pause_saves(self, times: int) -> None:
        """Wait before the next save, after so many in a row that were not committed."""
        pause = _FIRST_RETRY_SECONDS * 2 ** min(times, _MAX_DOUBLINGS)
        self._retry_at = self._total() + min(pause, self.interval_seconds or pause)

    def _begin_again(self) -> None:
        """Continue in another group, or from a checkpoint: no save is in progress, and one that was
        cut need not wait, since the rank that was lost is replaced.
        """
        self._started.clear()
        self._in_progress = None
        if not self.failures:
            self._retry_at = 0.0

    def _commit(self, step: int) -> None:
        if (started := self._started.pop(step, None)) is None:
            return  # a later one is committed already
        self._saved_at = started
        self._started = {other: at for other, at in self._started.items() if other > step}
        self._lost = 0.0
        self._retry_at = 0.0
        self.failures = self.cuts = 0

    def _total(self) -> float:
        since = self._running_since
        return self._trained + (0.0 if since is None else self._now() - since)

    def _clamp(self, seconds: float) -> float:
        return max(0.0, min(seconds, self.interval_seconds or 0.0))
