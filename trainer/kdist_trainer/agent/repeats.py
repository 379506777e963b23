"""The same failure again without progress, told from failures that another try may get past.

What kills from outside (a SIGKILL, a lost node, a full disk) is chance, however often. A crash or a hang at the same step is
not. Where no step is known, as of a script, it is the same if the groups lived for about as long.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from kdist_trainer.config import Cause
from kdist_trainer.failure import Failure

MOST = 3
"""Times that the same failure may end a group in a row before it is held to come again for ever."""
_ITS_OWN = {Cause.SIGNAL, Cause.HANG, Cause.COLLECTIVE_TIMEOUT}
_FROM_OUTSIDE = re.compile(r"SIG(KILL|TERM|INT|HUP)|forkserver|KeyboardInterrupt")
_ALIKE, _ALIKE_SECONDS = 2.0, 5.0

Event = Mapping[str, Any]


def is_chance(failure: Failure) -> bool:
    """Whether another try may well get past it."""
    return failure.cause not in _ITS_OWN or bool(_FROM_OUTSIDE.search(failure.message))


def count(events: Iterable[Event], failure: Failure) -> int:
    """How many groups in a row, `failure`'s the last of them, ended alike without progress.

    `events` are the run's so far, in their order; whether that of `failure` is among them makes no difference.
    """
    began, earlier = _since_progress(events)
    wanted = _signature(failure.cause.value, failure.step, failure.message)
    lives = [failure.time - began.get(failure.generation, failure.time)]
    for event in reversed(earlier):
        number = event.get("generation", 0)
        if number >= failure.generation:
            continue
        if _signature(event.get("cause"), event.get("step"), str(event.get("message"))) != wanted:
            break
        lives.append(event.get("time", 0.0) - began.get(number, 0.0))
        if failure.step is None and max(lives) > _ALIKE * min(lives) + _ALIKE_SECONDS:
            lives.pop()
            break
    return len(lives)


def _since_progress(events: Iterable[Event]) -> tuple[dict[int, float], list[Event]]:
    """When the groups since the last progress began, by number, and the failures that ended them."""
    began: dict[int, float] = {}
    failures: list[Event] = []
    best = -1
    for event in events:
        name = event["event"]
        if name == "generation":
            if event.get("reason") not in ("failure", "join"):  # somebody has started the run again
                failures.clear()
            began[event.get("generation", 0)] = event.get("time", 0.0)
        elif name == "failure":
            failures.append(event)
        elif name == "commit" and isinstance(event.get("step"), int) and event["step"] > best:
            best = event["step"]
            failures.clear()
    return began, failures


def _signature(cause: object, step: object, message: str) -> tuple[object, object, str]:
    """What is the same of the same failure, whichever rank it befell first."""
    return cause, step, re.sub(r"\d+", "#", message.partition("\n")[0])
