"""The interval between two saves that loses the least training time: `every: {auto: true}`.

A save costs training time, and a loss that goes back to a checkpoint costs what was trained since.
Where a save costs C, and such losses are M apart, an interval of √(2CM) loses the least (Young
1974; Daly 2006 where C is not small next to M). C is measured by every rank, and M is read from the
run's events. Pure, and free of torch: rank 0 asks it, and its clock decides.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Final

from kdist_trainer.checkpoint.save_clock import FixedInterval, MeasuredSave, SaveInterval
from kdist_trainer.checkpoint.training_time import list_generations
from kdist_trainer.config import Every
from kdist_trainer.json_text import encode_json
from kdist_trainer.untrusted_text import MalformedTextError, finite_number, parse_object

HISTORY_VARIABLE: Final = "KDIST_SAVE_HISTORY"
"""The environment variable with the `SaveHistory` that the agent has read."""
EVENT: Final = "save_interval"
"""Name of the event in the run's ledger that tells of another interval."""

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
_LONGEST: Final = 3600.0
_CHANGE: Final = 1.25
"""A smaller change is none: near the best interval, another one loses hardly more."""
_TELL_SECONDS: Final = 600.0


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
        return min(least, _LONGEST)
    most = max(_MOST_SECONDS, _MOST_COSTS * cost)
    share = cost / (2 * between_losses)
    best = (
        math.sqrt(2 * cost * between_losses) * (1 + math.sqrt(share) / 3 + share / 9)
        if share < 1
        else between_losses + cost
    )
    return min(max(min(best, most), least), _LONGEST)


class SaveCosts:
    """The costs of the saves of one rank, in seconds of training time."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._later: deque[float] = deque(maxlen=_COSTS)

    def add(self, seconds: float, *, is_first: bool) -> None:
        """Note a save that was committed, and whether it is the first one of this process."""
        if is_first:
            self._first = seconds
        else:
            self._later.append(seconds)

    @property
    def typical(self) -> float | None:
        """The median of the last ones; None before the first. A process's first save, which sets up
        what the later ones use, counts only while there is no other.
        """
        return median(self._later) if self._later else self._first


@dataclass(frozen=True)
class SaveHistory:
    """What a run's ledger tells of its losses and saves."""

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
        """The training time between two losses.

        What is assumed of an unknown run counts as one more loss, and the less the more are known.

        Args:
            trained: training time that is not in the history yet.
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
    """What a run's ledger tells of all its groups.

    Args:
        events: of the ledger, oldest first.
    """
    events = list(events)
    history = SaveHistory()
    for one in list_generations(_without_rests(events)):
        history = history.followed_by(one.seconds, is_lost=one.lost)
    is_told = False  # the whole cost, of which a commit's line knows how long training stood still
    for event in events:
        name = event.get("event")
        if name == "commit" and "commits" not in event:  # that line is the sum of several
            stall, duration = (_seconds(event, each) for each in ("visible_seconds", "seconds"))
            if stall is not None and not is_told:
                history = replace(history, cost=stall)
            if duration is not None:
                history = replace(history, duration=duration)
        elif name == EVENT and (cost := _seconds(event, "cost_seconds")) is not None:
            history = replace(history, cost=cost)
            is_told = True
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


class AutoInterval:
    """The interval of one worker group: measured by every rank, decided by rank 0."""

    def __init__(self, history: SaveHistory | None = None) -> None:
        """Begin with what former processes have told: it counts until there is better.

        Args:
            history: of the run until this group began; by default what the agent has read.
        """
        if history is None:
            history = SaveHistory.from_text(os.environ.get(HISTORY_VARIABLE, ""))
        self.history = history
        self._own = SaveCosts()
        self._cost, self._duration = history.cost, history.duration
        self._seconds: float | None = None
        self._told: tuple[float, float] | None = None

    @property
    def cost(self) -> float | None:
        """What a save costs this rank, in seconds of training time; None before its first one."""
        return self._own.typical

    def add_save(self, save: MeasuredSave) -> None:
        """Note what a save that was committed has cost: the time that the training stood still, and
        by how much the steps next to it took longer.
        """
        slower = 0.0
        if save.steps_during and save.step_seconds_outside:
            slower = save.steps_during * (save.step_seconds_during - save.step_seconds_outside)
        self._own.add(save.stall + max(0.0, slower), is_first=save.is_first)
        self._duration = save.duration

    def to_json(self, trained: float) -> dict[str, Any]:
        """What another rank needs to go on with it, after `trained` seconds of this group."""
        history = self.history.followed_by(trained, is_lost=False)
        known = replace(history, cost=self._cost, duration=self._duration)
        return {"history": known.to_text(), "seconds": self._seconds}

    def load(self, document: Mapping[str, Any]) -> None:
        """Go on with what `to_json` describes."""
        self.history = SaveHistory.from_text(document["history"])
        self._cost, self._duration = self.history.cost, self.history.duration
        self._seconds = document["seconds"]

    def take_costs(self, cost: float) -> None:
        """Note the greatest `cost` of all ranks; 0 is not known yet."""
        if cost > 0:
            self._cost = cost

    def seconds(self, trained: float) -> float:
        """The interval. It stays as it is while the best one differs by less than a quarter.

        Args:
            trained: training time of this process so far, in seconds.
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

    def take_news(self, trained: float) -> dict[str, float] | None:
        """What to tell of the interval; None if it is as it was told, or was told of in the last
        ten minutes.

        Args:
            trained: training time of this process so far, in seconds.
        """
        now = self.seconds(trained)
        if self._cost is None:
            return None
        if self._told is not None:
            told, at = self._told
            if told / _CHANGE < now < told * _CHANGE or trained - at < _TELL_SECONDS:
                return None
        self._told = (now, trained)
        return {
            "seconds": round(now, 1),
            "cost_seconds": round(self._cost, 4),
            "between_losses_seconds": round(self.history.mean_seconds(trained), 1),
        }


def make_interval(every: Every) -> SaveInterval:
    """The interval that the user has asked for."""
    return AutoInterval() if every.auto else FixedInterval(every.seconds)


def _seconds(document: Mapping[str, Any], name: str) -> float | None:
    value = finite_number(document.get(name))
    return value if value is not None and value >= 0 else None
