"""Which rank's process is replaced: never two, never the only one with the newest state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kdist_trainer.agent.coordination import NOBODY, choose_rank_to_renew, is_renewal_due
from kdist_trainer.processes.liveness import Phase, RankSnapshot

STEP = RankSnapshot(
    count=1, phase=Phase.STEP, step=8, time_ns=0, call=None, inside=False, generation=2, pid=1
)


@pytest.mark.parametrize(
    ("kept", "chosen"),
    [
        ({"a": [[0, 9, 17]], "b": [[0, 9, 0]]}, ("a", 0)),
        ({"a": [[0, 9, 17]], "b": [[0, 9, 20], [1, 9, 18]]}, ("b", 0)),
        ({"b": [[1, 9, 17]], "a": [[1, 9, 17], [0, 9, 17]]}, ("a", 0)),
        ({"a": [[0, 9, 17]], "b": [[0, 8, 0]]}, NOBODY),
        ({"a": [[0, 9, 0]], "b": [[0, 8, 17]]}, ("b", 0)),
        ({"a": [[0, 9, 17]], "b": [[0, -1, 0]]}, NOBODY),
        ({"a": [[0, 9, 17]], "b": []}, NOBODY),
        ({"a": [[0, -1, 17]], "b": [[0, -1, 0]]}, NOBODY),
        ({"a": [[0, 9, 0], [1, 9, 0]], "b": [[0, 9, 0]]}, NOBODY),
        ({"a": [], "b": []}, NOBODY),
    ],
    ids=[
        "another has the state",
        "the one with the most",
        "the first of those alike",
        "the others are behind",
        "it is behind",
        "the other is new",
        "alone",
        "nobody has a state",
        "nobody keeps too many",
        "nobody",
    ],
)
def test_one_rank_is_replaced_and_never_the_only_one_with_the_newest_state(
    kept: dict[str, list[list[int]]], chosen: tuple[str, int]
) -> None:
    assert choose_rank_to_renew(kept) == chosen


def test_a_group_is_ended_for_it_only_once_a_step_shows_that_others_hold_the_state() -> None:
    behind = replace(STEP, step=7)
    assert is_renewal_due([17, 0], [STEP, STEP], nodes=1, from_step=7)
    assert is_renewal_due([17], [STEP], nodes=2, from_step=7)
    assert not is_renewal_due([17, 0], [STEP, behind], nodes=1, from_step=7), (
        "not all have finished a step"
    )
    assert not is_renewal_due([0, 0], [STEP, STEP], nodes=2, from_step=7), "no rank keeps too many"
    assert not is_renewal_due([17], [STEP], nodes=1, from_step=7), "nobody could take over"
