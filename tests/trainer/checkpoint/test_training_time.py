"""How much training a run's events tell of, and how much of it no checkpoint holds."""

from __future__ import annotations

from typing import Any

import pytest

from kdist_trainer.checkpoint.interval import list_generations, unsaved_seconds


def event(name: str, time: float, **fields: Any) -> dict[str, Any]:
    return {"event": name, "time": time, **fields}


def group(number: int, began: float, ended: float | None, **fields: Any) -> list[dict[str, Any]]:
    """A group that begins to train 5 s after it was formed, and fails."""
    events = [
        event("generation", began - 5, generation=number, **{"reason": "failure", **fields}),
        event("first_step", began + 1, generation=number, step=1, seconds=1.0),
    ]
    if ended is not None:
        events.append(event("failure", ended, generation=number))
    return events


def test_training_time_begins_before_the_first_step_and_ends_with_the_failure() -> None:
    events = [*group(1, 100, 130, reason="start"), *group(2, 150, 160), *group(3, 200, None)]
    spans = [(one.number, one.seconds, one.lost) for one in list_generations(events)]
    assert spans == [(1, 30, True), (2, 10, True), (3, 1, False)]


def test_what_was_lost_since_the_last_commit_is_unsaved_and_no_more_at_risk() -> None:
    events = [*group(1, 100, 130), *group(2, 150, 160), event("generation", 170, generation=3)]
    assert unsaved_seconds(events) == 40
    assert unsaved_seconds(events, in_memory=True) == 0


def test_what_ranks_have_kept_in_memory_is_at_risk() -> None:
    events = [*group(1, 100, 130), *group(2, 150, 160, kept_step=9)]
    events.append(event("generation", 170, generation=3, reason="failure", kept_step=14))
    assert unsaved_seconds(events) == unsaved_seconds(events, in_memory=True) == 40


def test_a_commit_holds_the_state_of_the_moment_that_its_save_began() -> None:
    events = [*group(1, 100, None), event("commit", 125, step=7, seconds=5.0)]
    events.append(event("failure", 130, generation=1))
    assert unsaved_seconds(events) == 10


def test_a_rollback_does_not_count_the_same_time_twice() -> None:
    events = group(1, 100, None)
    events += [event("first_step", 121, generation=1, step=9, seconds=21.0)]
    assert unsaved_seconds([*events, event("failure", 130, generation=1)]) == 30


def test_a_group_that_ended_unseen_counts_until_the_next_one_begins() -> None:
    events = [*group(1, 100, None), event("generation", 400, generation=2, reason="resume")]
    assert unsaved_seconds(events) == 300


@pytest.mark.parametrize("stopped", ["stopped", "done"])
def test_the_time_after_a_stop_is_no_training(stopped: str) -> None:
    events = [*group(1, 100, None), event(stopped, 130, generation=1, step=9)]
    events.append(event("generation", 9000, generation=2, reason="resume"))
    assert unsaved_seconds(events) == 30


def test_a_foreign_line_is_no_training() -> None:
    assert unsaved_seconds([{"event": "first_step", "time": "soon"}, {"event": "commit"}]) == 0
