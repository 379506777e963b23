"""What ranks were in, laid side by side: who did something else, who did not come, and how it is
told.
"""

from __future__ import annotations

from typing import Any

import pytest

from kdist_trainer.agent.desync import (
    DesyncDetector,
    find_missing,
    find_odd,
    format_collectives,
    format_ranks,
    write_calls,
)
from kdist_trainer.agent.hang_detection import resolve_root_cause
from kdist_trainer.config import Cause, Exit
from kdist_trainer.errors import Failure
from kdist_trainer.liveness import Call


def call(op: str, sequence: int, numel: int = 8, group: str = "", dtype: str = "float32") -> Call:
    return Call(sequence, sequence, op, dtype, numel, str(numel), group)


def note(rank: int, *calls: Call, inside: bool = True, stopped: bool = False) -> dict[str, Any]:
    last = str(calls[-1]) if calls else None
    return {
        "rank": rank,
        "node": f"node-{rank}",
        "inside": inside and last is not None,
        "stopped": stopped,
        "collective": last if inside else None,
        "calls": write_calls(calls, world_size=3),
    }


def test_with_a_majority_the_odd_rank_is_named_whatever_it_did_differently() -> None:
    for other in (
        call("all_reduce", 2, 12),
        call("barrier", 2),
        call("all_reduce", 2, dtype="float64"),
    ):
        same = [call("barrier", 1), call("all_reduce", 2)]
        odd = find_odd([note(0, *same), note(1, call("barrier", 1), other), note(2, *same)])
        assert odd is not None
        assert odd.ranks == (1,)
        expected = f"the ranks entered different collectives: rank 1 {other}, ranks 0,2 {same[1]}"
        assert odd.message == expected


def test_two_ranks_that_differ_are_both_shown_and_none_is_blamed() -> None:
    odd = find_odd([note(0, call("all_reduce", 5)), note(1, call("broadcast", 5))])
    assert odd is not None
    assert odd.ranks == ()
    assert "rank 0 all_reduce(float32[8]) #5" in odd.message
    assert "rank 1 broadcast(float32[8]) #5" in odd.message


def test_the_first_difference_counts_though_ranks_went_on_after_it() -> None:
    went_on = [call("broadcast", 7), call("all_reduce", 8)]
    odd = find_odd(
        [
            note(0, *went_on),
            note(1, call("broadcast", 7, 12), call("barrier", 8)),
            note(2, *went_on),
        ]
    )
    assert odd is not None
    assert odd.collective == "broadcast(float32[12]) #7"


@pytest.mark.parametrize(
    "notes",
    [
        [],
        [note(0), note(1)],
        [note(0, call("all_reduce", 4)), note(1, call("all_reduce", 5))],
        [note(0, call("all_gather_uneven", 4, 8)), note(1, call("all_gather_uneven", 4, 16))],
        [note(0, call("send", 4, 8)), note(1, call("recv", 4, 16))],
        [
            note(0, call("all_reduce", 4, 8, group="1(0-1)")),
            note(1, call("all_reduce", 4, 16, group="1(2-3)")),
        ],
        [note(0, call("all_reduce", 4, 8, group="?x")), note(1, call("broadcast", 4, group="?x"))],
    ],
)
def test_what_is_right_is_no_disagreement(notes: list[Any]) -> None:
    assert find_odd(notes) is None


def test_a_rank_that_does_not_come_is_named_where_most_wait_for_it() -> None:
    waits = [call("all_reduce", 3), call("all_reduce", 4)]
    missing = find_missing([note(0, *waits), note(1, waits[0], inside=False), note(2, *waits)])
    assert missing is not None
    assert missing.ranks == (1,)
    assert missing.message == (
        "rank 1 did not come to all_reduce(float32[8]) #4, in which ranks 0,2 waited; "
        "the last before that was all_reduce(float32[8]) #3"
    )
    assert find_missing([note(0, *waits), note(1, waits[0]), note(2, waits[0])]) is None, (
        "the root of a broadcast runs ahead"
    )


def test_ranks_that_were_in_the_same_are_told_together() -> None:
    one = call("all_reduce", 3)
    notes = [note(rank, one) for rank in (0, 2, 3, 4)] + [
        note(1, call("barrier", 2), inside=False),
        note(5, stopped=True),
    ]
    assert format_collectives(notes) == (
        "ranks 0,2-4 in all_reduce(float32[8]) #3",
        "rank 1 in no collective, after barrier(float32[8]) #2",
        "rank 5 in no collective, stopped by a signal",
    )
    assert format_ranks([7]) == "rank 7"
    many = format_collectives([note(rank, call("all_reduce", rank + 1)) for rank in range(100)])
    assert len(many) == 32
    assert many[-1] == "and 69 more"


def failure(cause: Cause, code: Exit, *, primary: bool) -> Failure:
    return Failure(
        cause,
        code,
        primary,
        "as torch told it",
        rank=0,
        node="node-0",
        generation=3,
        step=7,
        time=5.0,
    )


def test_a_difference_is_the_cause_of_what_followed_but_an_exception_of_the_users_own() -> None:
    same = call("all_reduce", 2)
    notes = [note(0, same), note(1, call("all_reduce", 2, 12)), note(2, same)]
    for followed in (
        failure(Cause.COLLECTIVE_TIMEOUT, Exit.HANG, primary=False),
        failure(Cause.HANG, Exit.HANG, primary=True),
    ):
        found = resolve_root_cause(followed, notes)
        assert (found.cause, found.code, found.primary) == (
            Cause.COLLECTIVE_MISMATCH,
            Exit.USER,
            True,
        )
        assert found.rank == 1
        assert found.node == "node-1"
        assert found.generation == 3
        assert found.step == 7
        assert found.time == 5.0
        assert found.permanent
    own = failure(Cause.USER_CODE, Exit.USER, primary=True)
    assert resolve_root_cause(own, notes) is own


def test_time_outs_are_the_fault_of_the_rank_that_did_not_come() -> None:
    waits = [call("all_reduce", 3), call("all_reduce", 4)]
    notes = [note(0, *waits), note(1, waits[0], inside=False), note(2, *waits)]
    found = resolve_root_cause(failure(Cause.COLLECTIVE_TIMEOUT, Exit.HANG, primary=False), notes)
    assert (found.cause, found.primary, found.rank, found.node) == (Cause.HANG, True, 1, "node-1")
    assert not found.permanent
    lost = failure(Cause.NODE_LOST, Exit.PEERS_LOST, primary=False)
    assert resolve_root_cause(lost, notes) is lost


def test_what_is_seen_once_may_be_half_written() -> None:
    odd = [note(0, call("all_reduce", 2)), note(1, call("barrier", 2))]
    right = [note(0, call("all_reduce", 2)), note(1, call("all_reduce", 2))]
    comparison = DesyncDetector()
    assert comparison.look(lambda: odd) is None
    assert comparison.look(lambda: right) is None
    comparison = DesyncDetector()
    assert comparison.look(lambda: odd) is None
    assert comparison.look(lambda: odd) is not None


def test_where_nobody_noted_a_collective_nothing_is_said_of_them() -> None:
    assert format_collectives([note(0), note(1)]) == ()
