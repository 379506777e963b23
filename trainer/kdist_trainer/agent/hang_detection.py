"""The watchdog: detects ranks that make no progress, dumps their stacks and finds the rank that
hangs.

A hanging rank blocks all others in their next collective, so all of them stop at about the same
time. The rank at fault is the one that is stopped (SIGSTOP), in no collective, or in an earlier
collective than its peers. Agents exchange the states of their ranks before they decide, and build
the failures from them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kdist_trainer import log
from kdist_trainer.agent.coordination import AgentStore, Document
from kdist_trainer.agent.desync import Mismatch, Note, find_missing, find_odd, write_calls
from kdist_trainer.agent.restart_policy import Generation
from kdist_trainer.config import Cause, Exit
from kdist_trainer.errors import TRACEBACK_LINES, Failure
from kdist_trainer.liveness import Heartbeat, Phase, RankSnapshot

NOTES_SECONDS = 2.0
"""How long an agent waits for what the others know of a standstill."""
_POLL_SECONDS = 0.1


def read_or_empty(question: Callable[[], Document]) -> Document:
    """The answer of the store; empty while the store is unreachable, which must not end the
    workers.
    """
    try:
        return question()
    except RuntimeError as error:
        log.warn(
            "rendezvous-unreachable",
            message=f"the store of the rendezvous does not answer: {error}",
        )
        return {}


def gather_rank_states(
    exchange: AgentStore,
    generation: Generation,
    node: str,
    mine: list[Note],
    *,
    after_failures: bool = False,
) -> list[Note]:
    """The states of all ranks, as far as their agents post them in time; before failures are
    posted, or after.
    """
    deadline = time.monotonic() + NOTES_SECONDS
    document = read_or_empty(lambda: exchange.post_beats(generation.number, mine)) or {
        "beats": {node: mine}
    }
    while time.monotonic() < deadline:
        if len(document.get("beats", {})) >= len(generation.nodes) or (
            document.get("failures") and not after_failures
        ):
            break
        time.sleep(_POLL_SECONDS)
        document = read_or_empty(lambda: exchange.generation(generation.number)) or document
    return [note for notes in document.get("beats", {}).values() for note in notes]


def hang_failures(
    stood: Mapping[int, tuple[int, RankSnapshot]],
    *,
    blamed: int | None,
    node: str,
    generation: int,
    stacks: Mapping[int, Sequence[str]],
) -> dict[int, Failure]:
    """The failures of hanging ranks, by local rank: primary for the rank at fault, secondary for
    the others.
    """
    return {
        local_rank: _hang_failure(
            beat,
            rank,
            blamed=blamed,
            node=node,
            generation=generation,
            stacks=stacks.get(local_rank, []),
        )
        for local_rank, (rank, beat) in stood.items()
    }


def _hang_failure(
    beat: RankSnapshot,
    rank: int,
    *,
    blamed: int | None,
    node: str,
    generation: int,
    stacks: Sequence[str],
) -> Failure:
    where = f"in {beat.collective}" if beat.collective else f"in phase {beat.phase.value}"
    failure = Failure(
        cause=Cause.HANG,
        code=Exit.HANG,
        primary=True,
        message=f"rank {rank} hangs {where}: no progress within hangTimeoutSeconds",
        rank=rank,
        node=node,
        generation=generation,
        step=beat.step if beat.step >= 0 else None,
        time=time.time(),
        traceback=tuple(stacks[:TRACEBACK_LINES]),
        collective=beat.collective,
    )
    if rank == blamed:
        return failure
    message = f"rank {rank} waited {where} for rank {blamed}"
    return replace(failure, cause=Cause.COLLECTIVE_TIMEOUT, primary=False, message=message)


def mismatch_failure(
    odd: Mismatch, *, node: str, generation: int, step: int | None, when: float | None = None
) -> Failure:
    """The failure of ranks that entered another collective than their peers. It is permanent: a
    restart would repeat it.
    """
    return Failure(
        cause=Cause.COLLECTIVE_MISMATCH,
        code=Exit.USER,
        primary=True,
        message=odd.message,
        rank=odd.ranks[0] if odd.ranks else None,
        node=node,
        generation=generation,
        step=step,
        time=time.time() if when is None else when,
        collective=odd.collective,
    )


def resolve_root_cause(failure: Failure, notes: Sequence[Note]) -> Failure:
    """The root cause, given the states of all ranks.

    A rank that entered another collective is the cause of everything but an exception of its own; a
    rank that did not enter one is the cause of its peers' timeouts.
    """
    if failure.permanent and failure.cause is not Cause.COLLECTIVE_MISMATCH:
        return failure
    nodes = {int(note["rank"]): str(note.get("node", "")) for note in notes}
    odd = find_odd(notes)
    if odd is not None:
        where = nodes.get(odd.ranks[0], "") if odd.ranks else failure.node
        return mismatch_failure(
            odd, node=where, generation=failure.generation, step=failure.step, when=failure.time
        )
    if failure.primary or failure.code is not Exit.HANG:
        return failure
    missing = find_missing(notes)
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


def node_lost_failure(
    beat: RankSnapshot, *, rank: int, node: str, generation: int, message: str
) -> Failure:
    """The secondary failure of a rank whose group has lost another node."""
    return Failure(
        cause=Cause.NODE_LOST,
        code=Exit.PEERS_LOST,
        primary=False,
        message=message,
        rank=rank,
        node=node,
        generation=generation,
        step=beat.step if beat.step >= 0 else None,
        time=time.time(),
        collective=beat.collective,
    )


DUMP_SECONDS = 2.0
# seconds that one look may add: an agent that was paused itself has seen nothing
_LONGEST_LOOK = 1.0
_MIN_SLOW_SECONDS = 60.0
_SLOW = {Phase.START, Phase.RENDEZVOUS, Phase.INIT, Phase.RESTORE, Phase.SAVE, Phase.EXIT}
"""Phases that may take long without a beat: imports, downloads, large reads and writes."""


class Watchdog:
    """Watches the heartbeats of this node's ranks in one generation.

    `from_start`: every rank will send heartbeats; otherwise (a script that may not use heartbeats)
    a rank is watched from its first one.
    """

    def __init__(self, scratch: Path, *, ranks: int, hang_seconds: float, from_start: bool) -> None:
        paths = [heartbeat_path(scratch, local_rank) for local_rank in range(ranks)]
        self._heartbeats = [Heartbeat.create(path) for path in paths]
        self._hang_seconds = hang_seconds
        self._from_start = from_start
        self._counts = [0] * ranks
        self._still = [0.0] * ranks
        self._waits: list[tuple[int, int, Phase] | None] = [None] * ranks
        self._waited = [0.0] * ranks
        self.longest_wait = 0.0
        """Seconds of the longest wait for other ranks that has come to its end while the group was
        making steps, or at any time in a script that does not say.
        """
        self._looked = time.monotonic()
        self.beats: list[RankSnapshot] = [heartbeat.read() for heartbeat in self._heartbeats]

    def look(self) -> list[int]:
        """Read all heartbeats; returns the local ranks that have made no progress for too long."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, _LONGEST_LOOK), now
        self.beats = [heartbeat.read() for heartbeat in self._heartbeats]
        for local_rank, beat in enumerate(self.beats):
            moved = beat.count != self._counts[local_rank]
            self._counts[local_rank] = beat.count
            self._still[local_rank] = 0.0 if moved else self._still[local_rank] + passed
            self._note_wait(local_rank, beat, passed)
        return [
            local_rank
            for local_rank in range(len(self.beats))
            if self._still[local_rank] > self._allowed(local_rank)
        ]

    def _note_wait(self, local_rank: int, beat: RankSnapshot, passed: float) -> None:
        waits = beat.inside or (beat.count > 0 and beat.phase is Phase.RENDEZVOUS)
        wait, before = (
            (beat.count, beat.sequence, beat.phase) if waits else None,
            self._waits[local_rank],
        )
        if wait is not None and wait == before:
            self._waited[local_rank] += passed
            return
        # a script without beats is in no phase
        if before is not None and (before[2] not in _SLOW or before[0] == 0):
            self.longest_wait = max(self.longest_wait, self._waited[local_rank])
        self._waits[local_rank], self._waited[local_rank] = wait, 0.0

    def never_beats(self) -> bool:
        """Whether no rank here has reported a step: of such a script only the collectives are
        known.
        """
        return not any(beat.count for beat in self.beats)

    def waited_seconds(self) -> float:
        """How long all ranks here have been waiting for other ranks; 0 if one of them computes."""
        return min(self._waited)

    def _allowed(self, local_rank: int) -> float:
        beat = self.beats[local_rank]
        if beat.count == 0 and not self._from_start:
            return float("inf")
        slow = beat.phase in _SLOW or beat.count == 0
        return self._hang_seconds + (max(self._hang_seconds, _MIN_SLOW_SECONDS) if slow else 0.0)

    def step(self, local_rank: int) -> int | None:
        """The last step that the rank has reported; None before the first."""
        step = self.beats[local_rank].step
        return step if step >= 0 else None

    def last_step(self) -> int | None:
        """The highest step of this node's ranks."""
        return max((beat.step for beat in self.beats if beat.step >= 0), default=None)

    def note(
        self, local_rank: int, *, rank: int, pid: int, node: str = "", world_size: int = 1
    ) -> Note:
        """The state of a rank, from which other agents find the rank at fault."""
        beat = self.beats[local_rank]
        # a script's ranks may rightly differ
        calls = self._heartbeats[local_rank].calls() if self._from_start else []
        return {
            "rank": rank,
            "node": node,
            "stopped": is_stopped(pid),
            "inside": beat.inside,
            "sequence": beat.sequence,
            "step": beat.step,
            "phase": beat.phase.value,
            "collective": beat.collective,
            "calls": write_calls(calls, world_size=world_size),
        }

    def close(self) -> None:
        """Unmap the heartbeats; the files are kept for diagnosis."""
        for heartbeat in self._heartbeats:
            heartbeat.close()


def heartbeat_path(scratch: Path, local_rank: int) -> Path:
    """The path of a rank's heartbeat file."""
    return scratch / f"rank-{local_rank}.heartbeat"


def find_hung_rank(notes: Iterable[Note]) -> int | None:
    """The rank at fault for a hang; None without notes."""
    ordered = sorted(
        notes,
        key=lambda note: (
            not note["stopped"],
            note["inside"],
            note["sequence"],
            note["step"],
            note["rank"],
        ),
    )
    return int(ordered[0]["rank"]) if ordered else None


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger; False if the system does not report
    it.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in {"T", "t"}


def dump_stacks(pids: dict[int, int], paths: dict[int, Path]) -> dict[int, list[str]]:
    """Have the ranks of `pids` (by local rank) write their stacks, also stopped ones; returns the
    lines, within two seconds.
    """
    before = {local_rank: _size(path) for local_rank, path in paths.items()}
    for pid in pids.values():
        for number in (signal.SIGUSR2, signal.SIGCONT):
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
