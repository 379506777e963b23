"""Tells where starting a worker group takes longer than the time between losses: such a run makes
no progress, whatever it trains, and ends by its limit of restarts. Free of torch.

A start lasts from the loss before it, or from the rendezvous, to the first finished step of the
group. A group that was lost before that (`at_start`) shows only that a start takes at least that
long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Final

from kdist_trainer.agent.coordination import FAILURE, PLANNED, Document
from kdist_trainer.untrusted_text import finite_number

AT_START: Final = "at_start"
"""The field of a failure in the events: the group had not begun its first step."""
WAITED: Final = "waited"
"""The field of a failure in the events: the seconds that agents waited after it, starting nothing.
"""
LOSSES: Final = 3
"""So many groups in a row must have been lost as they started."""
_RECENT: Final = 5

Event = Mapping[str, Any]


def was_starting(
    document: Document, number: int, events: Sequence[Event], *, is_script: bool, tells: bool
) -> bool:
    """Whether the ranks of a group that has ended had not come to a step of their own. If nothing
    tells, they had.

    Args:
        document: The group's document.
        number: Its generation.
        events: The run's events so far.
        is_script: Whether its ranks run a script. Of one that reports no steps a collective shows
            that it has started.
        tells: Whether the events have the first step of each group.
    """
    firsts = {one.get("generation") for one in events if one["event"] == "first_step"}
    if number in firsts:
        return False
    begun = [one for one in events if one["event"] == "generation"]
    from_step = next(
        (one.get("from_step", 0) for one in begun if one.get("generation") == number), 0
    )
    states = [state for node in document.get("rank_states", {}).values() for state in node]
    if any(state["step"] > (0 if is_script else from_step) for state in states):
        return False
    if tells or firsts:
        return True
    return bool(states) and not (is_script and any(state["sequence"] for state in states))


def describe_slow_start(events: Iterable[Event]) -> str:
    """A sentence with both times, if the latest groups were all lost as they started; else empty.

    Args:
        events: The run's events so far, with the failure that ended the latest group.
    """
    apart, starts = _measure(events)
    if len(apart) < LOSSES:
        return ""
    lost = f"the last {len(apart)} worker groups were lost {median(apart[-_RECENT:]):.1f} s apart"
    known = median(starts[-_RECENT:]) if starts else 0.0
    took = f"takes {known:.1f} s"
    if known <= (longest := max(apart[-_RECENT:])):
        took = f"takes more than {longest:.1f} s"
    return (
        f"starting takes longer than the time between losses: {lost}, before their first step, and "
        f"a start {took}"
    )


def _measure(events: Iterable[Event]) -> tuple[list[float], list[float]]:
    """The seconds between the losses at the end of the events, each of which ended a group that
    started, and what starts have taken, oldest first.
    """
    apart: list[float] = []
    starts: list[float] = []
    began: dict[Any, float] = {}
    since: float | None = None
    for event in events:
        name, number = event["event"], event.get("generation")
        at = finite_number(event.get("time")) or 0.0
        if name == "generation":
            began[number] = at
            if event.get("reason") not in (FAILURE, *PLANNED):  # by hand: nothing was lost
                apart, since = [], None
        elif name == "first_step" and number in began:
            first = began.pop(number)  # of steps that are rolled back there may be another one
            starts.append(max(0.0, at - (first if since is None else since)))
            apart, since = [], None  # a later loss is not a loss of this start
        elif name == "commit":
            apart = []
        elif name == "failure":
            before = began.get(number, at) if since is None else since
            apart = [*apart, max(0.0, at - before)] if event.get(AT_START) else []
            since = at + (finite_number(event.get(WAITED)) or 0.0)
    return apart, starts
