"""What a run did before its next worker group, by its events: the counters of an agent know only
what its process has seen, and a killed one has counted nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from kdist_trainer.agent.coordination import FAILURE, Generation
from kdist_trainer.checkpoint.ledger import StepLedger
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.failure import Failure
from kdist_trainer.untrusted_text import finite_number

_RESTARTS: Final = "total_restarts"
_LOST_STEPS: Final = "total_lost_steps"
"""Fields of a generation in the events: what the run had come to when it began. Those of before
need not stay in the ledger.
"""

Event = Mapping[str, Any]


def read_totals(events: Iterable[Event]) -> tuple[int, int]:
    """The restarts after a failure and the lost steps since the run began."""
    restarts = lost = 0
    for event in _generations(events):
        if isinstance(event.get(_RESTARTS), int) and isinstance(event.get(_LOST_STEPS), int):
            restarts, lost = event[_RESTARTS], event[_LOST_STEPS]
        elif event.get("reason") == FAILURE:  # of a version that wrote no totals
            restarts += 1
    return restarts, lost


def find_reached(
    events: Iterable[Event],
    failures: Sequence[Failure],
    checkpoints: StoragePath | None,
    *,
    generation: int,
) -> int:
    """The last step that a worker group came to, as far as its failures, its events and the ledger
    of its steps tell.
    """
    began = [each for each in _generations(events) if each.get("generation") == generation]
    steps = [one.step for one in failures] + [each.get("from_step") for each in began]
    if checkpoints is not None:
        steps.append(StepLedger.find_last_step(checkpoints, generation))
    return max((step for step in steps if isinstance(step, int)), default=0)


def find_commit_time(events: Iterable[Event], step: int) -> float | None:
    """When the checkpoint of a step was committed, in Unix seconds; None if no event tells."""
    times = [
        finite_number(each.get("time"))
        for each in events
        if each.get("event") == "commit" and each.get("step") == step
    ]
    return next((at for at in reversed(times) if at is not None), None)


def sum_up(
    events: Sequence[Event], committed: int, *, reason: str, lost_steps: int
) -> dict[str, Any]:
    """Fields of a generation: what the run has come to as it begins.

    Args:
        events: Those before it.
        committed: The step of the newest checkpoint; 0 if there is none.
        reason: Why it begins.
        lost_steps: The steps that it begins below.
    """
    restarts, lost = read_totals(events)
    return {
        _RESTARTS: restarts + (reason == FAILURE),
        _LOST_STEPS: lost + lost_steps,
        "committed_step": committed or None,
        "committed_at": find_commit_time(events, committed) if committed else None,
    }


def to_event(generation: Generation) -> dict[str, int]:
    """What the event of a generation keeps of it; empty for one that sums nothing up."""
    if generation.total_restarts is None or generation.total_lost_steps is None:
        return {}
    return {_RESTARTS: generation.total_restarts, _LOST_STEPS: generation.total_lost_steps}


def _generations(events: Iterable[Event]) -> list[Event]:
    return [each for each in events if each.get("event") == "generation"]
