"""The table of `kdist top`: the breakdown of each rank's step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kdist.agents import metrics
from kdist.agents.metrics import AgentSample, RankBreakdown
from kdist.units import camel_case, number, or_dash, seconds
from kdist_trainer.formats import CLI_API_VERSION

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
    "COMM WAIT",
    "OPTIMIZER",
    "CHECKPOINT",
    "",
)
_MAX_ROWS = 64


def cells(row: RankBreakdown) -> tuple[str, ...]:
    """Format the row of one rank, under `HEADER`.

    COLLECTIVES is the time during which a collective ran, COMM WAIT the part of it that did not
    overlap with computation.
    """
    return (
        str(row.rank),
        row.pod,
        row.state or "-",
        "-" if row.step is None else f"{row.step:,}",
        or_dash(row.step_seconds, seconds),
        or_dash(row.busy_seconds, seconds),
        or_dash(row.phases.get("data_wait"), seconds),
        or_dash(row.phases.get("forward"), seconds),
        or_dash(row.phases.get("backward"), seconds),
        or_dash(row.collective_seconds, seconds),
        or_dash(row.phases.get("comm_exposed"), seconds),
        or_dash(row.phases.get("optimizer"), seconds),
        or_dash(row.checkpoint, seconds),
        _flag(row),
    )


def choose(
    rows: Sequence[RankBreakdown], limit: int = _MAX_ROWS
) -> tuple[list[RankBreakdown], int]:
    """Choose the rows to show: slow ranks first, then those with the lowest numbers. Returns at
    most `limit` rows in the order of ranks, and the number of rows left out.
    """
    if len(rows) <= limit:
        return list(rows), 0
    chosen = sorted(rows, key=lambda row: (not row.slow, row.rank))[:limit]
    return sorted(chosen, key=lambda row: row.rank), len(rows) - limit


def headline(name: str, now: Mapping[str, AgentSample]) -> str:
    """Summarize the job in one line: step, loss, throughput, ranks, generation, last checkpoint."""
    parts = [name]
    step, target = metrics.first(now, "step"), metrics.first(now, "target_steps")
    if step is not None:
        parts.append(
            f"step {or_dash(step)}" + (f"/{or_dash(target)}" if target is not None else "")
        )
    if (loss := metrics.first(now, "loss")) is not None:
        parts.append(f"loss {number(loss)}")
    if (rate := metrics.samples_per_second(now)) is not None:
        parts.append(f"{number(round(rate))} samples/s")
    world = metrics.first(now, "world_size")
    generation = metrics.first(now, "generation")
    parts.append(f"{or_dash(world)} ranks, generation {or_dash(generation)}")
    saved = metrics.first(now, "last_checkpoint_step")
    parts.append(f"checkpoint {or_dash(saved)}" if saved is not None else "no checkpoint yet")
    return " · ".join(parts)


def to_document(
    name: str, now: Mapping[str, AgentSample], rows: Sequence[RankBreakdown]
) -> dict[str, Any]:
    """Return the table for programs."""
    names = (
        "step",
        "target_steps",
        "loss",
        "samples_per_second",
        "world_size",
        "generation",
        "last_checkpoint_step",
    )
    values = {camel_case(each): metrics.first(now, each) for each in names} | {
        "samplesPerSecond": metrics.samples_per_second(now)
    }
    return {
        "apiVersion": CLI_API_VERSION,
        "kind": "Top",
        "job": name,
        **values,
        "ranks": [row.to_document() for row in rows],
    }


def _flag(row: RankBreakdown) -> str:
    if row.slow:
        return "SLOW"
    age = row.heartbeat_age
    return (
        f"silent for {seconds(age)}" if age is not None and age > metrics.MAX_HEARTBEAT_AGE else ""
    )
