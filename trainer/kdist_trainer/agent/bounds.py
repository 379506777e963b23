"""How many nodes the job may have now: `kdist scale` changes nodes.json, beside train.json, while agents run."""

from __future__ import annotations

from pathlib import Path

from kdist_trainer import log
from kdist_trainer.config import NODES, Nodes, TrainConfig


class Bounds:
    """`nodes` of the train.json at `path`, read anew when the file has changed; what it was before, if it cannot be read."""

    def __init__(self, path: Path, first: Nodes) -> None:
        self._path = path
        self._file = path.with_name(NODES) if path.with_name(NODES).exists() else path
        self._last = first
        self._seen = _look(self._file)

    def now(self) -> Nodes:
        """The bounds as the file has them."""
        seen = _look(self._file)
        if seen is None or seen == self._seen:
            return self._last
        self._seen = seen
        try:
            nodes = TrainConfig.read(self._path).nodes
        except (OSError, ValueError) as error:
            log.warn("bounds-unreadable", message=f"{self._file} has changed and cannot be read: {error}")
            return self._last
        if nodes != self._last:
            log.event("bounds-changed", min=nodes.min, max=nodes.max)
            self._last = nodes
        return nodes


def _look(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
