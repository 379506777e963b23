"""Why the workers of this node exited, and the exit record: how a run ended, and its root cause,
which all agents of a run write alike. Free of torch.

The sources of an exit are the exit codes, the failures that workers recorded, the signals that the
agent sent, and the kernel's count of OOM kills, since SIGKILL alone does not show who sent it. Of
a failure of the storage, `describe_full` names the folders that have no room.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from kdist_trainer.causes.advice import shorten
from kdist_trainer.causes.host import SHARED_MEMORY
from kdist_trainer.checkpoint.manifest import CheckpointDirectory
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.config import Cause, Exit, TrainConfig
from kdist_trainer.config.edit_rules import compare_done
from kdist_trainer.config.exit_codes import CODES, Rerun
from kdist_trainer.config.train_config import FAIL_JOB, RestartRule
from kdist_trainer.errors import CheckpointMismatchError
from kdist_trainer.formats import stamp
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.instrumentation import fault_handler
from kdist_trainer.instrumentation.fault_handler import stacks_path
from kdist_trainer.ipc import failure, result
from kdist_trainer.ipc.failure import Failure
from kdist_trainer.ipc.result import DONE, STOPPED
from kdist_trainer.processes import preallocated
from kdist_trainer.processes.liveness import RankSnapshot
from kdist_trainer.processes.signals import signal_name
from kdist_trainer.processes.threads import BoundedCalls

RankState = dict[str, Any]
"""The state of one rank as agents exchange it: its latest heartbeat and collectives."""
FORKSERVER_LOST = 255
"""The exit code that multiprocessing reports if the forkserver died, so that the exit codes of its
children are unknown.
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
    """Whether the agent killed the workers because the grace period was over, or because a stop was
    requested twice.
    """
    rank_states: list[RankState] = field(default_factory=list)
    """The states of all ranks of this node, if one failed."""
    early: dict[int, Failure] = field(default_factory=dict)
    """What the ranks of a script that left by themselves with exit code 0 have done if others still
    waited for them in a collective.
    """
    kept: dict[int, int] = field(default_factory=dict)
    """The workers that have left the group and continue in the next one, each with the last step
    that it has finished, or -1.
    """
    separate: bool = False
    """Whether the ranks are done and none of them has formed a process group with others."""

    @property
    def is_done(self) -> bool:
        """Whether the workers of this node are done, as far as this node can tell."""
        done = bool(self.outcomes) and all(each == DONE for each in self.outcomes.values())
        return done and not (self.forced or self.kept)


@dataclass
class ExitContext:
    """What the agent knows about the exit of a worker group."""

    node: str
    generation: int
    scratch: Path
    global_ranks: list[int]
    """By local rank."""
    exits: dict[int, int]
    """Exit codes by local rank, of the ranks that exited by themselves."""
    managed: bool = True
    """Whether a rank that succeeds writes a result. A script may exit by `os._exit`; then only its
    exit code is context.
    """
    terminated: bool = False
    """Whether the agent had sent SIGTERM, so that dying of it is no failure."""
    out_of_memory: bool = False
    """Whether the kernel made an OOM kill just before the first rank was seen killed."""
    snapshots: list[RankSnapshot] = field(default_factory=list)
    """The latest heartbeats, by local rank."""
    rules: Sequence[RestartRule] = ()
    """What the job wants certain failures to lead to."""


def find_outcomes(context: ExitContext) -> dict[int, str]:
    """`done` or `stopped` for the workers that did not fail, by local rank."""
    found = {}
    stops = {-signal.SIGTERM, 128 + signal.SIGTERM} if context.terminated else set()
    stops |= set() if context.managed else {int(Exit.STOPPED)}
    for local_rank, code in context.exits.items():
        recorded = result.read_result(context.scratch, local_rank)
        if recorded is not None and context.managed:
            # it had finished: what happened to its process later does not matter
            found[local_rank] = recorded
        elif recorded is not None or (code == 0 and not context.managed):
            found[local_rank] = STOPPED if context.terminated else DONE
        elif code in stops:
            found[local_rank] = STOPPED
    return found


def find_failures(context: ExitContext) -> dict[int, Failure]:
    """The failures of the workers that exited by themselves, by local rank."""
    succeeded = find_outcomes(context)
    return {
        local_rank: _failure_of(context, local_rank, code)
        for local_rank, code in context.exits.items()
        if local_rank not in succeeded
    }


def group_result(context: ExitContext) -> GroupResult:
    """The result of the workers that exited by themselves."""
    found, early = find_failures(context), early_exits(context)
    # of a rank that has become another program it is not known
    separate = not context.managed and all(
        context.snapshots[local_rank].group is False
        and context.exits.get(local_rank) == 0
        and result.read_result(context.scratch, local_rank) == DONE
        for local_rank in range(len(context.global_ranks))
    )
    return GroupResult(find_outcomes(context), found, context.exits, early=early, separate=separate)


def early_exits(context: ExitContext) -> dict[int, Failure]:
    """The failures that the ranks of a script have caused if others waited for them in a
    collective when they left with exit code 0, by local rank.
    """
    if context.managed or context.terminated:
        return {}
    succeeded = find_outcomes(context)
    return {
        local_rank: _early_exit(context, local_rank)
        for local_rank, code in context.exits.items()
        if code == 0 and succeeded.get(local_rank) == DONE
    }


def _early_exit(context: ExitContext, local_rank: int) -> Failure:
    rank, place = context.global_ranks[local_rank], result.read_left(context.scratch, local_rank)
    where = f" at {shorten(place)}" if place else ""
    left = Failure.of_rank(
        Cause.EARLY_EXIT,
        Exit.PEERS_LOST,
        f"rank {rank} left with exit code 0{where} while other ranks waited for it in a collective",
        rank=rank,
        node=context.node,
        generation=context.generation,
        snapshot=context.snapshots[local_rank],
        place=place,
    )
    advice = "let all ranks enter the same collectives, and leave after the last of them"
    return replace(left, collective=None, signature="early-exit", advice=advice, rerun=Rerun.FIXED)


def find_early_exit(early: dict[int, Failure], others: Iterable[Failure]) -> Failure | None:
    """The early exit of a rank of this node that explains the failures of other ranks; None if one
    of them happened by itself, or if none waited.
    """
    others = list(others)
    if not early or not others:
        return None
    hung = [one.time for one in others if one.primary]
    if any(one.primary and not (one.code is Exit.HANG and one.collective) for one in others):
        return None
    first = early[min(early)]
    # before the hang that it explains; else later than what happened by itself and is not told yet
    return replace(first, time=min(hung) - 1e-3 if hung else time.time())


def secondary_failures(context: ExitContext, message: str) -> dict[int, Failure]:
    """The failures of the workers that have not exited, by local rank: they have lost a peer."""
    return {
        local_rank: Failure.of_rank(
            Cause.NODE_LOST,
            Exit.PEERS_LOST,
            message,
            rank=rank,
            node=context.node,
            generation=context.generation,
            snapshot=context.snapshots[local_rank],
            primary=False,
        )
        for local_rank, rank in enumerate(context.global_ranks)
        if local_rank not in context.exits
    }


def recorded_failures(context: ExitContext) -> dict[int, Failure]:
    """The failures recorded by workers that have not exited yet, by local rank."""
    running = set(range(len(context.global_ranks))) - context.exits.keys()
    return {
        local_rank: _failure_of(context, local_rank, 0)
        for local_rank in sorted(running)
        if failure.read(context.scratch, local_rank) is not None
    }


def _failure_of(context: ExitContext, local_rank: int, code: int) -> Failure:
    """The failure of a worker, and what the job's rules say of it. A script that has recorded an
    error, and has not exited yet, will exit with 1.
    """
    found = _find_failure(context, local_rank, code)
    shown = 128 - code if code < 0 else code or (1 if found.types else None)
    exit_code = None if context.managed else shown
    matching = (rule for rule in context.rules if rule.matches(exit_code, found.types))
    rule = next(matching, None) if found.primary else None
    found = replace(found, types=())
    if rule is None:
        return found
    fails = rule.action == FAIL_JOB
    if found.code.retryable == fails:  # the exit code must say what the rule says
        found = replace(found, code=Exit.USER if fails else Exit.RETRY)
    message = f"{found.message} (spec.restart.rules: {rule.action})"
    return replace(found, action=rule.action, message=message)


def _find_failure(context: ExitContext, local_rank: int, code: int) -> Failure:
    """The failure of a worker: the one that it recorded, else one derived from its exit code."""
    snapshot, rank = context.snapshots[local_rank], context.global_ranks[local_rank]
    recorded = failure.read(context.scratch, local_rank)
    if recorded is not None:
        step = snapshot.step if snapshot.step >= 0 else None
        return replace(
            recorded,
            rank=rank,
            node=context.node,
            generation=context.generation,
            step=step if recorded.step is None else recorded.step,
            collective=recorded.collective or snapshot.collective,
        )
    cause, exit_code, primary, what = _classify_exit(code, context, snapshot.collective)
    crashed = -code in fault_handler.SIGNALS
    lines, place = fault_handler.read(context.scratch, local_rank) if crashed else ((), None)
    return Failure.of_rank(
        cause,
        exit_code,
        f"rank {rank} {what}",
        rank=rank,
        node=context.node,
        generation=context.generation,
        snapshot=snapshot,
        primary=primary,
        traceback=lines,
        place=place,
    )


_EXIT_CODE_CAUSES = {code: cause for cause, code in CODES.items()}
"""The cause that a managed rank's exit code stands for, if its failure could not be written."""


def _classify_exit(
    code: int, context: ExitContext, collective: str | None
) -> tuple[Cause, Exit, bool, str]:
    """Cause, exit code, whether primary, and message for a worker that recorded no failure; `code`
    is its exit code.
    """
    if context.managed and code in _EXIT_CODE_CAUSES:
        own = Exit(code)
        primary = own not in (Exit.PEERS_LOST, Exit.HANG)
        message = f"exited with code {code} and could not write its failure to {context.scratch}"
        return _EXIT_CODE_CAUSES[own], own, primary, message
    if code == -signal.SIGKILL and context.out_of_memory:
        return Cause.OOM_HOST, Exit.HOST_OOM, True, "was killed: the host ran out of memory"
    if code == -signal.SIGABRT and collective:
        return Cause.COLLECTIVE_TIMEOUT, Exit.HANG, False, f"aborted inside {collective}"
    if code < 0:
        return Cause.SIGNAL, Exit.PEERS_LOST, True, f"was killed by {signal_name(code)}"
    if code == FORKSERVER_LOST:
        return (
            Cause.SIGNAL,
            Exit.PEERS_LOST,
            True,
            "was lost with the forkserver, or exited with code 255",
        )
    if code == 0:
        message = (
            "exited with code 0 before its training was over: something called os._exit or exec"
        )
        return Cause.USER_CODE, Exit.USER, True, message
    if code >= 128:
        return Cause.UNKNOWN, Exit.PEERS_LOST, True, f"exited with code {code}"
    return Cause.USER_CODE, Exit.USER, True, f"exited with code {code}"


def reset_files(scratch: Path, local_ranks: int) -> None:
    """Remove the workers' files of the previous generation, and reserve space for those of the next
    one. Raises `OSError`.
    """
    for local_rank in range(local_ranks):
        preallocated.reserve(failure.path_of(scratch, local_rank))
        preallocated.reserve(result.path_of(scratch, local_rank))
        result.left_path(scratch, local_rank).unlink(missing_ok=True)
        stacks_path(scratch, local_rank).unlink(missing_ok=True)
        fault_handler.path_of(scratch, local_rank).unlink(missing_ok=True)
        fault_handler.look_path(scratch, local_rank).unlink(missing_ok=True)


_ROOT = Path("/sys/fs/cgroup")
_SELF = Path("/proc/self/cgroup")
_MACHINE = Path("/proc/vmstat")
RECENT_SECONDS = 10.0
"""How long a process may take to exit after an OOM kill: the kernel counts first, and freeing much
memory takes time.
"""
_POLL_SECONDS = 1.0


class OomKills:
    """Watches the kernel's count of OOM kills. Only recent kills count, since an old one does not
    explain a new SIGKILL.
    """

    def __init__(
        self, count: Callable[[], int] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._count = count or count_oom_kills
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque([(clock(), self._count())])
        self._has_killed: bool | None = None  # not known before a rank was killed

    def poll(self) -> None:
        """Read the count, at most once a second."""
        now = self._clock()
        if now - self._samples[-1][0] >= _POLL_SECONDS:
            self._samples.append((now, self._count()))
            while len(self._samples) > 1 and self._samples[1][0] <= now - RECENT_SECONDS:
                self._samples.popleft()

    def recent(self) -> bool:
        """Whether the kernel has killed a process within the last seconds."""
        self.poll()
        return self._count() > self._samples[0][1]

    def explain(self, exits: Mapping[int, int]) -> bool:
        """Whether the kernel had made an OOM kill when the first worker was seen killed."""
        if self._has_killed is None and -signal.SIGKILL in exits.values():
            self._has_killed = self.recent()
        return bool(self._has_killed)


def count_oom_kills() -> int:
    """The number of OOM kills so far: in this control group, else on this machine, else 0."""
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


RECORD = "exit.json"
RECORD_HELP = "file for the exit record, which Kubernetes reads"
TERMINATION_BYTES = 4096
"""The most bytes of a termination message that Kubernetes keeps."""


class RunOutcome(Exception):  # noqa: N818 - a success as well as a failure leaves the agent's loop
    """Raised when the agent's work is over; `record` is the exit record."""

    def __init__(self, record: dict[str, Any]) -> None:
        super().__init__(record.get("message"))
        self.record = record

    @property
    def code(self) -> Exit:
        return Exit(self.record["code"])


def root_cause(failures: Iterable[Failure]) -> Failure | None:
    """The first primary failure; without one, a timeout rather than a lost peer; None without
    failures.
    """

    def order(each: Failure) -> tuple[bool, bool, float]:
        return not each.primary, not each.primary and each.code is not Exit.HANG, each.time

    return min(failures, key=order, default=None)


def success(*, step: int | None, separate_ranks: int = 0) -> dict[str, Any]:
    """The exit record of a completed run after this last step; `separate_ranks` is the number of
    its ranks if none has formed a process group with others.
    """
    return {
        "code": int(Exit.DONE),
        "cause": None,
        "outcome": "done",
        "message": "done",
        "step": step,
        **({"separate_ranks": separate_ranks} if separate_ranks else {}),
    }


def stopped(message: str, *, step: int | None) -> dict[str, Any]:
    """The exit record of an agent that stopped on request."""
    return {
        "code": int(Exit.STOPPED),
        "cause": Cause.PREEMPTED.value,
        "outcome": "stopped",
        "message": message,
        "step": step,
    }


def failed(failure: Failure) -> dict[str, Any]:
    """The exit record of a run that ends because of `failure`."""
    return {**failure.to_document(), "outcome": "failed"}


def write_record(
    record: dict[str, Any], scratch: Path, termination_message: Path | None = None
) -> None:
    """Write the record to `scratch`, and a short form where Kubernetes reads it. An `OSError` is
    ignored, since the exit code is still reported.
    """
    fresh = scratch / f"{RECORD}.new"
    record = stamp(RECORD, record)
    with suppress(OSError):
        fresh.write_bytes(
            encode_json(record, indent=2, ensure_ascii=False).encode(errors="replace") + b"\n"
        )
        fresh.replace(scratch / RECORD)
    if termination_message is not None:
        write_termination_message(record, termination_message)


def write_termination_message(record: dict[str, Any], path: Path) -> None:
    """Write a short form of the record where Kubernetes reads it. An `OSError` is ignored."""
    with suppress(OSError):  # a mounted file: it can be written, not replaced
        path.write_bytes(shorten_record(stamp(RECORD, record)))


def shorten_record(record: dict[str, Any], limit: int = TERMINATION_BYTES) -> bytes:
    """The record as JSON of at most `limit` bytes: the beginning of the traceback is cut first,
    then the ends of strings and lists.
    """
    for length, most in ((2000, 32), (500, 16), (50, 4)):
        short = {
            name: value[:length] if isinstance(value, str) else value
            for name, value in record.items()
        }
        if isinstance(record.get("collectives"), list):
            short["collectives"] = [line[:length] for line in record["collectives"][:most]]
        lines = [line[:length] for line in record.get("traceback") or []]
        while True:
            text = encode_json({**short, "traceback": lines}, ensure_ascii=False).encode(
                errors="replace"
            )
            if len(text) <= limit:
                return text
            if not lines:
                break
            lines = lines[1:]
    return encode_json({"code": record["code"]}).encode()


def read_done(
    checkpoints: StoragePath | None, config: TrainConfig, *, run_id: str
) -> dict[str, Any] | None:
    """The DONE document of the run's last commit; None while the job, as it is now, is not done.
    Raises `CheckpointMismatchError` if the run has ended, and the job was edited since in a way
    that cannot continue from its last checkpoint.
    """
    done = CheckpointDirectory(checkpoints).done() if checkpoints is not None else None
    if done is None or done.get("run_id", run_id) != run_id:
        return None
    finished = compare_done(done, config.to_job())
    if finished.problem is not None:
        raise CheckpointMismatchError(finished.problem)
    return done if finished.is_complete else None


_LITTLE_BYTES: Final = 1 << 20
_LITTLE_SHARE: Final = 0.01
_ANSWER_SECONDS: Final = 1.0
_calls: dict[Path, BoundedCalls] = {}
_asking = threading.Lock()
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB")
ADVICE: Final[Mapping[str, str]] = {
    "checkpoints": "delete old checkpoints or other files there, keep fewer "
    "(spec.train.checkpoint.keep), or use a larger volume",
    "scratch": "delete other files there, it is the folder of this agent's own files",
    "shared memory": SHARED_MEMORY.format(free=""),
}
"""What helps, by the use of the folder."""


def describe_full(folders: Iterable[tuple[str, object]], *, has: str = "has") -> str:
    """A sentence that names each folder without room and what helps; empty if all have room.

    Args:
        folders: The use of each, a key of `ADVICE`, and the folder. What is no folder of this
            machine, such as one of an object store, is left out.
        has: `had` in a text that is read later.
    """
    return "; ".join(filter(None, (describe_room(use, folder, has=has) for use, folder in folders)))


def describe_room(use: str, folder: object, *, is_full: bool = True, has: str = "has") -> str:
    """A sentence about the free space of a folder and how to get more; with `is_full` only if
    little is left. Empty for what is no folder.
    """
    if not isinstance(folder, Path):
        return ""
    try:
        found = _ask(folder)
    except TimeoutError:
        return f"storage: {folder} ({use}) does not answer: look at its disk or its server"
    except FileNotFoundError:
        if use == "shared memory":  # not every system has it
            return ""
        return f"storage: {folder} ({use}) does not exist: it was removed, or is not mounted"
    except OSError:
        return ""
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    no_files = found.f_files > 0 and found.f_favail == 0
    is_little = no_files or free < min(_LITTLE_BYTES, _LITTLE_SHARE * total)
    if total == 0 or (is_full and not is_little):
        return ""
    left = "no room for another file" if no_files else f"{_show(free)} free of {_show(total)}"
    return f"storage: {folder} ({use}) {has} {left}: {ADVICE[use]}"


def _ask(folder: Path) -> os.statvfs_result:
    """The room of a folder. Raises `OSError`, and `TimeoutError` if it does not answer soon."""
    with _asking:
        if folder not in _calls:
            _calls[folder] = BoundedCalls(str(folder), seconds=_ANSWER_SECONDS)
        return _calls[folder].call(lambda: os.statvfs(folder))


def _show(amount: float) -> str:
    for unit in _UNITS:
        if amount < 1024 or unit == _UNITS[-1]:
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
