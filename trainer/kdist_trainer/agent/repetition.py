"""How often a run may restart without progress, and how often one failure may repeat: at the same
step, without progress in between.

The row of the table of causes says how many equal failures end the run; external causes (a SIGKILL,
a lost node, storage that fails a save) never count. Where no step is known, as for a script,
failures count as the same if the worker groups lived for about as long.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from kdist_trainer.agent.coordination import FAILURE, PLANNED, Generation
from kdist_trainer.causes import BY_NAME
from kdist_trainer.causes.host import REPLICAS_DIFFER
from kdist_trainer.causes.row import SLOW, SLOW_START
from kdist_trainer.config import Cause, Exit
from kdist_trainer.config.exit_codes import Fault, Rerun
from kdist_trainer.failure import Failure

MAX_REPEATS = 3
"""How often the same failure may end a group in a row before it counts as permanent, if no row of
the table of causes says it.
"""
_UNCERTAIN = 2
"""The same of a failure that is perhaps the user's."""
_LIMITS = {
    Cause.SIGNAL: MAX_REPEATS,
    Cause.HANG: MAX_REPEATS,
    Cause.COLLECTIVE_TIMEOUT: MAX_REPEATS,
    Cause.DEVICE: MAX_REPEATS,
    Cause.LOADER: MAX_REPEATS,
    Cause.NODE: MAX_REPEATS,
    Cause.EARLY_EXIT: _UNCERTAIN,
    Cause.UNKNOWN: _UNCERTAIN,
    Cause.USER_CODE: _UNCERTAIN,
}
_KEEP_NAME = {Cause.USER_CODE, Cause.UNKNOWN, Cause.EARLY_EXIT}
_EXTERNAL = re.compile(r"SIG(KILL|TERM|INT|HUP)|forkserver|KeyboardInterrupt")
_LIFETIME_RATIO = 2.0
_LIFETIME_SLACK_SECONDS = 5.0

Event = Mapping[str, Any]


def alike_limit(failure: Failure) -> int:
    """How many equal failures in a row, without progress in between, end the run; 0 if they never
    do, since each comes from outside.
    """
    if failure.signature in BY_NAME:
        return BY_NAME[failure.signature].alike
    if failure.cause is Cause.NODE_LOST and not failure.primary:
        return MAX_REPEATS  # no node is gone: what the ranks lost of each other is not known
    if failure.cause is Cause.SIGNAL and _EXTERNAL.search(failure.message):
        return 0
    return _LIMITS.get(failure.cause, 0)


def is_transient(failure: Failure) -> bool:
    """Whether a failure probably does not repeat after a restart."""
    return alike_limit(failure) == 0


def count_repeats(events: Iterable[Event], failure: Failure) -> int:
    """Count the consecutive groups, up to that of `failure`, that the same failure ended without
    progress in between.

    Args:
        events: The run's events so far, in order, with or without that of `failure`.
        failure: The latest failure.
    """
    started_at, earlier = _since_progress(events)
    signature = _signature(failure.cause.value, failure.step, failure.message)
    lifetimes = [failure.time - started_at.get(failure.generation, failure.time)]
    for event in reversed(earlier):
        number = event.get("generation", 0)
        if number >= failure.generation:
            continue
        if (
            _signature(event.get("cause"), event.get("step"), str(event.get("message")))
            != signature
        ):
            break
        lifetimes.append(event.get("time", 0.0) - started_at.get(number, 0.0))
        longest = _LIFETIME_RATIO * min(lifetimes) + _LIFETIME_SLACK_SECONDS
        if failure.step is None and max(lifetimes) > longest:
            lifetimes.pop()
            break
    return len(lifetimes)


CODE: Final = "code"
"""The field of a failure in the events: what the ranks that differed have computed by."""


def have_parted(events: Iterable[Event], failure: Failure | None, *, code: str) -> bool:
    """Whether ranks of this run that run this code have held different states after a recovery in
    place: those that stay would differ again from those that are new. Other code may be mended.
    """
    if failure is not None and failure.signature == REPLICAS_DIFFER:
        return True
    return any(
        one.get("signature") == REPLICAS_DIFFER and one.get(CODE, code) == code
        for one in events
        if one["event"] == "failure"
    )


def count_restarts(events: Iterable[dict[str, Any]], *, step: int = -1) -> int:
    """Count the failures since the step that the run can continue from last rose, or since the run
    was restarted by hand.

    Args:
        events: The run's events so far, in order.
        step: The step that the next group continues from.
    """
    failures = 0
    best = committed = -1
    for event in events:
        if event["event"] == "generation":
            if event.get("from_step", -1) > best >= 0:
                failures = 0
            best = max(best, event.get("from_step", -1))
            if event.get("kept_step") is None:
                committed = max(committed, event.get("from_step", -1))
            if event.get("reason") == FAILURE:
                failures += 1
            elif event.get("reason") not in PLANNED:
                failures = 0
        elif (
            event["event"] == "commit"
            and isinstance(event.get("step"), int)
            and event["step"] > committed
        ):
            # also below a step that ranks had kept, and that was lost with them
            failures = 0
            committed = event["step"]
            best = max(best, committed)
    return 0 if step > best >= 0 else failures


def _since_progress(events: Iterable[Event]) -> tuple[dict[int, float], list[Event]]:
    """The start times of the groups since the last progress, by number, and the failures that ended
    them.
    """
    started_at: dict[int, float] = {}
    failures: list[Event] = []
    best = -1
    for event in events:
        name = event["event"]
        if name == "generation":
            if event.get("reason") not in (FAILURE, *PLANNED):  # the run was restarted by hand
                failures.clear()
            started_at[event.get("generation", 0)] = event.get("time", 0.0)
        elif name == "failure":
            failures.append(event)
        elif name == "commit" and isinstance(event.get("step"), int) and event["step"] > best:
            best = event["step"]
            failures.clear()
    return started_at, failures


def _signature(cause: object, step: object, message: str) -> tuple[object, object, str]:
    """The properties that identify a repeated failure; numbers in the message do not count."""
    return cause, step, re.sub(r"0x[0-9a-f]+|\d+", "#", message.partition("\n")[0])


def final_failure(
    last: Failure, generation: Generation, message: str, *, collectives: tuple[str, ...]
) -> Failure:
    """The failure that ends the run instead of `generation`, after `last`: the user's and what is
    in no table keep their name if they came back alike, and are final; others have exhausted the
    limit of restarts.
    """
    is_alike = 0 < alike_limit(last) <= generation.repeats
    kept = last.fault in (Fault.USER, Fault.UNKNOWN, Fault.KDIST) and last.cause in _KEEP_NAME
    named = is_alike and kept
    if generation.slow_start and not named:
        last = replace(last, signature=SLOW_START, advice=SLOW.advice)
    return replace(
        last,
        cause=last.cause if named else Cause.BUDGET,
        code=Exit.USER if named else Exit.BUDGET,
        primary=True,
        message=message,
        collectives=collectives,
        rerun=Rerun.FIXED if named else last.rerun,
    )
