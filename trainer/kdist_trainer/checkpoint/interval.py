"""When to save: the clock of a run's saves, and the interval that loses the least training time.
Free of torch: the agent reads the run's history before each worker group.

A save costs training time, and a loss that goes back to a checkpoint costs what was trained since.
Where a save costs C, and such losses are M apart, an interval of √(2CM) loses the least (Young
1974; Daly 2006 where C is not small next to M). Every rank measures C; M is read from the run's
events.

`SaveClock` counts the training time since the state of the run's last commit, for the training
loop, scripts and frameworks. It continues where a worker group is lost: otherwise a run that loses
a rank more often than the interval would never save. Ranks that continue in place hand it over; at
a start the agent reads it from the events (`unsaved_seconds`).
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Final, NamedTuple

from kdist_trainer.checkpoint.commit import SaveResult
from kdist_trainer.checkpoint.ledger import Event
from kdist_trainer.config import Every
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import (
    MalformedTextError,
    finite_number,
    number_of,
    parse_object,
)

UNSAVED_VARIABLE = "KDIST_UNSAVED_SECONDS"
"""The environment variable of a rank with the training time since the last commit."""
_ENDS = ("failure", "stopped", "done")


class TrainedGeneration(NamedTuple):
    """The training of one worker group, in Unix time.

    Attributes:
        number: The generation.
        began: When it began to train; its first step is known when it is finished.
        ended: When it ended, or the time of its last event.
        kept: Whether the next group continued with its state from memory, or it is the last one.
        lost: Whether it ended with a failure after which the run went back to a checkpoint, or to
            its beginning.
    """

    number: int
    began: float
    ended: float
    kept: bool = True
    lost: bool = False

    @property
    def seconds(self) -> float:
        """The training time."""
        return max(0.0, self.ended - self.began)


def list_generations(events: Iterable[Event]) -> list[TrainedGeneration]:
    """The worker groups that have finished a step, oldest first."""
    found: list[TrainedGeneration] = []
    running: TrainedGeneration | None = None
    is_ended = False
    for event in events:
        name, at = event.get("event"), number_of(event, "time")
        if running is not None and not is_ended:
            running = running._replace(ended=max(running.ended, at))
        if name == "first_step":
            if running is not None and running.number == event.get("generation"):
                continue  # it was rolled back, and goes on
            if running is not None:
                found.append(running)
            began = at - number_of(event, "seconds")
            running = TrainedGeneration(int(number_of(event, "generation")), began, at)
            is_ended = False
        elif name in _ENDS and number_of(event, "generation") == (running and running.number):
            is_ended = True
            if running is not None and name == "failure":
                running = running._replace(ended=max(running.began, min(running.ended, at)))
        elif name == "generation" and running is not None:
            kept = event.get("kept_step") is not None
            lost = event.get("reason") == "failure" and not kept
            found.append(running._replace(kept=kept, lost=lost))
            running = None
    return found if running is None else [*found, running]


def unsaved_seconds(events: Iterable[Event], *, in_memory: bool = False) -> float:
    """The training time since the state of the newest checkpoint, work that was lost included.
    With `in_memory` it is the time that ranks hold in memory and no checkpoint holds: what has been
    lost since is not in it.
    """
    events = list(events)
    # the state of a commit was copied when its save began
    commits = [one for one in events if one.get("event") == "commit"]
    begun = [number_of(one, "time") - number_of(one, "seconds") for one in commits]
    saved, seconds = max(begun, default=0.0), 0.0
    for one in list_generations(events):
        seconds += max(0.0, one.ended - max(one.began, saved))
        if in_memory and not one.kept:
            seconds = 0.0
    return seconds


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


class SaveInterval:
    """The training time between two saves, as the user has set it. The cost of a save does not
    matter here; `AutoInterval` measures it.
    """

    def __init__(self, seconds: float | None) -> None:
        """Save after `seconds` of training; None never to save by the clock."""
        self._given = seconds

    @property
    def cost(self) -> float | None:
        """What a save costs this rank, in seconds of training time; None if it is not known, or
        does not matter.
        """
        return None

    def seconds(self, _trained: float, /) -> float | None:
        """The interval after some seconds of training of this group; None never to save by the
        clock.
        """
        return self._given

    def add_save(self, _save: MeasuredSave, /) -> None:
        """Note a save that was committed; called on every rank."""

    def take_costs(self, _cost: float, /) -> None:
        """Note the greatest `cost` of all ranks; 0 is not known yet."""

    def take_change(self, _trained: float, /) -> dict[str, float] | None:
        """The fields of the event that reports a changed interval; None if it has not changed."""
        return None

    def to_json(self, _trained: float, /) -> dict[str, Any]:
        """What another rank needs to continue with it, after some seconds of this group."""
        return {}

    def load(self, _document: Mapping[str, Any], /) -> None:
        """Continue with what `to_json` describes."""


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
        return self.trained - self._saved_at

    @property
    def unsaved(self) -> float:
        """The training time since the state of the last commit, work that was lost included."""
        return self._lost + self.at_risk

    @property
    def trained(self) -> float:
        """The training time of this worker group, in seconds."""
        since = self._running_since
        return self._trained + (0.0 if since is None else self._now() - since)

    @property
    def interval_seconds(self) -> float | None:
        """How much training may lie between two saves; None never to save by the clock."""
        return self.interval.seconds(self.trained)

    @property
    def pause_seconds(self) -> float:
        """How long the next save is to wait, since those before were not committed."""
        return max(0.0, self._retry_at - self.trained)

    def take_change(self) -> dict[str, float] | None:
        """See `SaveInterval.take_change`."""
        return self.interval.take_change(self.trained)

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
        self._trained = self.trained
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
        return is_enough and self.trained >= self._retry_at

    def restored(self, step: int) -> None:
        """Continue from the checkpoint of `step`: what is newer is lost."""
        self._lost = self._clamp(self.unsaved)
        self._saved_at = self.trained
        self._last_step = step
        self._begin_again()

    def follow(self, step: int, *, carried: int | None = None) -> None:
        """Continue from memory; the newest checkpoint is of `step`. It may be one whose save the
        rank that handed the clock over has not seen to end. The save of step `carried` goes on.
        """
        is_lost = self._in_progress != carried and (self._in_progress or 0) > step
        at = self._started.get(-1 if carried is None else carried, self.trained)
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
        self._started[step] = self.trained
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
        """What another rank needs to continue with this clock."""
        total = self.trained
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
        """Continue with the clock that `to_json` describes, from memory."""
        total = self.trained
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
        self._retry_at = self.trained + min(pause, self.interval_seconds or pause)

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

    def _clamp(self, seconds: float) -> float:
        return max(0.0, min(seconds, self.interval_seconds or 0.0))


HISTORY_VARIABLE: Final = "KDIST_SAVE_HISTORY"
"""The environment variable with the `SaveHistory` that the agent has read."""
INTERVAL_EVENT: Final = "save_interval"
"""Name of the event in the run's ledger that reports another interval."""

_COSTS: Final = 5
"""Saves whose cost counts."""
_LOSSES: Final = 20
"""Losses that count."""
_EXPECTED_SECONDS: Final = 1800.0
"""Training time without a loss that is assumed of a run of which nothing is known."""
_LEAST_SECONDS: Final = 60.0
_LEAST_AFTER_LOSS: Final = 10.0
"""Storage is spared below a minute until the run has gone back to a checkpoint."""
_MOST_SECONDS: Final = 600.0
_MOST_COSTS: Final = 30.0
LONGEST_INTERVAL: Final = 3600.0
_CHANGE: Final = 1.25
"""A smaller change is none: near the best interval, another one loses hardly more."""
_REPORT_SECONDS: Final = 600.0


def choose_seconds(
    *, cost: float | None, duration: float, between_losses: float, went_back: bool
) -> float:
    """The interval that loses the least, from the start of one save to the start of the next.

    Args:
        cost: training time that a save costs, in seconds; None while no save is known, and the
            next one is to show it.
        duration: seconds from the start of a save until it is durable.
        between_losses: training time between two losses that go back to a checkpoint, in seconds.
        went_back: whether this run has gone back to a checkpoint.
    """
    least = max(_LEAST_AFTER_LOSS if went_back else _LEAST_SECONDS, 2 * duration)
    if cost is None:
        return min(least, LONGEST_INTERVAL)
    most = max(_MOST_SECONDS, _MOST_COSTS * cost)
    share = cost / (2 * between_losses)
    best = (
        math.sqrt(2 * cost * between_losses) * (1 + math.sqrt(share) / 3 + share / 9)
        if share < 1
        else between_losses + cost
    )
    return min(max(min(best, most), least), LONGEST_INTERVAL)


@dataclass(frozen=True)
class SaveHistory:
    """The losses and saves of a run, by its ledger."""

    losses: tuple[float, ...] = ()
    """Training time before each of the last losses that went back to a checkpoint, oldest first,
    since the one before it. Those in place lose nothing, and stops and edits are none.
    """
    since: float = 0.0
    """Training time since the last one, or since the run began."""
    cost: float | None = None
    """Training time that a save costs, in seconds; None while no save is known."""
    duration: float = 0.0
    """Seconds until the last save was durable."""

    def mean_seconds(self, trained: float = 0.0) -> float:
        """The training time between two losses, with `trained` seconds that the history lacks.

        What is assumed of an unknown run counts as one more loss, and the less the more are known.
        """
        count = len(self.losses) + 1
        return (sum(self.losses) + self.since + trained + _EXPECTED_SECONDS / count) / count

    def followed_by(self, trained: float, *, is_lost: bool = True) -> SaveHistory:
        """The history after `trained` seconds more, and another loss."""
        since = self.since + trained
        if not is_lost:
            return replace(self, since=since)
        return replace(self, losses=(*self.losses, since)[-_LOSSES:], since=0.0)

    def to_text(self) -> str:
        """The history as the agent hands it to its ranks."""
        document = asdict(self)
        document["losses"] = [round(each, 1) for each in self.losses]
        return encode_json(document, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> SaveHistory:
        """The history of `to_text`; an empty one of any other text."""
        with suppress(MalformedTextError):
            document = parse_object(text)
            losses = document.get("losses")
            known = [_seconds({"": each}, "") for each in losses] if type(losses) is list else []
            return cls(
                tuple(each for each in known if each is not None)[-_LOSSES:],
                _seconds(document, "since") or 0.0,
                _seconds(document, "cost"),
                _seconds(document, "duration") or 0.0,
            )
        return cls()


def read_history(events: Iterable[Mapping[str, Any]]) -> SaveHistory:
    """The losses and saves of all groups of a run, by the events of its ledger, oldest first."""
    events = list(events)
    history = SaveHistory()
    for one in list_generations(_without_rests(events)):
        history = history.followed_by(one.seconds, is_lost=one.lost)
    # A commit's line has only how long training stood still; the interval's event, the whole cost.
    is_reported = False
    for event in events:
        name = event.get("event")
        if name == "commit" and "commits" not in event:  # that line is the sum of several
            stall, duration = (_seconds(event, each) for each in ("visible_seconds", "seconds"))
            if stall is not None and not is_reported:
                history = replace(history, cost=stall)
            if duration is not None:
                history = replace(history, duration=duration)
        elif name == INTERVAL_EVENT and (cost := _seconds(event, "cost_seconds")) is not None:
            history = replace(history, cost=cost)
            is_reported = True
    return history


def _without_rests(events: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The events, with an end for each group whose end nobody has noted before the run was started
    again by hand: it may have rested for days.
    """
    last: Mapping[str, Any] = {}
    number = None
    for event in events:
        if event.get("event") == "generation":
            if event.get("reason") == "resume":
                yield {"event": "stopped", "generation": number, "time": last.get("time")}
            number = event.get("generation")
        yield event
        last = event


class AutoInterval(SaveInterval):
    """The interval of one worker group: measured by every rank, decided by rank 0."""

    def __init__(self, history: SaveHistory | None = None) -> None:
        """Begin with what the run has measured until this group began, by default what the agent
        has read: it counts until there is better.
        """
        super().__init__(None)
        if history is None:
            history = SaveHistory.from_text(os.environ.get(HISTORY_VARIABLE, ""))
        self.history = history
        self._first_save: float | None = None
        self._later_saves: deque[float] = deque(maxlen=_COSTS)
        self._cost, self._duration = history.cost, history.duration
        self._seconds: float | None = None
        self._reported: tuple[float, float] | None = None

    @property
    def cost(self) -> float | None:
        """What a save costs this rank, in seconds of training time: the median of the last ones;
        None before the first. A process's first save, which sets up what the later ones use, counts
        only while there is no other.
        """
        return median(self._later_saves) if self._later_saves else self._first_save

    def add_save(self, save: MeasuredSave) -> None:
        """Note what a save that was committed has cost: the time that the training stood still, and
        by how much the steps next to it took longer.
        """
        slower = 0.0
        if save.steps_during and save.step_seconds_outside:
            slower = save.steps_during * (save.step_seconds_during - save.step_seconds_outside)
        cost = save.stall + max(0.0, slower)
        if save.is_first:
            self._first_save = cost
        else:
            self._later_saves.append(cost)
        self._duration = save.duration

    def to_json(self, trained: float) -> dict[str, Any]:
        """What another rank needs to continue with it, after `trained` seconds of this group."""
        history = self.history.followed_by(trained, is_lost=False)
        known = replace(history, cost=self._cost, duration=self._duration)
        return {"history": known.to_text(), "seconds": self._seconds}

    def load(self, document: Mapping[str, Any]) -> None:
        """Continue with what `to_json` describes."""
        self.history = SaveHistory.from_text(document["history"])
        self._cost, self._duration = self.history.cost, self.history.duration
        self._seconds = document["seconds"]

    def take_costs(self, cost: float) -> None:
        """Note the greatest `cost` of all ranks; 0 is not known yet."""
        if cost > 0:
            self._cost = cost

    def seconds(self, trained: float) -> float:
        """The interval when this process has trained for `trained` seconds. It stays as it is
        while the best one differs by less than a quarter.
        """
        best = choose_seconds(
            cost=self._cost,
            duration=self._duration,
            between_losses=self.history.mean_seconds(trained),
            went_back=bool(self.history.losses),
        )
        last = self._seconds
        if last is None or not last / _CHANGE < best < last * _CHANGE:
            self._seconds = best
            return best
        return last

    def take_change(self, trained: float) -> dict[str, float] | None:
        """See `SaveInterval`; None also if one was reported in the last ten minutes."""
        now = self.seconds(trained)
        if self._cost is None:
            return None
        if self._reported is not None:
            reported, at = self._reported
            if reported / _CHANGE < now < reported * _CHANGE or trained - at < _REPORT_SECONDS:
                return None
        self._reported = (now, trained)
        return {
            "seconds": round(now, 1),
            "cost_seconds": round(self._cost, 4),
            "between_losses_seconds": round(self.history.mean_seconds(trained), 1),
        }


def make_interval(every: Every) -> SaveInterval:
    """The interval that the user has asked for."""
    return AutoInterval() if every.auto else SaveInterval(every.seconds)


def _seconds(document: Mapping[str, Any], name: str) -> float | None:
    value = finite_number(document.get(name))
    return value if value is not None and value >= 0 else None
