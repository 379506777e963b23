"""The logs that are kept next to the checkpoints. Free of torch: agents write them, and agents and
the command line read them.

`logs/node-0/g00003-0001.log` is the first part of what node 0 has written in generation 3; the
parts of a node together are no larger than the job says, so the oldest may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

LOGS = "logs"
"""Folder next to the checkpoints."""
_NAME = re.compile(r"g(\d{5,})-(\d{4,})\.log")
_READ_BYTES = 1 << 20


class LogSegment(NamedTuple):
    """A part of a node's log, by the generation that it is of and its number, from 1."""

    generation: int
    number: int

    @property
    def name(self) -> str:
        """Name of its file."""
        return f"g{self.generation:05d}-{self.number:04d}.log"


def list_segments(folder: Path) -> list[LogSegment]:
    """The segments of one node, oldest first; none if there is no folder. Raises `OSError`."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(
        LogSegment(int(match[1]), int(match[2])) for match in map(_NAME.fullmatch, names) if match
    )


def list_nodes(root: Path) -> list[str]:
    """The nodes that have a folder of logs, in order of their numbers. Raises `OSError`."""
    try:
        names = [entry.name for entry in (root / LOGS).iterdir() if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(names, key=lambda name: (len(name), name))


def describe(root: Path) -> dict[str, Any]:
    """What there is: `generations`, oldest first, each with its number, its nodes and bytes.

    Raises `OSError`.
    """
    found: dict[int, dict[str, Any]] = {}
    for node in list_nodes(root):
        folder = root / LOGS / node
        for segment in list_segments(folder):
            entry = found.setdefault(
                segment.generation, {"generation": segment.generation, "nodes": [], "bytes": 0}
            )
            if node not in entry["nodes"]:
                entry["nodes"].append(node)
            entry["bytes"] += _size(folder / segment.name)
    return {"folder": str(root), "generations": [found[number] for number in sorted(found)]}


def read(root: Path, node: str, *, generation: int | None = None) -> Iterator[bytes]:
    """Yield what a node has written, in pieces.

    Args:
        root: the folder of the checkpoints.
        node: the node.
        generation: only that of one generation; None for all.

    Raises:
        OSError: the disk failed.
    """
    folder = root / LOGS / node
    for segment in list_segments(folder):
        if generation not in (None, segment.generation):
            continue
        try:
            with (folder / segment.name).open("rb") as file:
                while piece := file.read(_READ_BYTES):
                    yield piece
        except FileNotFoundError:  # it was the oldest, and has gone meanwhile
            continue


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
