"""What a bench has found, put together from the events of its ranks, and told in words and columns.
Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kdist.units import rate, size

COLUMNS = ("SIZE", "ROUNDS", "MEAN", "P50", "P90", "P99", "ALGBW", "BUSBW", "WRONG")
_EVENT_START = '{"time"'
_TIMES = ("mean", "p50", "p90", "p99")


@dataclass
class Result:
    """One bench. Sizes in bytes, times in seconds, bandwidths in bytes per second."""

    collective: str = ""
    ranks: int = 0
    device: str = ""
    backend: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    """Of each rank."""
    pair_size: int | None = None
    pairs: list[list[float | None]] = field(default_factory=list)
    """Seconds of a message of `pair_size` between two ranks."""
    slow: dict[str, Any] | None = None
    done: bool = False

    @property
    def wrong(self) -> int:
        """Elements of results that were not right."""
        return sum(row["wrong"] for row in self.rows)

    def to_document(self) -> dict[str, Any]:
        """The result as plain values."""
        rows = [
            {
                "sizeBytes": row["size"],
                "rounds": row["rounds"],
                "seconds": {name: row[name] for name in _TIMES},
                "algbwBytesPerSecond": row["algbw"],
                "busbwBytesPerSecond": row["busbw"],
                "wrong": row["wrong"],
            }
            for row in self.rows
        ]
        pairs = {"sizeBytes": self.pair_size, "seconds": self.pairs} if self.pairs else None
        return {
            "apiVersion": "cli.kdist.dev/v1",
            "kind": "CollectiveBench",
            "collective": self.collective,
            "ranks": self.ranks,
            "nodes": self.nodes,
            "device": self.device,
            "backend": self.backend,
            "rows": rows,
            "pairs": pairs,
            "slow": self.slow,
            "wrong": self.wrong,
        }

    def table(self) -> Iterator[tuple[str, ...]]:
        """Cells under `COLUMNS`."""
        for row in self.rows:
            times = (duration(row[name]) for name in _TIMES)
            yield (
                size(row["size"]),
                str(row["rounds"]),
                *times,
                rate(row["algbw"]),
                rate(row["busbw"]),
                str(row["wrong"]),
            )

    def headline(self) -> str:
        """What was measured, and the best of it."""
        best = max((row["busbw"] for row in self.rows if row["busbw"] is not None), default=None)
        top = f": bus bandwidth up to {rate(best)}" if best is not None else ""
        nodes = len(set(self.nodes)) or 1
        where = f"{self.ranks} rank{'s' * (self.ranks != 1)} on {nodes} node{'s' * (nodes != 1)}"
        return f"{self.collective} among {where} ({self.device}, {self.backend}){top}"

    def verdict(self) -> str:
        """Who is slower than the others, if anybody is."""
        if not self.pairs:
            return ""
        if self.slow is None:
            return (
                "no pair of ranks is slower than the others; a message of "
                f"{size(self.pair_size)} takes {self._usual()}"
            )
        ranks, nodes = self.slow["ranks"], self.slow["nodes"]
        who = " and ".join(f"rank {rank} ({node})" for rank, node in zip(ranks, nodes, strict=True))
        what = "the pair " if len(ranks) > 1 else ""
        ratio = f"{self.slow['ratio']:.1f} times the median of the others"
        return (
            f"slow: {what}{who}: {size(self.pair_size)} take "
            f"{duration(self.slow['seconds'])}, {ratio}"
        )

    def _usual(self) -> str:
        known = sorted(value for row in self.pairs for value in row if value is not None)
        return duration(known[len(known) // 2]) if known else "-"


def duration(seconds: float) -> str:
    """A time of a round, with three digits: 81.4 µs, 1.25 ms, 2.07 s."""
    for unit, name in ((1e-6, "µs"), (1e-3, "ms")):
        if seconds < 999.5 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"


def read_events(lines: Iterable[str]) -> Result:
    """The result that these lines of a log tell of; whatever else stands in them is passed over."""
    result = Result()
    for line in lines:
        event = _event(line)
        if event is not None:
            try:
                _take(result, event)
            except (KeyError, TypeError, ValueError):
                continue
    return result


def _event(line: str) -> Mapping[str, Any] | None:
    start = line.find(_EVENT_START)
    if start < 0 or '"bench-' not in line:
        return None
    try:
        event = json.loads(line[start:])
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _take(result: Result, event: Mapping[str, Any]) -> None:
    name = event.get("event")
    if name == "bench-begun":
        result.collective, result.ranks = str(event["collective"]), int(event["ranks"])
        result.device, result.backend = str(event["device"]), str(event["backend"])
    elif name == "bench-row":
        row: dict[str, Any] = {key: float(event[key]) for key in _TIMES}
        row |= {key: int(event[key]) for key in ("size", "rounds", "wrong")}
        row |= {
            key: None if event.get(key) is None else float(event[key]) for key in ("algbw", "busbw")
        }
        result.rows.append(row)
    elif name == "bench-pairs":
        result.pair_size = int(event["size"])
        result.nodes.append(str(event["node"]))
        result.pairs.append([None if value is None else float(value) for value in event["seconds"]])
    elif name == "bench-slow":
        slow = {
            "ranks": [int(rank) for rank in event["ranks"]],
            "nodes": [str(node) for node in event["nodes"]],
        }
        result.slow = {**slow, "seconds": float(event["seconds"]), "ratio": float(event["ratio"])}
    elif name == "bench-done":
        result.done = True
