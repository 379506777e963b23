"""The result of a bench: read from the events of its ranks, and formatted as text, a table or a
document.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kdist.events import parse
from kdist.units import count, rate, size
from kdist_trainer.formats import CLI_API_VERSION

COLUMNS = ("SIZE", "ROUNDS", "MEAN", "P50", "P90", "P99", "ALGBW", "BUSBW", "WRONG")
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
    """The node of each rank."""
    pair_size: int | None = None
    pairs: list[list[float | None]] = field(default_factory=list)
    """Seconds of a message of `pair_size` between two ranks."""
    slow: dict[str, Any] | None = None
    done: bool = False

    @property
    def wrong(self) -> int:
        return sum(row["wrong"] for row in self.rows)

    def to_document(self) -> dict[str, Any]:
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
            "apiVersion": CLI_API_VERSION,
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
        best = max((row["busbw"] for row in self.rows if row["busbw"] is not None), default=None)
        top = f": bus bandwidth up to {rate(best)}" if best is not None else ""
        nodes = len(set(self.nodes)) or 1
        where = f"{count(self.ranks, 'rank')} on {count(nodes, 'node')}"
        return f"{self.collective} among {where} ({self.device}, {self.backend}){top}"

    def describe_pairs(self) -> str:
        """Which rank or pair of ranks is slower than the others; empty without measured pairs."""
        if not self.pairs:
            return ""
        if self.slow is None:
            return (
                "no pair of ranks is slower than the others; a message of "
                f"{size(self.pair_size)} takes {self._median()}"
            )
        ranks, nodes = self.slow["ranks"], self.slow["nodes"]
        slow = " and ".join(
            f"rank {rank} ({node})" for rank, node in zip(ranks, nodes, strict=True)
        )
        pair = "the pair " if len(ranks) > 1 else ""
        ratio = f"{self.slow['ratio']:.1f} times the median of the others"
        return (
            f"slow: {pair}{slow}: {size(self.pair_size)} take "
            f"{duration(self.slow['seconds'])}, {ratio}"
        )

    def _median(self) -> str:
        times = sorted(value for row in self.pairs for value in row if value is not None)
        return duration(times[len(times) // 2]) if times else "-"


def duration(seconds: float) -> str:
    """Seconds as text with three digits: 81.4 µs, 1.25 ms, 2.07 s."""
    for unit, name in ((1e-6, "µs"), (1e-3, "ms")):
        if seconds < 999.5 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"


def read_events(lines: Iterable[str]) -> Result:
    """The result from the events in these lines of a log; other lines are ignored."""
    result = Result()
    for line in lines:
        event = parse(line)
        if event is not None:
            with suppress(KeyError, TypeError, ValueError):
                name = event.get("event")
                if name == "bench-begun":
                    result.collective, result.ranks = str(event["collective"]), int(event["ranks"])
                    result.device, result.backend = str(event["device"]), str(event["backend"])
                elif name == "bench-row":
                    row: dict[str, Any] = {key: float(event[key]) for key in _TIMES}
                    row |= {key: int(event[key]) for key in ("size", "rounds", "wrong")}
                    row |= {
                        key: None if event.get(key) is None else float(event[key])
                        for key in ("algbw", "busbw")
                    }
                    result.rows.append(row)
                elif name == "bench-pairs":
                    result.pair_size = int(event["size"])
                    result.nodes.append(str(event["row_node"]))
                    result.pairs.append(
                        [None if value is None else float(value) for value in event["seconds"]]
                    )
                elif name == "bench-slow":
                    slow = {
                        "ranks": [int(rank) for rank in event["ranks"]],
                        "nodes": [str(node) for node in event["nodes"]],
                    }
                    result.slow = {
                        **slow,
                        "seconds": float(event["seconds"]),
                        "ratio": float(event["ratio"]),
                    }
                elif name == "bench-done":
                    result.done = True
    return result
