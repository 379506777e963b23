"""Reads the ledger's lines of steps, however many they are, as a bounded number of records.

Three million lines are half a gigabyte. So successive steps of one generation become one record:
the line of its last step, with the sum of their seconds and their number as `steps`. What a reader
asks for stays exact: the first step of each generation and the newest lines are records of their
own, and a record never crosses a step from which a generation began or that was committed, nor a
gap. Free of torch: the command line reads with it too. Only what reads lines imports this module:
msgspec takes 20 ms to import, and a rank that starts again only writes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Final

from msgspec import Meta, Struct
from msgspec.structs import asdict

from kdist_trainer.formats import EVENTS_FILE, check_format
from kdist_trainer.formats.untrusted_text import (
    MalformedTextError,
    finite_number,
    parse_json,
    parse_lines,
)

MOST_RECORDS: Final = 20_000
_BLOCK_BYTES: Final = 1 << 15  # what is parsed at once stays in a processor's cache
_NEWEST_BLOCKS: Final = 16  # some 3,000 lines that are never merged
_LINE_BYTES: Final = 1 << 20
_LONG_LINE: Final = 200  # bytes; a line has some 150
_SUMS: Final = ("seconds", "wait_seconds")
_Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Seconds = Annotated[float, Meta(ge=0)]


class WrittenLine(Struct, forbid_unknown_fields=True, gc=False):
    """A line as `StepLedger` writes it. A line of any other form is read by `parse_json`, which is
    much slower.
    """

    step: _Number
    generation: _Number
    world_size: _Number
    first: _Number
    last: _Number
    loss: str | None
    seconds: _Seconds
    wait_seconds: _Seconds


@dataclass(slots=True)
class _Group:
    """Successive steps of one generation: the first and the last one, the first one's first sample
    and the last one's line.
    """

    generation: int
    first: int
    last: int
    sums: tuple[float | None, float | None]
    first_sample: Any
    line: WrittenLine | dict[str, Any]
    is_alone: bool = False

    @property
    def steps(self) -> int:
        return self.last - self.first + 1

    def joined(self, other: _Group) -> _Group:
        """This group and the one that follows it."""
        sums = (_add(self.sums[0], other.sums[0]), _add(self.sums[1], other.sums[1]))
        return _Group(self.generation, self.first, other.last, sums, self.first_sample, other.line)

    def record(self) -> dict[str, Any]:
        """Its last line, with what it sums up."""
        record = self.line if isinstance(self.line, dict) else asdict(self.line)
        if self.steps == 1:
            return record
        found = zip(_SUMS, self.sums, strict=True)
        sums = {name: round(total, 6) for name, total in found if total is not None}
        return {**record, "first": self.first_sample, "steps": self.steps, **sums}


def _add(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else one + other


class StepLines:
    """Takes the bytes of `steps.jsonl` in their order and returns its records."""

    def __init__(
        self, events: Iterable[Mapping[str, Any]], *, nbytes: int = 0, most: int | None = None
    ) -> None:
        """Begin. The events of the same ledger say where records must not be merged. `nbytes` is
        how many bytes will be read, as far as that is known; `most` is about how many records to
        return, besides those of the newest lines, by default `MOST_RECORDS`.
        """
        self._cuts = sorted(_find_cuts(events))
        self._most = MOST_RECORDS if most is None else most
        self._share = 1  # steps of a group
        while nbytes > self._share * self._most * _LONG_LINE:
            self._share *= 2
        self._groups: list[_Group] = []
        self._begun: set[int] = set()  # generations
        self._newest: deque[bytes] = deque()
        self._rest = b""
        self._skips = False

    def add(self, data: bytes | memoryview) -> None:
        """Take what follows in the file. Raises `NewerFormatError` if a newer version wrote it."""
        buffer = self._rest + data
        at = 0
        if self._skips:  # within a line that is too long
            at = buffer.find(b"\n") + 1
            if not at:
                return
            self._skips = False
        while len(buffer) - at >= _BLOCK_BYTES:
            end = buffer.rfind(b"\n", at, at + _BLOCK_BYTES) + 1
            end = end or buffer.find(b"\n", at + _BLOCK_BYTES) + 1
            if not end:
                break
            self._keep(buffer[at:end])
            at = end
        self._rest = buffer[at:]
        if len(self._rest) > _LINE_BYTES:
            self._rest, self._skips = b"", True

    def end_file(self) -> None:
        """Say that a file ends here: what follows is another one's."""
        if self._rest and not self._skips:
            self._keep(self._rest if self._rest.endswith(b"\n") else self._rest + b"\n")
        self._rest, self._skips = b"", False

    def records(self) -> list[dict[str, Any]]:
        """What was read, oldest first; nothing can be added after it. Raises `NewerFormatError`."""
        self.end_file()
        self._share = 1
        while self._newest:
            self._read(self._newest.popleft())
        return [group.record() for group in self._groups]

    def _keep(self, block: bytes) -> None:
        self._newest.append(block)
        if len(self._newest) > _NEWEST_BLOCKS:
            self._read(self._newest.popleft())
            if len(self._groups) > self._most:
                self._share *= 2
                groups, self._groups = self._groups, []
                for group in groups:
                    self._append(group)
                # groups that cannot be merged are no usual run's: the oldest become a gap of the
                # ledger
                del self._groups[: -2 * self._most]

    def _read(self, block: bytes) -> None:
        try:
            lines = parse_lines(WrittenLine, block)
        except MalformedTextError:
            self._read_json(block.splitlines())
            return
        for begin, end in pairwise([0, *_find_ends(lines), len(lines)]):
            self._add_run(lines[begin:end])

    def _add_run(self, lines: Sequence[WrittenLine]) -> None:
        """Add successive steps of one generation."""
        generation, first = (lines[0].generation, lines[0].step) if lines else (0, 0)
        at = 0
        while at < len(lines):
            step = first + at
            cut = bisect_left(self._cuts, step)
            is_alone = self._is_new(generation)
            until = at + 1 if is_alone else min(len(lines), at + self._room(generation, step))
            if cut < len(self._cuts):
                until = min(until, self._cuts[cut] - first + 1)
            part = lines[at:until]
            sums = sum([one.seconds for one in part]), sum([one.wait_seconds for one in part])
            last = first + until - 1
            group = _Group(generation, step, last, sums, part[0].first, part[-1], is_alone)
            self._append(group)
            at = until

    def _is_new(self, generation: int) -> bool:
        before = len(self._begun)
        self._begun.add(generation)
        return len(self._begun) > before

    def _room(self, generation: int, step: int) -> int:
        """How many steps from this one on belong to one group."""
        before = self._groups[-1] if self._groups else None
        if before is not None and self._follows(before, generation, step):
            return max(1, self._share - before.steps)
        return self._share

    def _read_json(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            try:
                record = parse_json(line, max_bytes=_LINE_BYTES, allow_nan=True)
            except MalformedTextError:  # torn, as by a crash
                continue
            check_format(EVENTS_FILE, record)
            keys = ("generation", "step")
            if isinstance(record, dict) and all(_is_int(record.get(key)) for key in keys):
                generation, step = record["generation"], record["step"]
                sums = finite_number(record.get(_SUMS[0])), finite_number(record.get(_SUMS[1]))
                sample, is_alone = record.get("first"), self._is_new(generation)
                self._append(_Group(generation, step, step, sums, sample, record, is_alone))

    def _append(self, group: _Group) -> None:
        before = self._groups[-1] if self._groups else None
        if (
            before is not None
            and self._follows(before, group.generation, group.first)
            and before.steps + group.steps <= self._share
        ):
            self._groups[-1] = before.joined(group)
        else:
            self._groups.append(group)

    def _follows(self, before: _Group, generation: int, step: int) -> bool:
        """Whether a step may belong to the group before it."""
        if before.is_alone or (before.generation, before.last + 1) != (generation, step):
            return False
        at = bisect_left(self._cuts, before.last)
        return at == len(self._cuts) or self._cuts[at] != before.last


def _find_cuts(events: Iterable[Mapping[str, Any]]) -> set[int]:
    """Steps after which a record begins: those from which a generation began, and the last one that
    was committed.
    """
    found: dict[str, set[int]] = {"generation": set(), "commit": set()}
    for event in events:
        name = event.get("event")
        step = event.get("from_step" if name == "generation" else "step")
        if name in ("generation", "commit") and isinstance(step, int):
            found[name].add(step)
    return found["generation"] | {max(found["commit"], default=0)}


def _find_ends(lines: Sequence[WrittenLine]) -> list[int]:
    """The lines whose step does not follow the one before it in the same generation."""
    steps = [line.step for line in lines]
    first = steps[0] if steps else 0
    follow = steps == list(range(first, first + len(steps)))
    if follow and len({line.generation for line in lines}) <= 1:
        return []  # nearly always
    keys = pairwise((line.generation, line.step) for line in lines)
    return [at for at, (one, two) in enumerate(keys, 1) if two != (one[0], one[1] + 1)]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
