"""The logs that are kept next to the checkpoints. Free of torch: agents write them, and agents and
the command line read them.

`logs/node-0/g00003-0001.log` is the first part of what node 0 has written in generation 3; the
parts of a node together are no larger than the job says, so the oldest may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.storage import StoragePath

LOGS = "logs"
"""Folder next to the checkpoints."""
_NAME = re.compile(r"g(\d{5,})-(\d{4,})\.log")


class LogSegment(NamedTuple):
    """A part of a node's log, by the generation that it is of and its number, from 1."""

    generation: int
    number: int

    @property
    def name(self) -> str:
        """Name of its file."""
        return f"g{self.generation:05d}-{self.number:04d}.log"


def list_segments(folder: StoragePath) -> dict[LogSegment, int]:
    """The segments of one node, oldest first, with their sizes in bytes; none if there is no
    folder. Raises `OSError`.
    """
    found = {}
    for name, size in storage.list_files(folder).items():
        if match := _NAME.fullmatch(name):
            found[LogSegment(int(match[1]), int(match[2]))] = size
    return dict(sorted(found.items()))


def list_nodes(root: StoragePath) -> list[str]:
    """The nodes that have a folder of logs, in order of their numbers. Raises `OSError`."""
    names = [folder.name for folder in storage.list_folders(root / LOGS)]
    return sorted(names, key=lambda name: (len(name), name))


def describe(root: StoragePath) -> dict[str, Any]:
    """What there is: `generations`, oldest first, each with its number, its nodes and bytes.

    Raises `OSError`.
    """
    found: dict[int, dict[str, Any]] = {}
    for node in list_nodes(root):
        for segment, size in list_segments(root / LOGS / node).items():
            entry = found.setdefault(
                segment.generation, {"generation": segment.generation, "nodes": [], "bytes": 0}
            )
            if node not in entry["nodes"]:
                entry["nodes"].append(node)
            entry["bytes"] += size
    return {"folder": str(root), "generations": [found[number] for number in sorted(found)]}


def read(root: StoragePath, node: str, *, generation: int | None = None) -> Iterator[bytes]:
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
        with suppress(FileNotFoundError):  # it was the oldest, and has gone meanwhile
            yield from map(bytes, storage.read_pieces(folder / segment.name))
