"""The table of checkpoints: which one is LATEST, which one a training would resume from, which
are damaged, and why each is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdist.units import age, or_dash, size

HEADER = ("STEP", "NAME", "AGE", "SIZE", "RANKS", "SAMPLES", "STATE", "")


def checkpoint_rows(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row per checkpoint of a listing, newest first."""
    return [_row(entry, document) for entry in entries(document)]


def entries(document: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The checkpoints in a listing."""
    found = document.get("checkpoints")
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def rejected(document: Mapping[str, Any], state: str) -> list[str]:
    """Names of committed checkpoints that are `damaged`, `unreadable` (whole, but no training can
    read them), or `unsupported` (of a newer version).
    """
    return [
        str(one.get("name"))
        for one in entries(document)
        if one.get("state") == state and one.get("problem")
    ]


def _row(entry: Mapping[str, Any], document: Mapping[str, Any]) -> tuple[str, ...]:
    state = str(entry.get("state"))
    problem = entry.get("problem")
    written, now = entry.get("time"), document.get("time")
    since = (
        age(max(0.0, now - written))
        if isinstance(written, int | float) and isinstance(now, int | float)
        else "-"
    )
    return (
        or_dash(entry.get("step")),
        str(entry.get("name")),
        since,
        or_dash(entry.get("bytes"), size),
        or_dash(entry.get("worldSize")),
        or_dash(entry.get("samplesSeen")),
        f"{state}: {problem}" if problem else state,
        " ".join(_marks(entry, document)),
    )


def _marks(entry: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[str]:
    if entry.get("name") == document.get("latest"):
        yield "LATEST"
    if entry.get("name") == document.get("resumesFrom"):
        yield "<- resumes here"
    if reasons := entry.get("kept"):
        yield f"kept: {', '.join(map(str, reasons))}"
