"""Packs a rank's `StepStats` into one datagram of at most `MAX_RECORD` bytes, and unpacks it.

A header is followed by every number as a float64: first the counters and histograms, then the
gauges, in the order of `StepStats`. The header contains a digest of that layout, so a record of
another version is rejected, never misread.
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
"""Maximum size of a datagram in bytes."""

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
_MULTIPLE = [name for name in _COUNTERS if _METRICS[name].slots > 1]
_get_single = attrgetter(*_SINGLE)
_get_multiple = attrgetter(*_MULTIPLE)
_get_gauges = attrgetter(*_GAUGES)

COUNTER_SLOTS = sum(_METRICS[name].slots for name in _COUNTERS)
_SLOTS = COUNTER_SLOTS + len(_GAUGES)
_MAGIC = b"kdst"
LAYOUT = zlib.crc32(repr([_METRICS[name] for name in (*_SINGLE, *_MULTIPLE, *_GAUGES)]).encode())
"""Digest of the layout: numbers written under another one have another meaning."""
_PACKED = struct.Struct(f"<4sIIIQQQ{_SLOTS}d")
assert _PACKED.size <= MAX_RECORD, f"a record would take {_PACKED.size} bytes"  # noqa: S101  found at the first import


def _slices() -> dict[str, slice]:
    found, start = {}, 0
    for name in (*_SINGLE, *_MULTIPLE):
        found[_METRICS[name].name] = slice(start, start + _METRICS[name].slots)
        start += _METRICS[name].slots
    return found


SLOTS: dict[str, slice] = _slices()
"""Position of a counter's or histogram's numbers in `Record.counters`, by the metric's name."""
GAUGES: dict[str, int] = {_METRICS[name].name: index for index, name in enumerate(_GAUGES)}
"""Position of a gauge in `Record.gauges`, by the metric's name."""


class MalformedRecordError(ValueError):
    """The datagram is not a record of this version."""


@dataclass(frozen=True, slots=True)
class Record:
    """An unpacked datagram. `started_ns` is the Unix time of the rank's start in nanoseconds."""

    rank: int
    generation: int
    sequence: int
    started_ns: int
    counters: tuple[float, ...]
    gauges: tuple[float | None, ...]


def pack(stats: StepStats) -> bytes:
    """Pack the next record of `stats` and increment its sequence number."""
    stats.sequence += 1
    gauges = _get_gauges(stats)
    numbers = list(_get_single(stats))
    for values in _get_multiple(stats):
        numbers += values
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
    """Unpack a datagram. Raises `MalformedRecordError`."""
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
