"""The datagram: a rank's `StepStats` as one packed record of at most 1 KiB, and back.

Header, then every number as a float64: the cumulative ones first, then the gauges, in the order of
`StepStats`. The header holds a digest of that layout, so a record of another version is malformed,
never misread.
"""

from __future__ import annotations

import dataclasses
import math
import struct
import zlib
from dataclasses import dataclass
from operator import attrgetter

from kdist_trainer.metrics.declarations import Kind, Metric
from kdist_trainer.metrics.step_stats import StepStats

MAX_RECORD = 1024
"""Most bytes of a datagram."""

_METRICS: dict[str, Metric] = {
    declared.name: declared.metadata["metric"]
    for declared in dataclasses.fields(StepStats)
    if "metric" in declared.metadata
}
RECORDED: tuple[Metric, ...] = tuple(_METRICS.values())
"""Every metric that a record carries, in the order of declaration."""

_COUNTERS = [name for name, metric in _METRICS.items() if metric.kind is not Kind.GAUGE]
_GAUGES = [name for name, metric in _METRICS.items() if metric.kind is Kind.GAUGE]
_SINGLE = [name for name in _COUNTERS if _METRICS[name].slots == 1]
_SEVERAL = [name for name in _COUNTERS if _METRICS[name].slots > 1]
_get_single = attrgetter(*_SINGLE)
_get_several = attrgetter(*_SEVERAL)
_get_gauges = attrgetter(*_GAUGES)

COUNTER_SLOTS = sum(_METRICS[name].slots for name in _COUNTERS)
_SLOTS = COUNTER_SLOTS + len(_GAUGES)
_MAGIC = b"kdst"
LAYOUT = zlib.crc32(repr([_METRICS[name] for name in (*_SINGLE, *_SEVERAL, *_GAUGES)]).encode())
"""Digest of the numbers' order: what was written under another one means something else."""
_PACKED = struct.Struct(f"<4sIIIQQQ{_SLOTS}d")
assert _PACKED.size <= MAX_RECORD, f"a record would take {_PACKED.size} bytes"  # noqa: S101  found at the first import


def _slices() -> dict[str, slice]:
    found, start = {}, 0
    for name in (*_SINGLE, *_SEVERAL):
        found[_METRICS[name].name] = slice(start, start + _METRICS[name].slots)
        start += _METRICS[name].slots
    return found


SLOTS: dict[str, slice] = _slices()
"""Where a counter's or histogram's numbers stand in `Record.counters`, by the metric's name."""
GAUGES: dict[str, int] = {_METRICS[name].name: index for index, name in enumerate(_GAUGES)}
"""Where a gauge stands in `Record.gauges`, by the metric's name."""


class MalformedRecordError(ValueError):
    """A datagram that no rank of this version sent."""


@dataclass(frozen=True, slots=True)
class Record:
    """One datagram, unpacked."""

    rank: int
    generation: int
    sequence: int
    started_ns: int
    counters: tuple[float, ...]
    gauges: tuple[float | None, ...]


def pack(stats: StepStats) -> bytes:
    """The next record of `stats`: its sequence number goes up by one."""
    stats.sequence += 1
    gauges = _get_gauges(stats)
    numbers = list(_get_single(stats))
    for several in _get_several(stats):
        numbers += several
    present = 0
    for index, value in enumerate(gauges):
        if value is None:
            numbers.append(0.0)
        else:
            present |= 1 << index
            numbers.append(value)
    return _PACKED.pack(
        _MAGIC,
        LAYOUT,
        stats.rank,
        present,
        stats.generation,
        stats.sequence,
        stats.started_ns,
        *numbers,
    )


def unpack(datagram: bytes) -> Record:
    """The record in a datagram. Raises `MalformedRecordError`."""
    if len(datagram) != _PACKED.size:
        raise MalformedRecordError(f"{len(datagram)} bytes, not {_PACKED.size}")
    magic, layout, rank, present, generation, sequence, started_ns, *numbers = _PACKED.unpack(
        datagram
    )
    if magic != _MAGIC or layout != LAYOUT:
        raise MalformedRecordError("other magic or layout")
    counters = tuple(numbers[:COUNTER_SLOTS])
    if not math.isfinite(sum(counters)):
        raise MalformedRecordError("a counter is not finite")
    gauges = tuple(
        value if present >> index & 1 else None
        for index, value in enumerate(numbers[COUNTER_SLOTS:])
    )
    return Record(rank, generation, sequence, started_ns, counters, gauges)
