"""What ranks were in, laid side by side: who did something else, who did not come, and how it is
told.
"""

from __future__ import annotations

from typing import Any

import pytest

from kdist_trainer.agent.hangs import (
    DesyncDetector,
    find_mismatch,
    find_missing,
    format_collectives,
    format_ranks,
    resolve_root_cause,
    write_calls,
)
from kdist_trainer.config import Cause, Exit
from kdist_trainer.ipc.failure import Failure
from kdist_trainer.processes.liveness import Call


def call(op: str, sequence: int, numel: int = 8, group: str = "", dtype: str = "float32") -> Call:
    return Call(sequence, sequence, op, dtype, numel, str(numel), group)


def state(rank: int, *calls: Call, inside: bool = True, stopped: bool = False) -> dict[str, Any]:
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
        mismatch = find_mismatch(
            [state(0, *same), state(1, call("barrier", 1), other), state(2, *same)]
        )
        assert mismatch is not None
        assert mismatch.ranks == (1,)
        expected = f"the ranks entered different collectives: rank 1 {other}, ranks 0,2 {same[1]}"
        assert mismatch.message == expected


def test_two_ranks_that_differ_are_both_shown_and_none_is_blamed() -> None:
    mismatch = find_mismatch([state(0, call("all_reduce", 5)), state(1, call("broadcast", 5))])
    assert mismatch is not None
    assert mismatch.ranks == ()
    assert "rank 0 all_reduce(float32[8]) #5" in mismatch.message
    assert "rank 1 broadcast(float32[8]) #5" in mismatch.message


def test_the_first_difference_counts_though_ranks_went_on_after_it() -> None:
    went_on = [call("broadcast", 7), call("all_reduce", 8)]
    mismatch = find_mismatch(
        [
            state(0, *went_on),
            state(1, call("broadcast", 7, 12), call("barrier", 8)),
            state(2, *went_on),
        ]
    )
    assert mismatch is not None
    assert mismatch.collective == "broadcast(float32[12]) #7"


@pytest.mark.parametrize(
    "states",
    [
        [],
        [state(0), state(1)],
        [state(0, call("all_reduce", 4)), state(1, call("all_reduce", 5))],
        [state(0, call("all_gather_uneven", 4, 8)), state(1, call("all_gather_uneven", 4, 16))],
        [state(0, call("send", 4, 8)), state(1, call("recv", 4, 16))],
        [
            state(0, call("all_reduce", 4, 8, group="1(0-1)")),
            state(1, call("all_reduce", 4, 16, group="1(2-3)")),
        ],
        [
            state(0, call("all_reduce", 4, 8, group="?x")),
            state(1, call("broadcast", 4, group="?x")),
        ],
    ],
)
def test_what_is_right_is_no_disagreement(states: list[Any]) -> None:
    assert find_mismatch(states) is None


def test_a_rank_that_does_not_come_is_named_where_most_wait_for_it() -> None:
    waits = [call("all_reduce", 3), call("all_reduce", 4)]
    missing = find_missing([state(0, *waits), state(1, waits[0], inside=False), state(2, *waits)])
    assert missing is not None
    assert missing.ranks == (1,)
    assert missing.message == (
        "rank 1 did not enter all_reduce(float32[8]) #4, in which ranks 0,2 waited; "
        "the last before that was all_reduce(float32[8]) #3"
    )
    assert find_missing([state(0, *waits), state(1, waits[0]), state(2, waits[0])]) is None, (
        "the root of a broadcast runs ahead"
    )


def test_ranks_that_were_in_the_same_are_reported_together() -> None:
    one = call("all_reduce", 3)
    states = [state(rank, one) for rank in (0, 2, 3, 4)] + [
        state(1, call("barrier", 2), inside=False),
        state(5, stopped=True),
    ]
    assert format_collectives(states) == (
        "ranks 0,2-4 in all_reduce(float32[8]) #3",
        "rank 1 in no collective, after barrier(float32[8]) #2",
        "rank 5 in no collective, stopped by a signal",
    )
    assert format_ranks([7]) == "rank 7"
    many = format_collectives([state(rank, call("all_reduce", rank + 1)) for rank in range(100)])
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
    states = [state(0, same), state(1, call("all_reduce", 2, 12)), state(2, same)]
    for followed in (
        failure(Cause.COLLECTIVE_TIMEOUT, Exit.HANG, primary=False),
        failure(Cause.HANG, Exit.HANG, primary=True),
    ):
        found = resolve_root_cause(followed, states)
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
    assert resolve_root_cause(own, states) is own


def test_time_outs_are_the_fault_of_the_rank_that_did_not_come() -> None:
    waits = [call("all_reduce", 3), call("all_reduce", 4)]
    states = [state(0, *waits), state(1, waits[0], inside=False), state(2, *waits)]
    found = resolve_root_cause(failure(Cause.COLLECTIVE_TIMEOUT, Exit.HANG, primary=False), states)
    assert (found.cause, found.primary, found.rank, found.node) == (Cause.HANG, True, 1, "node-1")
    assert not found.permanent
    lost = failure(Cause.NODE_LOST, Exit.PEERS_LOST, primary=False)
    assert resolve_root_cause(lost, states) is lost


def test_what_is_seen_once_may_be_half_written() -> None:
    odd = [state(0, call("all_reduce", 2)), state(1, call("barrier", 2))]
    right = [state(0, call("all_reduce", 2)), state(1, call("all_reduce", 2))]
    comparison = DesyncDetector()
    assert comparison.check(lambda: odd) is None
    assert comparison.check(lambda: right) is None
    comparison = DesyncDetector()
    assert comparison.check(lambda: odd) is None
    assert comparison.check(lambda: odd) is not None


def test_where_nobody_noted_a_collective_nothing_is_said_of_them() -> None:
    assert format_collectives([state(0), state(1)]) == ()
