"""Liveness of ranks and agents: the heartbeat of a rank, and the pipe that ends a process when its
parent dies.

A heartbeat is a small file mapped into the rank and its agent. The rank writes its phase and its
current collective, so the agent can distinguish a slow rank from a hanging one. The file outlives
an abort of the rank, and a heartbeat makes no system call.

`ParentDeathPipe` is a named pipe whose only writer is its owner. A process that watches it reads
end of file when the owner dies, and then kills all processes below it and its process group. Unlike
PDEATHSIG this also works for ranks, whose parent is the forkserver, and on macOS. A stopped process
cannot watch, but the kernel continues it when its parent exits.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from kdist_trainer.formats import SCRATCH
from kdist_trainer.processes import process_tree
from kdist_trainer.processes.threads import OnError, start_thread


class Phase(StrEnum):
    """What a rank is doing. The position in this list is the number in the file: append, never
    reorder.
    """

    START = "start"
    RENDEZVOUS = "rendezvous"
    INIT = "init"
    RESTORE = "restore"
    DATA = "data"
    STEP = "step"
    SYNC = "sync"
    SAVE = "save"
    EVALUATE = "evaluate"
    EXIT = "exit"


_PHASES = tuple(Phase)
_NUMBER = {phase: number for number, phase in enumerate(_PHASES)}

_OWNER = struct.Struct("<QQ")  # pid, generation: written once, when the rank attaches
# count, phase, step, nanoseconds of the monotonic clock, count again
_BEAT = struct.Struct("<QqqQQ")
_COLLECTIVE = struct.Struct("<QQ")  # number of the last collective, inside
# operation, element type, group, shape; longer texts are truncated
_TEXTS = struct.Struct("24s12s24s32s")
_CALL = struct.Struct(f"<QQQ{_TEXTS.size}sQ")  # number, sequence, elements, texts, number again
_OWNER_AT = 0
_OPENED_AT = _OWNER_AT + _OWNER.size
_GROUP_AT = _OPENED_AT + 8
_STOP = struct.Struct("<d")
_STOP_AT = _GROUP_AT + 8
_BEAT_AT = 64  # each part is on its own cache line, since it may have its own writer thread
_COLLECTIVE_AT = 128
_BEAT_END = _BEAT_AT + _BEAT.size
_COLLECTIVE_END = _COLLECTIVE_AT + _COLLECTIVE.size
_INSIDE_AT = _COLLECTIVE_AT + 8
_ATTEMPTS = 1000  # far more than a writer needs, unless it was stopped in the middle
_CALLS_AT = 256
_KEPT_CALLS = 128
_SIZE = _CALLS_AT + _KEPT_CALLS * _CALL.size
_FLAG = struct.Struct("<Q")
_GROUPS: dict[bool | None, int] = {None: 0, False: 1, True: 2}
_GROUP_OF = {number: group for group, number in _GROUPS.items()}


@dataclass(frozen=True)
class Call:
    """One collective that a rank has entered.

    Attributes:
        number: Counts the collectives of the rank, from 1.
        sequence: Counts those of its process group, from 1.
        op: The operation, such as `all_reduce`.
        dtype: The element type, such as `float32`.
        numel: The number of elements.
        shape: The shape, such as `4,256`.
        group: The process group; empty for that of all ranks.
    """

    number: int
    sequence: int
    op: str
    dtype: str
    numel: int
    shape: str
    group: str

    def __str__(self) -> str:
        """Such as `all_reduce(float32[4,256]) #17`."""
        of = f" of group {self.group}" if self.group else ""
        what = f"({self.dtype}[{self.shape or self.numel}])" if self.dtype else ""
        return f"{self.op}{what} #{self.sequence}{of}"


@dataclass(frozen=True)
class RankSnapshot:
    """The heartbeat of a rank at one moment.

    Attributes:
        count: The number of heartbeats so far.
        phase: What the rank is doing.
        step: The step; -1 before the first.
        time_ns: The time of the last heartbeat on CLOCK_MONOTONIC, in nanoseconds.
        call: The last collective that the rank has entered.
        inside: Whether that collective has not returned yet.
        generation: The generation of the rank.
        pid: The process id of the rank.
        has_checkpoints: Whether the rank has opened the job's checkpoints, so that it can continue
            after a restart.
        group: Whether the rank has formed a process group with others; None if that is not known.
    """

    count: int
    phase: Phase
    step: int
    time_ns: int
    call: Call | None
    inside: bool
    generation: int
    pid: int
    has_checkpoints: bool = False
    group: bool | None = None

    @property
    def sequence(self) -> int:
        """The number of collectives that this rank has entered."""
        return self.call.number if self.call is not None else 0

    @property
    def collective(self) -> str | None:
        """The collective that this rank is in, such as `all_reduce(float32[1024]) #17`, or None."""
        return str(self.call) if self.inside and self.call is not None else None


def heartbeat_path(scratch: Path, local_rank: int) -> Path:
    """The path of a rank's heartbeat file in the scratch folder of its node."""
    return scratch / f"rank-{local_rank}.heartbeat"


def own_place() -> tuple[Path, int] | None:
    """The agent's scratch folder and this process's local rank; None without an agent."""
    scratch = os.environ.get(SCRATCH)
    return (Path(scratch), int(os.environ.get("LOCAL_RANK", "0"))) if scratch else None


class Heartbeat:
    """One rank's heartbeat file, mapped. The rank is its only writer, but for the request to stop,
    which its agent writes; any process may read it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._count = 0
        self._number = 0
        self._sequences: dict[str, int] = {}
        self._texts: dict[tuple[str, ...], bytes] = {}

    @classmethod
    def create(cls, path: Path) -> Heartbeat:
        """Create a new file of zeros at `path` and map it, as the agent does. Processes that have
        mapped the old file no longer affect it.
        """
        fresh = path.with_name(path.name + ".new")
        fresh.write_bytes(bytes(_SIZE))
        fresh.replace(path)
        return cls(path)

    @classmethod
    def attach(cls, path: Path) -> Heartbeat:
        """Map an existing file, as the rank does, and write its pid and `KDIST_GENERATION` into it.
        Raises `OSError`.
        """
        heartbeat = cls(path)
        _OWNER.pack_into(
            heartbeat._map, _OWNER_AT, os.getpid(), int(os.environ.get("KDIST_GENERATION", "0"))
        )
        return heartbeat

    @classmethod
    def of_process(cls) -> Heartbeat | None:
        """Map that of this process; None without an agent, or if it cannot be mapped."""
        with suppress(OSError, ValueError):
            return cls.attach(heartbeat_path(*place)) if (place := own_place()) else None
        return None

    def beat(self, phase: Phase, step: int) -> None:
        """Write a heartbeat: the rank makes progress and is in `phase`, at `step`."""
        self._count += 1
        # Packed first and copied at once: pack_into would write zeros before the values, which a
        # reader could see.
        self._map[_BEAT_AT:_BEAT_END] = _BEAT.pack(
            self._count, _NUMBER[phase], step, time.monotonic_ns(), self._count
        )

    def mark_checkpoints(self) -> None:
        """Record that the rank opens the job's checkpoints."""
        _FLAG.pack_into(self._map, _OPENED_AT, 1)

    def mark_group(self, group: bool | None) -> None:
        """Record whether the rank has formed a process group with others, which it has for good;
        None if that cannot be known.
        """
        if _FLAG.unpack_from(self._map, _GROUP_AT)[0] != _GROUPS[True]:
            _FLAG.pack_into(self._map, _GROUP_AT, _GROUPS[group])

    def mark_stop(self, deadline: float) -> None:
        """Record, as the agent of the rank, that it is to stop by this Unix time."""
        self._map[_STOP_AT : _STOP_AT + _STOP.size] = _STOP.pack(deadline)

    @staticmethod
    def read_stop(path: Path) -> float:
        """The Unix time by which a rank is to stop; 0 if it is not. The file of each generation is
        a new one.
        """
        try:
            with path.open("rb", buffering=0) as file:
                return float(_STOP.unpack(os.pread(file.fileno(), _STOP.size, _STOP_AT))[0])
        except (OSError, struct.error):
            return 0.0

    def enter(
        self,
        op: str,
        numel: int,
        dtype: str,
        *,
        shape: str = "",
        group: str = "",
        current: bool = True,
    ) -> None:
        """Record that a collective begins; an empty `group` is that of all ranks. `current` says
        whether the rank waits for it: one that is not current runs on another thread.
        """
        self._number += 1
        number, sequence = self._number, self._sequences.get(group, 0) + 1
        self._sequences[group] = sequence
        named = (op, dtype, group, shape)
        texts = self._texts.get(named)
        if texts is None:
            texts = self._texts[named] = _TEXTS.pack(
                *(text.removeprefix("torch.").encode() for text in named)
            )
        at = _CALLS_AT + (number % _KEPT_CALLS) * _CALL.size
        self._map[at : at + _CALL.size] = _CALL.pack(number, sequence, numel, texts, number)
        if current:
            self._map[_COLLECTIVE_AT:_COLLECTIVE_END] = _COLLECTIVE.pack(number, 1)

    def wait(self) -> None:
        """Record that the rank waits for a collective that it has entered before."""
        _FLAG.pack_into(self._map, _INSIDE_AT, 1)

    def leave(self, number: int | None = None) -> None:
        """Record that the collective has returned; with its `number`, only if no other has begun
        since.
        """
        if number is None or number == self._number:
            _FLAG.pack_into(self._map, _INSIDE_AT, 0)

    @property
    def entered(self) -> int:
        """The number of the last collective that this rank has entered."""
        return self._number

    def read(self) -> RankSnapshot:
        """Read the latest heartbeat. There is no lock: it is read again if it was written
        meanwhile, which is rare.
        """
        for _ in range(_ATTEMPTS):
            raw = self._map[:]
            count, number, step, nanoseconds, count_again = _BEAT.unpack_from(raw, _BEAT_AT)
            if count == count_again:
                break
        pid, generation = _OWNER.unpack_from(raw, _OWNER_AT)
        last, inside = _COLLECTIVE.unpack_from(raw, _COLLECTIVE_AT)
        return RankSnapshot(
            count=count,
            phase=_PHASES[number] if 0 <= number < len(_PHASES) else Phase.START,
            step=step if count else -1,
            time_ns=nanoseconds,
            call=_call(raw, last) if last else None,
            inside=bool(inside),
            generation=generation,
            pid=pid,
            has_checkpoints=bool(_FLAG.unpack_from(raw, _OPENED_AT)[0]),
            group=_GROUP_OF.get(_FLAG.unpack_from(raw, _GROUP_AT)[0]),
        )

    def calls(self, most: int = _KEPT_CALLS) -> list[Call]:
        """The last collectives that the rank has entered, oldest first and at most `most`; also
        after the rank has exited.
        """
        raw = self._map[:]
        numbers = [
            _FLAG.unpack_from(raw, _CALLS_AT + slot * _CALL.size)[0] for slot in range(_KEPT_CALLS)
        ]
        found = (
            _call(raw, number) for number in sorted(number for number in numbers if number)[-most:]
        )
        return [call for call in found if call is not None]

    def close(self) -> None:
        """Unmap the file; it stays on disk."""
        self._map.close()


def _call(raw: bytes, number: int) -> Call | None:
    """The call of that number; None if a later one has overwritten it, or is just doing so."""
    at = _CALLS_AT + (number % _KEPT_CALLS) * _CALL.size
    first, sequence, numel, texts, last = _CALL.unpack_from(raw, at)
    if first != number or last != number:
        return None
    op, dtype, group, shape = map(_text, _TEXTS.unpack(texts))
    return Call(number, sequence, op, dtype, numel, shape, group)


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


class NullHeartbeat:
    """The heartbeat of a rank that no agent started: nothing is written."""

    def beat(self, phase: Phase, step: int) -> None:
        """Do nothing."""


class ParentDeathPipe:
    """The owner's end of the pipe. Keep a reference to it for as long as the watchers may run."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    @classmethod
    def create(cls, path: Path) -> ParentDeathPipe:
        """Create the pipe at `path`, replacing that of a dead owner. Raises `OSError`."""
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        # A pipe without a reader cannot be opened for writing, so open it for reading first. Python
        # closes both ends on exec.
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        finally:
            os.close(reader)
        return cls(path, writer)

    def close(self) -> None:
        """Close the pipe, so that every watcher kills its process group. Closing twice is fine."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def kill_process_group() -> None:
    """Kill all processes below this one, also those that left its group, and then its group with
    this process.
    """
    try:
        process_tree.kill()
    finally:
        os.killpg(0, signal.SIGKILL)


def watch(path: Path, on_end: Callable[[], None] = kill_process_group) -> threading.Thread:
    """Call `on_end` once, from a daemon thread, when the owner of the parent-death pipe at `path`
    is dead, or the pipe cannot be opened; returns the thread, which sleeps in the kernel. By
    default it kills all processes below the caller and its process group, which must contain no
    others.
    """
    process_tree.wake_without_parent()
    try:
        # at once: a moment later it might be the pipe of a successor
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        descriptor = None
    return start_thread(
        partial(_wait, descriptor, on_end), name="parent-death", on_error=OnError.EXIT
    )


def _wait(descriptor: int | None, on_end: Callable[[], None]) -> None:
    if descriptor is None:
        on_end()
        return
    try:
        try:
            alive = bool(os.read(descriptor, 1))
        except BlockingIOError:
            alive = True  # nothing to read, but the owner holds the other end
        while alive:
            os.set_blocking(descriptor, True)
            alive = bool(os.read(descriptor, 1))
    except OSError:
        pass
    finally:
        os.close(descriptor)
    on_end()
