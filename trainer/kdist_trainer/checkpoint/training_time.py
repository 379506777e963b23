"""How long a run has trained, and how much of that no checkpoint holds, by its events.

Free of torch: the agent reads it before each worker group, which continues the clock of the saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kdist_trainer.untrusted_text import finite_number

Event = Mapping[str, Any]

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
        name, at = event.get("event"), _number(event.get("time"))
        if running is not None and not is_ended:
            running = running._replace(ended=max(running.ended, at))
        if name == "first_step":
            if running is not None and running.number == event.get("generation"):
                continue  # it was rolled back, and goes on
            if running is not None:
                found.append(running)
            began = at - _number(event.get("seconds"))
            running = TrainedGeneration(int(_number(event.get("generation"))), began, at)
            is_ended = False
        elif name in _ENDS and _number(event.get("generation")) == (running and running.number):
            is_ended = True
            if running is not None and name == "failure":
                running = running._replace(ended=max(running.began, min(running.ended, at)))
        elif name == "generation" and running is not None:
            kept = event.get("kept_step") is not None
            lost = event.get("reason") == "failure" and not kept
            found.append(running._replace(kept=kept, lost=lost))
            running = None
    return found if running is None else [*found, running]


def unsaved_seconds(events: Iterable[Event]) -> float:
    """The training time since the state of the newest checkpoint, work that was lost included."""
    return _since_commit(list(events), from_memory=False)


def at_risk_seconds(events: Iterable[Event]) -> float:
    """The training time that ranks hold in memory and no checkpoint holds: what has been lost since
    is not in it.
    """
    return _since_commit(list(events), from_memory=True)


def _since_commit(events: list[Event], *, from_memory: bool) -> float:
    saved = max((_saved_at(one) for one in events if one.get("event") == "commit"), default=0.0)
    seconds = 0.0
    for one in list_generations(events):
        seconds += max(0.0, one.ended - max(one.began, saved))
        if from_memory and not one.kept:
            seconds = 0.0
    return seconds


def _saved_at(commit: Event) -> float:
    """When the state of a commit was copied, which is when its save began."""
    return _number(commit.get("time")) - _number(commit.get("seconds"))


def _number(value: object) -> float:
    return finite_number(value) or 0.0
