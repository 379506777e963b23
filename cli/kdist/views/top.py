"""The rows of `kdist top` as text: each rank's step, laid open. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kdist import agent_metrics
from kdist.agent_metrics import AgentSample, RankBreakdown
from kdist.units import number, seconds

HEADER = (
    "RANK",
    "POD",
    "STATE",
    "STEP",
    "STEP TIME",
    "BUSY",
    "DATA",
    "FORWARD",
    "BACKWARD",
    "COLLECTIVES",
    "WAIT",
    "OPTIMIZER",
    "CHECKPOINT",
    "",
)
_MOST_ROWS = 64


def cells(row: RankBreakdown) -> tuple[str, ...]:
    """One rank. COLLECTIVES is the time with one under way, WAIT the part of it that nothing
    hides.
    """
    part = row.phases
    return (
        str(row.rank),
        row.pod,
        row.state or "-",
        "-" if row.step is None else f"{row.step:,}",
        _time(row.seconds),
        _time(row.busy),
        _time(part.get("data_wait")),
        _time(part.get("forward")),
        _time(part.get("backward")),
        _time(row.exchange),
        _time(part.get("comm_exposed")),
        _time(part.get("optimizer")),
        _time(row.checkpoint),
        _mark(row),
    )


def choose(
    rows: Sequence[RankBreakdown], most: int = _MOST_ROWS
) -> tuple[list[RankBreakdown], int]:
    """The rows to show, and how many are left out: of very many, the slow ones and the first."""
    if len(rows) <= most:
        return list(rows), 0
    ranked = sorted(rows, key=lambda row: (not row.slow, row.rank))[:most]
    return sorted(ranked, key=lambda row: row.rank), len(rows) - most


def headline(name: str, now: Mapping[str, AgentSample]) -> str:
    """The job in one line: step, loss, throughput, ranks, restarts, last checkpoint."""
    parts = [name]
    step, target = agent_metrics.first(now, "step"), agent_metrics.first(now, "target_steps")
    if step is not None:
        parts.append(f"step {_count(step)}" + (f"/{_count(target)}" if target is not None else ""))
    if (loss := agent_metrics.first(now, "loss")) is not None:
        parts.append(f"loss {number(loss)}")
    if (rate := agent_metrics.samples_per_second(now)) is not None:
        parts.append(f"{number(round(rate))} samples/s")
    world, generation = (
        agent_metrics.first(now, "world_size"),
        agent_metrics.first(now, "generation"),
    )
    parts.append(f"{_count(world)} ranks, generation {_count(generation)}")
    saved = agent_metrics.first(now, "last_checkpoint_step")
    parts.append(f"checkpoint {_count(saved)}" if saved is not None else "no checkpoint yet")
    return " · ".join(parts)


def to_document(
    name: str, now: Mapping[str, AgentSample], rows: Sequence[RankBreakdown]
) -> dict[str, Any]:
    """The grid for programs."""
    names = (
        "step",
        "target_steps",
        "loss",
        "samples_per_second",
        "world_size",
        "generation",
        "last_checkpoint_step",
    )
    facts = {_camel(each): agent_metrics.first(now, each) for each in names} | {
        "samplesPerSecond": agent_metrics.samples_per_second(now)
    }
    return {
        "apiVersion": "cli.kdist.dev/v1",
        "kind": "Top",
        "job": name,
        **facts,
        "ranks": [row.to_document() for row in rows],
    }


def _mark(row: RankBreakdown) -> str:
    if row.slow:
        return "SLOW"
    return (
        f"silent for {seconds(row.silence)}" if row.silence is not None and row.silence > 10 else ""
    )


def _time(value: float | None) -> str:
    return "-" if value is None else seconds(value)


def _count(value: object) -> str:
    return number(value) if value is not None else "-"


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)
