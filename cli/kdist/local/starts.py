"""When the agents of a run on this machine had started: each says in its log that it begins to look for the others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

_FIRST_WORD = b'"rendezvous-started"'

Life = tuple[float, float | None]


def starts(root: Path, lives: Sequence[Life]) -> Iterator[tuple[float, float]]:
    """For each life of the run, and each node in it: when the life began, and when the node's agent was up; unix times."""
    for log in sorted(root.glob("node-*/log")):
        said = list(_words(log))
        for began, ended in lives:
            inside = [at for at in said if began <= at and (ended is None or at <= ended)]
            if inside:
                yield began, inside[0]


def _words(log: Path) -> Iterator[float]:
    try:
        with log.open("rb") as lines:
            for line in lines:
                if _FIRST_WORD in line:
                    yield datetime.fromisoformat(str(json.loads(line)["time"])).timestamp()
    except (OSError, ValueError, KeyError, TypeError):
        return
