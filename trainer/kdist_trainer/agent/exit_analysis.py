"""Determines why the workers of this node exited.

The sources are their exit codes, the failures they recorded, what the agent did to them, and the
kernel's count of OOM kills, since SIGKILL alone does not show who sent it.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from kdist_trainer import errors, preallocated, result
from kdist_trainer.agent.desync import Note
from kdist_trainer.agent.worker_entry import stacks_path
from kdist_trainer.config import Cause, Exit
from kdist_trainer.errors import Failure
from kdist_trainer.instrumentation import fault_handler
from kdist_trainer.result import DONE, STOPPED

FORKSERVER_LOST = 255
"""What multiprocessing reports when the forkserver died and nobody can say how its children
ended.
"""


@dataclass
class GroupResult:
    """The result of one worker group on this node, by local rank. Workers that the agent killed
    because of others appear in none of the mappings.
    """

    outcomes: dict[int, str] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    exits: dict[int, int] = field(default_factory=dict)
    forced: bool = False
    """Whether the grace was over, or somebody asked twice."""
    notes: list[Note] = field(default_factory=list)
    """What all ranks here were in, where something failed."""


@dataclass
class ExitContext:
    """What the agent knows about the exit of a worker group."""

    node: str
    generation: int
    scratch: Path
    global_ranks: list[int]
    """By local rank."""
    exits: dict[int, int]
    """Exit codes by local rank, of the ranks that ended by themselves."""
    managed: bool = True
    """Whether a rank that ends well leaves a result. A script may end by `os._exit`, and its code
    then speaks for it.
    """
    terminated: bool = False
    """Whether the agent had sent SIGTERM, so that dying of it is no failure."""
    out_of_memory: bool = False
    """Whether the kernel has killed for want of memory just before the first rank was seen to be
    killed.
    """
    steps: dict[int, int | None] = field(default_factory=dict)
    collectives: dict[int, str | None] = field(default_factory=dict)


def outcomes(known: ExitContext) -> dict[int, str]:
    """`done` or `stopped` for the workers that ended well, by local rank."""
    found = {}
    stops = {-signal.SIGTERM, 128 + signal.SIGTERM} if known.terminated else set()
    stops |= set() if known.managed else {int(Exit.STOPPED)}
    for local_rank, code in known.exits.items():
        left = result.read_result(known.scratch, local_rank)
        if left is not None and known.managed:
            # it had finished: what happened to its process later does not matter
            found[local_rank] = left
        elif left is not None or (code == 0 and not known.managed):
            found[local_rank] = STOPPED if known.terminated else DONE
        elif code in stops:
            found[local_rank] = STOPPED
    return found


def failures(known: ExitContext) -> dict[int, Failure]:
    """A failure for each worker that ended by itself and not well, by local rank."""
    good = outcomes(known)
    return {
        local_rank: _examine(known, local_rank, code)
        for local_rank, code in known.exits.items()
        if local_rank not in good
    }


def failures_left(known: ExitContext) -> dict[int, Failure]:
    """The failures recorded by workers that have not exited yet, by local rank."""
    living = [number for number in range(len(known.global_ranks)) if number not in known.exits]
    return {
        local_rank: _examine(known, local_rank, 0)
        for local_rank in living
        if errors.read(known.scratch, local_rank) is not None
    }


def _examine(known: ExitContext, local_rank: int, code: int) -> Failure:
    left = errors.read(known.scratch, local_rank)
    step, collective = known.steps.get(local_rank), known.collectives.get(local_rank)
    if left is not None:
        return replace(
            left,
            rank=known.global_ranks[local_rank],
            node=known.node,
            generation=known.generation,
            step=step if left.step is None else left.step,
            collective=left.collective or collective,
        )
    cause, exit_code, primary, how = _judge(code, known, collective=collective)
    rank = known.global_ranks[local_rank]
    crashed = -code in fault_handler.SIGNALS
    lines, place = fault_handler.read(known.scratch, local_rank) if crashed else ((), None)
    return Failure(
        cause=cause,
        code=exit_code,
        primary=primary,
        message=f"rank {rank} {how}",
        rank=rank,
        node=known.node,
        generation=known.generation,
        step=step,
        time=time.time(),
        traceback=lines,
        collective=collective,
        place=place,
    )


_OWN_CODES = {
    Exit.CONFIG: Cause.CONFIG,
    Exit.DATA: Cause.DATA,
    Exit.USER: Cause.USER_CODE,
    Exit.DEVICE_OOM: Cause.OOM_DEVICE,
    Exit.HOST_OOM: Cause.OOM_HOST,
    Exit.MISMATCH: Cause.MISMATCH,
    Exit.NONFINITE: Cause.NAN,
    Exit.STORAGE: Cause.STORAGE,
    Exit.PEERS_LOST: Cause.NODE_LOST,
    Exit.HANG: Cause.COLLECTIVE_TIMEOUT,
}
"""What the exit code of a managed rank says where its failure could not be left on the disk."""


def _judge(
    code: int, known: ExitContext, *, collective: str | None
) -> tuple[Cause, Exit, bool, str]:
    """Cause, exit code, whether primary, and message for a worker that left nothing but its exit
    code.
    """
    if known.managed and code in _OWN_CODES:
        own, echo = Exit(code), code in (Exit.PEERS_LOST, Exit.HANG)
        return (
            _OWN_CODES[own],
            own,
            not echo,
            f"ended with code {code}; the rest it could not write to {known.scratch}",
        )
    if code == -signal.SIGKILL and known.out_of_memory:
        return Cause.OOM_HOST, Exit.HOST_OOM, True, "was killed: the host's memory ran out"
    if code == -signal.SIGABRT and collective:
        return Cause.COLLECTIVE_TIMEOUT, Exit.HANG, False, f"aborted inside {collective}"
    if code < 0:
        return Cause.SIGNAL, Exit.PEERS_LOST, True, f"was killed by {signal_name(code)}"
    if code == FORKSERVER_LOST:
        return (
            Cause.SIGNAL,
            Exit.PEERS_LOST,
            True,
            "was lost with the forkserver, or ended with code 255",
        )
    if code == 0:
        how = (
            "ended with code 0 and without a result, before its training was over: something "
            "called os._exit or exec"
        )
        return Cause.USER_CODE, Exit.USER, True, how
    if code >= 128:
        return Cause.UNKNOWN, Exit.PEERS_LOST, True, f"ended with code {code}"
    return Cause.USER_CODE, Exit.USER, True, f"ended with code {code}"


def signal_name(code: int) -> str | None:
    """The name of the signal that a negative exit code stands for, else None."""
    if code >= 0:
        return None
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def clear(scratch: Path, local_ranks: int) -> None:
    """Remove the files of an earlier generation, and reserve space for those of the next one.
    Raises `OSError`.
    """
    for local_rank in range(local_ranks):
        preallocated.reserve(errors.path_of(scratch, local_rank))
        preallocated.reserve(result.path_of(scratch, local_rank))
        stacks_path(scratch, local_rank).unlink(missing_ok=True)
        fault_handler.path_of(scratch, local_rank).unlink(missing_ok=True)


_ROOT = Path("/sys/fs/cgroup")
_SELF = Path("/proc/self/cgroup")
_MACHINE = Path("/proc/vmstat")


RECENT_SECONDS = 10.0
"""How long a process may take to end that the kernel has killed: it counts first, and large memory
is not freed at once.
"""
_LOOK_SECONDS = 1.0


class OomKills:
    """Watches the kernel's count of OOM kills. An old kill does not explain a new SIGKILL, so only
    its recent growth counts.
    """

    def __init__(
        self, count: Callable[[], int] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._count = count or count_oom_kills
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque([(clock(), self._count())])

    def look(self) -> None:
        """Read the count, at most once a second."""
        now = self._clock()
        if now - self._seen[-1][0] >= _LOOK_SECONDS:
            self._seen.append((now, self._count()))
            while len(self._seen) > 1 and self._seen[1][0] <= now - RECENT_SECONDS:
                self._seen.popleft()

    def recent(self) -> bool:
        """Whether the kernel has killed a process within the last seconds."""
        self.look()
        return self._count() > self._seen[0][1]


def count_oom_kills() -> int:
    """OOM kills so far: in this control group, else on this machine, else 0."""
    for path in _counters():
        count = read_count(path)
        if count is not None:
            return count
    return 0


def read_count(path: Path) -> int | None:
    """The number after `oom_kill` in a counter file of the kernel; None if it is not there."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdigit():
            return int(value)
    return None


def _counters() -> Iterator[Path]:
    """The files that may hold the count, the most specific first: cgroup v2, cgroup v1, the whole
    machine.
    """
    try:
        groups = [line.split(":", 2) for line in _SELF.read_text().splitlines()]
    except OSError:
        groups = []
    for _, controllers, path in (group for group in groups if len(group) == 3):
        relative = path.lstrip("/")
        if not controllers:
            yield _ROOT / relative / "memory.events"
            yield _ROOT / "memory.events"  # inside a container the group may look like the root
        elif "memory" in controllers.split(","):
            yield _ROOT / "memory" / relative / "memory.oom_control"
            yield _ROOT / "memory" / "memory.oom_control"
    yield _MACHINE
