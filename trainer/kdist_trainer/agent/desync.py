"""Desync detection: which collectives the ranks of a group were in when it ended, and which rank
differed.

All ranks of a process group must enter the same collectives in the same order. Each rank records
its latest ones in memory that outlives it. Comparing the records shows the first collective that
differs, or the rank that did not reach it, whatever error torch raised: a timeout, an abort in C++,
a closed connection or a wrong sum. torch's counterpart is the desync report of its flight recorder.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kdist_trainer.liveness import Call

RankState = dict[str, Any]
"""The state of one rank as agents exchange it: its latest heartbeat and collectives."""

COMPARE_SECONDS = 2.0
"""How often the ranks of one node are compared while they run."""
MOST_CALLS = 512
"""The number of calls of all ranks together that agents exchange, so that those of hundreds of
ranks fit into one document.
"""
_MOST_LINES = 32
_P2P = {"send", "recv"}
_UNEVEN = "_uneven"
"""The suffix of collectives whose sizes may differ from rank to rank."""


@dataclass(frozen=True)
class Mismatch:
    """The ranks that entered another collective than the majority; empty if there is
    no majority.
    """

    ranks: tuple[int, ...]
    message: str
    collective: str


class DesyncDetector:
    """Compares the collectives of one node's ranks at regular intervals."""

    def __init__(self) -> None:
        self._next = 0.0
        self._previous: Mismatch | None = None

    def check(self, read: Callable[[], Sequence[RankState]]) -> Mismatch | None:
        """Find the ranks that entered another collective than their peers. A mismatch counts only
        if it is found twice in a row, since ranks write while they are read.
        """
        now = time.monotonic()
        if now < self._next:
            return None
        previous, self._previous = self._previous, find_mismatch(read())
        self._next = now + (COMPARE_SECONDS if self._previous is None else 0.0)
        return self._previous if self._previous == previous else None


def write_calls(calls: Sequence[Call], *, world_size: int) -> list[list[Any]]:
    """A rank's latest collectives, as a list for its `RankState`."""
    most = max(1, min(16, MOST_CALLS // max(1, world_size)))
    return [
        [call.group, call.sequence, call.op, call.dtype, call.numel, call.shape]
        for call in calls[-most:]
    ]


def _read(state: RankState) -> Iterator[Call]:
    for number, (group, sequence, op, dtype, numel, shape) in enumerate(
        state.get("calls", ()), start=1
    ):
        if op not in _P2P and not group.startswith("?"):
            yield Call(number, sequence, op, dtype, numel, shape, group)


def find_mismatch(states: Iterable[RankState]) -> Mismatch | None:
    """The first collective that the ranks of a process group entered differently, with the ranks
    that differ from the majority; None if all agree.
    """
    for by_rank in _by_group(states).values():
        for sequence in sorted({sequence for calls in by_rank.values() for sequence in calls}):
            entered = {
                rank: calls[sequence] for rank, calls in by_rank.items() if sequence in calls
            }
            kinds = {rank: _kind(call) for rank, call in entered.items()}
            if len(set(kinds.values())) > 1:
                return _describe_mismatch(entered, kinds)
    return None


def _by_group(states: Iterable[RankState]) -> dict[str, dict[int, dict[int, Call]]]:
    """Group -> rank -> sequence -> call."""
    groups: dict[str, dict[int, dict[int, Call]]] = defaultdict(lambda: defaultdict(dict))
    for state in states:
        for call in _read(state):
            groups[call.group][int(state["rank"])][call.sequence] = call
    return groups


def _kind(call: Call) -> tuple[Any, ...]:
    """The properties that must be the same on all ranks of a collective."""
    return (call.op, call.dtype) if call.op.endswith(_UNEVEN) else (call.op, call.dtype, call.numel)


def _describe_mismatch(calls: Mapping[int, Call], kinds: Mapping[int, tuple[Any, ...]]) -> Mismatch:
    (common, count), *_ = Counter(kinds.values()).most_common(1)
    ranks_by_text: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(calls, key=lambda rank: (kinds[rank] == common, rank)):
        ranks_by_text[str(calls[rank])].append(rank)
    message = "the ranks entered different collectives: " + ", ".join(
        f"{format_ranks(ranks)} {call}" for call, ranks in ranks_by_text.items()
    )
    if count * 2 <= len(calls):
        return Mismatch((), message, next(iter(ranks_by_text)))
    differing = tuple(sorted(rank for rank in calls if kinds[rank] != common))
    return Mismatch(differing, message, str(calls[differing[0]]))


def find_missing(states: Sequence[RankState]) -> Mismatch | None:
    """The minority of ranks that did not enter a collective in which most ranks wait; None if there
    is none.
    """
    inside = {int(state["rank"]) for state in states if state["inside"]}
    for by_rank in _by_group(states).values():
        last = {rank: calls[max(calls)] for rank, calls in by_rank.items()}
        latest = max(call.sequence for call in last.values())
        behind = tuple(sorted(rank for rank, call in last.items() if call.sequence < latest))
        waiting = [
            rank for rank, call in last.items() if call.sequence == latest and rank in inside
        ]
        if behind and len(waiting) * 2 > len(last):
            call = last[behind[0]]
            message = (
                f"{format_ranks(behind)} did not enter {last[waiting[0]]}, in which "
                f"{format_ranks(waiting)} waited"
            )
            return Mismatch(behind, f"{message}; the last before that was {call}", str(call))
    return None


def format_collectives(states: Iterable[RankState]) -> tuple[str, ...]:
    """The collective that each rank was in, one line for all ranks in the same one, such as
    `ranks 0,2-7 in all_reduce(float32[8]) #3`.
    """
    states = sorted(states, key=lambda state: int(state["rank"]))
    if not any(state["inside"] or state["stopped"] or state.get("calls") for state in states):
        return ()  # no rank recorded any, as in a script
    ranks_by_text: dict[str, list[int]] = defaultdict(list)
    for state in states:
        last = next((str(call) for call in reversed(list(_read(state)))), None)
        out = f"in no collective, after {last}" if last else "in no collective"
        activity = f"in {state['collective']}" if state["inside"] else out
        ranks_by_text[activity + (", stopped by a signal" if state["stopped"] else "")].append(
            int(state["rank"])
        )
    lines = [f"{format_ranks(ranks)} {activity}" for activity, ranks in ranks_by_text.items()]
    return tuple(
        lines
        if len(lines) <= _MOST_LINES
        else [*lines[: _MOST_LINES - 1], f"and {len(lines) - _MOST_LINES + 1} more"]
    )


def format_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0,2-7`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    return f"rank {text}" if len(spans) == 1 and spans[0][0] == spans[0][1] else f"ranks {text}"
