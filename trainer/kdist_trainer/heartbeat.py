"""The heartbeat of a rank: a small file mapped into the rank and its agent, which outlives the rank's abort.

The rank writes what it does and which collective it is in; the agent reads and so tells a slow rank from a hanging one, and
the rank that hangs from those that wait for it. One beat costs less than a microsecond or two and no system call.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Phase(StrEnum):
    """What a rank is doing. The place in this list is the number in the file: append, never reorder."""

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
_BEAT = struct.Struct("<QqqQQ")  # count, phase, step, nanoseconds of the monotonic clock, count again
_COLLECTIVE = struct.Struct("<QQQ16s16s")  # sequence, inside, elements, operation, element type
_OWNER_AT = 0
_BEAT_AT = 64  # parts on cache lines of their own: each has its own writer thread at times
_COLLECTIVE_AT = 128
_BEAT_END = _BEAT_AT + _BEAT.size
_COLLECTIVE_END = _COLLECTIVE_AT + _COLLECTIVE.size
_INSIDE_AT = _COLLECTIVE_AT + 8
_ATTEMPTS = 1000  # far more than a writer needs, unless it was stopped in the middle
_SIZE = 256
_FLAG = struct.Struct("<Q")


@dataclass(frozen=True)
class Beat:
    """One reading. `count` grows with every beat; `step` is -1 until one is known; `time_ns` is CLOCK_MONOTONIC.

    `sequence` numbers the collectives of this rank from 1 and `inside` says that the last one has not returned.
    """

    count: int
    phase: Phase
    step: int
    time_ns: int
    op: str
    numel: int
    dtype: str
    sequence: int
    inside: bool
    generation: int
    pid: int

    @property
    def collective(self) -> str | None:
        """The collective that this rank is in, such as `all_reduce(float32[1024]) #17`, or None."""
        return f"{self.op}({self.dtype}[{self.numel}]) #{self.sequence}" if self.inside else None


class Heartbeat:
    """One rank's file, mapped. The rank is its only writer; `read` may be called from anywhere."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._count = 0
        self._sequence = 0
        self._names: dict[str, bytes] = {}

    @classmethod
    def create(cls, path: Path) -> Heartbeat:
        """Make a new file of zeros at `path` and map it: the agent's part. Who maps the old one writes into the void."""
        fresh = path.with_name(path.name + ".new")
        fresh.write_bytes(bytes(_SIZE))
        fresh.replace(path)
        return cls(path)

    @classmethod
    def attach(cls, path: Path) -> Heartbeat:
        """Map an existing file and sign it with this process and `KDIST_GENERATION`: the rank's part. Raises `OSError`."""
        heartbeat = cls(path)
        _OWNER.pack_into(heartbeat._map, _OWNER_AT, os.getpid(), int(os.environ.get("KDIST_GENERATION", "0")))
        return heartbeat

    def beat(self, phase: Phase, step: int) -> None:
        """Say that this rank goes on: it is in `phase`, at `step`."""
        self._count += 1
        # Packed aside and copied in one go: pack_into would first fill the place with zeros, for a reader to see.
        self._map[_BEAT_AT:_BEAT_END] = _BEAT.pack(self._count, _NUMBER[phase], step, time.monotonic_ns(), self._count)

    def enter(self, op: str, numel: int, dtype: str) -> None:
        """Say that a collective over `numel` elements of `dtype` begins."""
        self._sequence += 1
        entered = _COLLECTIVE.pack(self._sequence, 1, numel, self._name(op), self._name(dtype))
        self._map[_COLLECTIVE_AT:_COLLECTIVE_END] = entered

    def leave(self) -> None:
        """Say that the collective returned."""
        _FLAG.pack_into(self._map, _INSIDE_AT, 0)

    def read(self) -> Beat:
        """The latest beat. Without a lock: read until the beat is whole, as the first reading nearly always is."""
        for _ in range(_ATTEMPTS):
            raw = self._map[:]
            count, number, step, nanoseconds, count_again = _BEAT.unpack_from(raw, _BEAT_AT)
            if count == count_again:
                break
        pid, generation = _OWNER.unpack_from(raw, _OWNER_AT)
        sequence, inside, numel, op, dtype = _COLLECTIVE.unpack_from(raw, _COLLECTIVE_AT)
        return Beat(
            count=count,
            phase=_PHASES[number] if 0 <= number < len(_PHASES) else Phase.START,
            step=step if count else -1,
            time_ns=nanoseconds,
            op=_text(op),
            numel=numel,
            dtype=_text(dtype),
            sequence=sequence,
            inside=bool(inside),
            generation=generation,
            pid=pid,
        )

    def close(self) -> None:
        """Unmap the file; it stays on disk."""
        self._map.close()

    def _name(self, text: str) -> bytes:
        encoded = self._names.get(text)
        if encoded is None:
            encoded = self._names[text] = text.removeprefix("torch.").encode()[:16]
        return encoded


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
