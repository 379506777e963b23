"""Finds ranks that hang, nodes that are lost, and the rank at fault when a group has ended in
different collectives.

The watchdog detects ranks that make no progress and dumps their stacks. A hanging rank blocks all
others in their next collective, so all of them stop at about the same time. The rank at fault is
the one that is stopped (SIGSTOP), in no collective, or in an earlier collective than its peers.
Agents exchange the states of their ranks before they decide, and derive the failures from them.

Desync detection compares the collectives that the ranks were in. All ranks of a process group must
enter the same ones in the same order, and each rank records its latest ones in memory that outlives
it. Comparing the records shows the first collective that differs, or the rank that did not reach
it, whatever error torch raised: a timeout, an abort in C++, a closed connection or a wrong sum.
torch's counterpart is the desync report of its flight recorder.

`RankActivity` is what `/status` shows of the ranks of this node: for how long a rank has been in
its collective or has shown nothing, and the line at which it stands. A heartbeat has no times, and
an unchanged script sends none, so a silent rank outside of collectives gets a signal on which it
only writes its stack.

A node that is lost, such as by a power cut, falls silent: it closes no connection, so that a
collective waits for its timeout, and torch's connect for ever (`NodeLossDetector`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kdist_trainer import log
from kdist_trainer.agent.coordination import (
    AgentStore,
    Document,
    Generation,
)
from kdist_trainer.agent.exits import RankState
from kdist_trainer.agent.worker_group import can_keep_workers
from kdist_trainer.config import Cause, Exit, TrainConfig
from kdist_trainer.formats import ranges
from kdist_trainer.instrumentation.fault_handler import DUMP, LOOK, look_path, read_line
from kdist_trainer.ipc.failure import Failure
from kdist_trainer.processes.liveness import Call, Heartbeat, Phase, RankSnapshot, heartbeat_path
from kdist_trainer.processes.process_tree import catches, is_stopped
from kdist_trainer.rendezvous.membership import SILENCE_SECONDS
from kdist_trainer.rendezvous.state import RendezvousStatus

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
                (common, count), *_ = Counter(kinds.values()).most_common(1)
                ranks_by_text: dict[str, list[int]] = defaultdict(list)
                for rank in sorted(entered, key=lambda rank: (kinds[rank] == common, rank)):
                    ranks_by_text[str(entered[rank])].append(rank)
                message = "the ranks entered different collectives: " + ", ".join(
                    f"{format_ranks(ranks)} {call}" for call, ranks in ranks_by_text.items()
                )
                if count * 2 <= len(entered):
                    return Mismatch((), message, next(iter(ranks_by_text)))
                differing = tuple(sorted(rank for rank in entered if kinds[rank] != common))
                return Mismatch(differing, message, str(entered[differing[0]]))
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
    text = ranges(sorted(ranks))
    return f"rank {text}" if text.isdecimal() else f"ranks {text}"


NO_STORE = "the rendezvous store does not respond"
RANK_STATES_SECONDS = 2.0
"""How long an agent waits for the other agents' rank states after a hang."""
_POLL_SECONDS = 0.1


def read_or_empty(request: Callable[[], Document]) -> Document:
    """The document that `request` returns; empty if the store is unreachable, which must not end
    the workers.
    """
    try:
        return request()
    except RuntimeError as error:
        log.warn(
            "rendezvous-unreachable",
            message=f"{NO_STORE}: {error}",
        )
        return {}


def gather_rank_states(
    agent_store: AgentStore,
    generation: Generation,
    node: str,
    own_states: list[RankState],
    *,
    after_failures: bool = False,
) -> list[RankState]:
    """Post the states of this node's ranks and wait for those of the others, `after_failures` even
    though failures have been posted. Returns the states of all ranks whose agents have posted them
    in time.
    """
    deadline = time.monotonic() + RANK_STATES_SECONDS
    document = read_or_empty(
        lambda: agent_store.post_rank_states(generation.number, own_states)
    ) or {"rank_states": {node: own_states}}
    while time.monotonic() < deadline:
        if len(document.get("rank_states", {})) >= len(generation.nodes) or (
            document.get("failures") and not after_failures
        ):
            break
        time.sleep(_POLL_SECONDS)
        document = read_or_empty(lambda: agent_store.generation(generation.number)) or document
    return [state for states in document.get("rank_states", {}).values() for state in states]


def hang_failures(
    hung: Mapping[int, tuple[int, RankSnapshot]],
    *,
    rank_at_fault: int | None,
    node: str,
    generation: int,
    stacks: Mapping[int, Sequence[str]],
) -> dict[int, Failure]:
    """The failures of hanging ranks, by local rank: primary for the rank at fault, which the others
    wait for, secondary for the others. `hung` has the global rank and the latest heartbeat of each,
    by local rank, and `stacks` its stack; `rank_at_fault` is a global one.
    """
    failures = {}
    for local_rank, (rank, snapshot) in hung.items():
        where = f"in {snapshot.collective}" if snapshot.collective else f"in phase {snapshot.phase}"
        is_cause = rank == rank_at_fault
        message = (
            f"rank {rank} hangs {where}: no progress within hangTimeoutSeconds"
            if is_cause
            else f"rank {rank} waited {where} for rank {rank_at_fault}"
        )
        failures[local_rank] = Failure.of_rank(
            Cause.HANG if is_cause else Cause.COLLECTIVE_TIMEOUT,
            Exit.HANG,
            message,
            rank=rank,
            node=node,
            generation=generation,
            snapshot=snapshot,
            primary=is_cause,
            traceback=stacks.get(local_rank, []),
        )
    return failures


def mismatch_failure(
    mismatch: Mismatch, *, node: str, generation: int, step: int | None, when: float | None = None
) -> Failure:
    """The failure of ranks that entered another collective than their peers, on the node of the
    first of them, now or at Unix time `when`. It is permanent: a restart would repeat it. `step` is
    the last one that a rank has reported.
    """
    return Failure(
        cause=Cause.COLLECTIVE_MISMATCH,
        code=Exit.USER,
        primary=True,
        message=mismatch.message,
        rank=mismatch.ranks[0] if mismatch.ranks else None,
        node=node,
        generation=generation,
        step=step,
        time=time.time() if when is None else when,
        collective=mismatch.collective,
    )


def resolve_root_cause(failure: Failure, states: Sequence[RankState]) -> Failure:
    """The root cause of a failure, given the states of all ranks.

    A rank that entered another collective than its peers is the root cause of any failure but a
    permanent one. A rank that did not enter a collective is the root cause of its peers' timeouts.
    """
    if failure.permanent and failure.cause is not Cause.COLLECTIVE_MISMATCH:
        return failure
    nodes = {int(state["rank"]): str(state.get("node", "")) for state in states}
    mismatch = find_mismatch(states)
    if mismatch is not None:
        return mismatch_failure(
            mismatch,
            node=nodes.get(mismatch.ranks[0], "") if mismatch.ranks else failure.node,
            generation=failure.generation,
            step=failure.step,
            when=failure.time,
        )
    if failure.primary or failure.code is not Exit.HANG:
        return failure
    missing = find_missing(states)
    if missing is None:
        return failure
    rank = missing.ranks[0]
    return replace(
        failure,
        cause=Cause.HANG,
        primary=True,
        message=missing.message,
        rank=rank,
        node=nodes.get(rank, ""),
        collective=None,
    )


DUMP_SECONDS = 2.0
# most that one poll may add to a wait: an agent that was paused itself has seen nothing
_MAX_POLL_SECONDS = 1.0
_MIN_SLOW_SECONDS = 60.0
_SLOW = {Phase.START, Phase.RENDEZVOUS, Phase.INIT, Phase.RESTORE, Phase.SAVE, Phase.EXIT}
"""Phases that may take long without a heartbeat: imports, downloads, large reads and writes."""


class Watchdog:
    """Watches the heartbeats of this node's ranks in one generation, by files that it makes in
    `scratch`. A rank may make no progress for `hang_seconds`. `from_start` says whether every rank
    sends heartbeats; if not, as in a script, a rank is watched from its first one.
    """

    def __init__(self, scratch: Path, *, ranks: int, hang_seconds: float, from_start: bool) -> None:
        paths = [heartbeat_path(scratch, local_rank) for local_rank in range(ranks)]
        self._heartbeats = [Heartbeat.create(path) for path in paths]
        self._hang_seconds = hang_seconds
        self._from_start = from_start
        self._counts = [0] * ranks
        self._stalled_seconds = [0.0] * ranks
        self._current_waits: list[tuple[int, int, Phase] | None] = [None] * ranks
        self._waited_seconds = [0.0] * ranks
        self.longest_wait = 0.0
        """The longest completed wait for other ranks, in seconds, while the ranks did steps, or at
        any time in a script that reports no steps.
        """
        self._polled_at = time.monotonic()
        self.snapshots: list[RankSnapshot] = [heartbeat.read() for heartbeat in self._heartbeats]

    def poll(self) -> list[int]:
        """Read all heartbeats; returns the local ranks that have made no progress for too long."""
        now = time.monotonic()
        elapsed = min(now - self._polled_at, _MAX_POLL_SECONDS)
        self._polled_at = now
        self.snapshots = [heartbeat.read() for heartbeat in self._heartbeats]
        for local_rank, snapshot in enumerate(self.snapshots):
            moved = snapshot.count != self._counts[local_rank]
            self._counts[local_rank] = snapshot.count
            self._stalled_seconds[local_rank] = (
                0.0 if moved else self._stalled_seconds[local_rank] + elapsed
            )
            self._record_wait(local_rank, snapshot, elapsed)
        return [
            local_rank
            for local_rank in range(len(self.snapshots))
            if self._stalled_seconds[local_rank] > self._allowed_seconds(local_rank)
        ]

    def _record_wait(self, local_rank: int, snapshot: RankSnapshot, elapsed: float) -> None:
        waiting = snapshot.inside or (snapshot.count > 0 and snapshot.phase is Phase.RENDEZVOUS)
        wait = (snapshot.count, snapshot.sequence, snapshot.phase) if waiting else None
        previous = self._current_waits[local_rank]
        if wait is not None and wait == previous:
            self._waited_seconds[local_rank] += elapsed
            return
        # a script without heartbeats is in no phase
        if previous is not None and (previous[2] not in _SLOW or previous[0] == 0):
            self.longest_wait = max(self.longest_wait, self._waited_seconds[local_rank])
        self._current_waits[local_rank] = wait
        self._waited_seconds[local_rank] = 0.0

    def mark_stop(self, deadline: float) -> None:
        """Tell all ranks of this node that they are to stop by this Unix time."""
        for heartbeat in self._heartbeats:
            heartbeat.mark_stop(deadline)

    def has_no_heartbeats(self) -> bool:
        """Whether no rank of this node has sent a heartbeat: of such a script only the collectives
        are known.
        """
        return not any(snapshot.count for snapshot in self.snapshots)

    def waited_seconds(self) -> float:
        """How long all ranks of this node have been waiting for other ranks; 0 if one computes."""
        return min(self._waited_seconds)

    def _allowed_seconds(self, local_rank: int) -> float:
        snapshot = self.snapshots[local_rank]
        if snapshot.count == 0 and not self._from_start:
            return float("inf")
        slow = snapshot.phase in _SLOW or snapshot.count == 0
        return self._hang_seconds + (max(self._hang_seconds, _MIN_SLOW_SECONDS) if slow else 0.0)

    def last_step(self) -> int | None:
        """The highest step of this node's ranks."""
        return max(
            (snapshot.step for snapshot in self.snapshots if snapshot.step >= 0), default=None
        )

    def rank_states(
        self, ranks: Sequence[int], pids: Mapping[int, int], *, node: str, nodes: int
    ) -> list[RankState]:
        """The states of all ranks of this node, from which all agents derive the rank at fault.
        Global ranks and process ids are by local rank; the number of nodes limits the recorded
        calls per rank.
        """
        found: list[RankState] = []
        for number, rank in enumerate(ranks):
            snapshot = self.snapshots[number]
            # the ranks of a script may enter different collectives on purpose
            calls = self._heartbeats[number].calls() if self._from_start else []
            found.append(
                {
                    "rank": rank,
                    "node": node,
                    "stopped": is_stopped(pids[number]),
                    "inside": snapshot.inside,
                    "sequence": snapshot.sequence,
                    "step": snapshot.step,
                    "phase": snapshot.phase.value,
                    "collective": snapshot.collective,
                    "calls": write_calls(calls, world_size=len(ranks) * nodes),
                }
            )
        return found

    def close(self) -> None:
        """Unmap the heartbeats; the files are kept for diagnosis."""
        for heartbeat in self._heartbeats:
            heartbeat.close()


def find_hung_rank(states: Iterable[RankState]) -> int | None:
    """The rank at fault for a hang; None without states."""
    ordered = sorted(
        states,
        key=lambda state: (
            not state["stopped"],
            state["inside"],
            state["sequence"],
            state["step"],
            state["rank"],
        ),
    )
    return int(ordered[0]["rank"]) if ordered else None


def dump_stacks(pids: dict[int, int], paths: dict[int, Path]) -> dict[int, list[str]]:
    """Have ranks write their stacks, also stopped ones. Pids and files are by local rank, and so
    are the new lines of the files, which are returned after two seconds at most.
    """
    before = {local_rank: _size(path) for local_rank, path in paths.items()}
    for pid in pids.values():
        for number in (DUMP, signal.SIGCONT):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    deadline = time.monotonic() + DUMP_SECONDS
    sizes = before
    while time.monotonic() < deadline:
        time.sleep(0.05)
        last, sizes = sizes, {local_rank: _size(path) for local_rank, path in paths.items()}
        if sizes == last and all(sizes[local_rank] > before[local_rank] for local_rank in pids):
            break
    return {local_rank: _lines(paths[local_rank], before[local_rank]) for local_rank in pids}


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _lines(path: Path, start: int) -> list[str]:
    try:
        return path.read_bytes()[start:].decode(errors="replace").splitlines()
    except OSError:
        return []


LOOK_SECONDS = 15.0
"""How long nothing was seen of a rank before its line is asked for; then twice as long, and so on.
"""
MAX_LOOK_SECONDS = 60.0
_ANSWER_SECONDS = 0.5  # which a stack takes to be written


@dataclass
class _Rank:
    """What is known of one rank; times are monotonic."""

    seen: tuple[object, ...]
    moved_at: float | None = None
    entered_at: float | None = None
    next_look: float = 0.0
    pause: float = LOOK_SECONDS
    asked_at: float | None = None
    line: str = ""
    line_since: float | None = None
    ended: bool = False


class RankActivity:
    """Follows the ranks of one generation, whose process ids are by local rank. `observe` is called
    on each pass of the agent's loop, `entries` by the exporter's threads.
    """

    def __init__(self, scratch: Path, pids: Mapping[int, int]) -> None:
        self._scratch = scratch
        self._pids = pids
        self._ranks: dict[int, _Rank] = {}

    def observe(self, snapshots: Sequence[RankSnapshot], *, living: Collection[int]) -> None:
        """Take in the latest heartbeats; `living` are the local ranks that have not exited."""
        now = time.monotonic()
        for local_rank, snapshot in enumerate(snapshots):
            seen = (snapshot.count, snapshot.sequence, snapshot.inside)
            rank = self._ranks.get(local_rank)
            if rank is None:
                first = _Rank(seen, moved_at=now if any(seen) else None)
                rank = self._ranks[local_rank] = first
                rank.next_look = now + LOOK_SECONDS
                rank.entered_at = now if snapshot.inside else None
            elif seen != rank.seen:
                if not snapshot.inside:
                    rank.entered_at = None
                elif rank.entered_at is None or snapshot.sequence != rank.seen[1]:
                    rank.entered_at = now
                rank.seen, rank.moved_at = seen, now
                rank.next_look, rank.pause = now + LOOK_SECONDS, LOOK_SECONDS
                rank.asked_at, rank.line, rank.line_since = None, "", None
            rank.ended = local_rank not in living
            if not rank.ended and not snapshot.inside:
                self._look(local_rank, rank, now)

    def _look(self, local_rank: int, rank: _Rank, now: float) -> None:
        """Ask for the line if it is time, and read what was written since."""
        if rank.asked_at is not None and now - rank.asked_at >= _ANSWER_SECONDS:
            line = read_line(self._scratch, local_rank)
            if line != rank.line:
                rank.line, rank.line_since = line, rank.asked_at if line else None
            rank.asked_at = None
        if now < rank.next_look or rank.asked_at is not None:
            return
        rank.next_look, rank.pause = now + rank.pause, min(2 * rank.pause, MAX_LOOK_SECONDS)
        pid = self._pids[local_rank]
        # without a handler the signal would end the process: one that is another program by now
        if LOOK is not None and catches(pid, LOOK):
            with contextlib.suppress(OSError):
                os.truncate(look_path(self._scratch, local_rank), 0)
                os.kill(pid, LOOK)
                rank.asked_at = now

    def entries(self) -> dict[int, dict[str, Any]]:
        """Fields of `/status` by local rank, see `kdist_trainer.metrics.status`."""
        now = time.monotonic()
        return {number: _describe(rank, now) for number, rank in list(self._ranks.items())}


def _describe(rank: _Rank, now: float) -> dict[str, Any]:
    def since(at: float | None) -> float | None:
        return None if at is None else round(max(0.0, now - at), 1)

    return {
        "ended": rank.ended,
        "quiet_seconds": since(rank.moved_at),
        "collective_seconds": since(rank.entered_at),
        "line": rank.line or None,
        "line_seconds": since(rank.line_since),
    }


WAIT_SECONDS = 5.0
"""How long all ranks of this node must have waited in one collective before a silent node counts as
lost: an agent may pause, or be cut off from the store, while its ranks run.
"""
SILENT_SECONDS = 2.0
"""How long a node must have missed its keep-alives, in addition, before it counts as lost."""
SCRIPT_SILENT_SECONDS = 30.0
"""The same for scripts: their ranks may wait in a barrier for minutes on purpose."""
_WAIT_FACTOR = 2.0
"""How much longer the wait must be than the longest completed one."""


class NodeLossDetector:
    """Watches the other nodes of one generation. `watchdog` knows how long the ranks of this node
    have been waiting, and `has_silent_members` whether a member is silent, by the members'
    connections. That counts only if the others can continue in place without it: then a node that
    was only slow returns at little cost.
    """

    def __init__(
        self,
        config: TrainConfig,
        generation: Generation,
        watchdog: Watchdog,
        has_silent_members: Callable[[], bool],
    ) -> None:
        self._watchdog = watchdog
        self._least_seconds = SILENT_SECONDS if config.train is not None else SCRIPT_SILENT_SECONDS
        self._hang_seconds = config.hang_timeout_seconds
        fewest, _ = generation.bounds
        self._can_do_without = can_keep_workers(config) and fewest < len(generation.nodes)
        self._has_silent_members = has_silent_members
        self._silent_since: float | None = None

    def is_lost(self, status: RendezvousStatus) -> bool:
        """Whether a node is lost, given the latest state of the rendezvous."""
        is_silent = self._can_do_without and self._has_silent_members()
        if is_silent and self._has_waited(SILENCE_SECONDS):
            return True
        now, watchdog = time.monotonic(), self._watchdog
        missing = status.silent or status.left
        self._silent_since = (self._silent_since or now) if missing else None
        if self._silent_since is None:
            return False
        silent = now - self._silent_since
        if silent > self._hang_seconds and watchdog.has_no_heartbeats():
            return True
        return silent > self._least_seconds and self._has_waited(WAIT_SECONDS)

    def _has_waited(self, seconds: float) -> bool:
        """Whether the ranks of this node have waited so long in one collective."""
        least = max(seconds, _WAIT_FACTOR * self._watchdog.longest_wait)
        return self._watchdog.waited_seconds() > least
