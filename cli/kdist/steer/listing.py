"""A folder's checkpoints as rows for people: which one is LATEST, which one a training would resume, and what is wrong. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdist.quantity import number, seconds, size

HEADER = ("STEP", "NAME", "AGE", "SIZE", "RANKS", "SAMPLES", "STATE", "")


def rows(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row per checkpoint, newest first, as the trainer listed them."""
    return [_row(entry, document) for entry in entries(document)]


def entries(document: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The checkpoints in a listing."""
    found = document.get("checkpoints")
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def damaged(document: Mapping[str, Any]) -> list[str]:
    """Names of committed checkpoints that do not verify."""
    return [str(one.get("name")) for one in entries(document) if one.get("state") == "damaged" and one.get("problem")]


def _row(entry: Mapping[str, Any], document: Mapping[str, Any]) -> tuple[str, ...]:
    state = str(entry.get("state"))
    problem = entry.get("problem")
    written, now = entry.get("time"), document.get("time")
    age = seconds(max(0.0, now - written)) if isinstance(written, int | float) and isinstance(now, int | float) else "-"
    return (
        _shown(entry.get("step")),
        str(entry.get("name")),
        age,
        "-" if entry.get("bytes") is None else size(entry["bytes"]),
        _shown(entry.get("worldSize")),
        _shown(entry.get("samplesSeen")),
        f"{state}: {problem}" if problem else state,
        " ".join(_marks(entry, document)),
    )


def _marks(entry: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[str]:
    if entry.get("name") == document.get("latest"):
        yield "LATEST"
    if entry.get("name") == document.get("resumesFrom"):
        yield "<- resumes here"


def _shown(value: object) -> str:
    return "-" if value is None else number(value)
