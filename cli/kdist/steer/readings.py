"""What the agents of a job say at one moment, and the rows that two such moments give. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kdist.steer import anatomy
from kdist.steer.anatomy import Counts, Row
from kdist.steer.exposition import Sample, parse


@dataclass(frozen=True)
class Reading:
    """One agent's answers: its `/status` document, and its metrics as text. Empty where it did not answer."""

    status: Mapping[str, Any] = field(default_factory=dict)
    metrics: str = ""

    def samples(self) -> list[Sample]:
        """The metrics as samples."""
        return list(parse(self.metrics))

    @property
    def ranks(self) -> dict[int, Mapping[str, Any]]:
        """What `/status` says of each rank."""
        found = self.status.get("ranks")
        entries = [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []
        return {one["rank"]: one for one in entries if isinstance(one.get("rank"), int)}


def rows(now: Mapping[str, Reading], before: Mapping[str, Reading] | None = None) -> list[Row]:
    """One row per rank, over the time since `before`, or over the life of the agents. Ranks of the newest generation only."""
    newest = max((_generation(one) for one in now.values()), default=0)
    found = []
    for owner, reading in now.items():
        if _generation(reading) != newest:
            continue
        earlier = before.get(owner) if before else None
        old = anatomy.count(earlier.samples()) if earlier and _generation(earlier) == newest else {}
        new = anatomy.count(reading.samples())
        for rank in sorted({*new, *reading.ranks}):
            done = new.get(rank, Counts()).since(old[rank]) if rank in old else new.get(rank, Counts())
            found.append(anatomy.row(rank, owner, done, reading.ranks.get(rank, {})))
    return anatomy.mark_slow(found)


def select(now: Mapping[str, Reading], rank: int) -> dict[str, Reading]:
    """The readings of the agent that has this rank."""
    return {owner: reading for owner, reading in now.items() if rank in reading.ranks}


def first(now: Mapping[str, Reading], name: str) -> Any:
    """What the agents say of the job under this name: the one with rank 0 first, then any that knows it."""
    ordered = sorted(now.values(), key=lambda reading: min(reading.ranks, default=1 << 30))
    return next((reading.status[name] for reading in ordered if reading.status.get(name) is not None), None)


def samples_per_second(now: Mapping[str, Reading]) -> float | None:
    """Of the whole job: each agent says what its own ranks do."""
    rates = [rate for one in now.values() if isinstance(rate := one.status.get("samples_per_second"), int | float)]
    return sum(rates) if rates else None


def _generation(reading: Reading) -> int:
    found = reading.status.get("generation")
    return found if isinstance(found, int) else 0
