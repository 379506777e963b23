"""The result record of a rank: left once its work is over, so that an end without one is told from a success."""

from __future__ import annotations

import json
import os
from pathlib import Path

DONE, STOPPED = "done", "stopped"


def path_of(scratch: Path, local_rank: int) -> Path:
    """Where the rank leaves its result."""
    return scratch / f"rank-{local_rank}.result"


def leave(outcome: str, *, scratch: Path, local_rank: int) -> None:
    """Leave `done` or `stopped` for the agent, atomically. Raises `OSError`."""
    path = path_of(scratch, local_rank)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps({"outcome": outcome}))
    fresh.replace(path)


def read(scratch: Path, local_rank: int) -> str | None:
    """What the rank left: `done` or `stopped`, or None."""
    try:
        outcome = json.loads(path_of(scratch, local_rank).read_bytes())["outcome"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return STOPPED if outcome == STOPPED else DONE
