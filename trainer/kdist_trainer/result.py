"""The result record of a rank, written when its work is done: an exit without one is no success."""

from __future__ import annotations

from pathlib import Path

from kdist_trainer import preallocated
from kdist_trainer.json_text import encode_json
from kdist_trainer.untrusted_text import parse_json

DONE, STOPPED = "done", "stopped"


def path_of(scratch: Path, local_rank: int) -> Path:
    """Where the rank leaves its result."""
    return scratch / f"rank-{local_rank}.result"


def write_result(outcome: str, *, scratch: Path, local_rank: int) -> None:
    """Write the outcome `done` or `stopped`, also on a full disk. Raises `OSError`."""
    preallocated.write(path_of(scratch, local_rank), encode_json({"outcome": outcome}).encode())


def read_result(scratch: Path, local_rank: int) -> str | None:
    """The outcome that a rank has written, `done` or `stopped`; None if there is none."""
    try:
        outcome = parse_json(preallocated.read(path_of(scratch, local_rank)))["outcome"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return STOPPED if outcome == STOPPED else DONE
