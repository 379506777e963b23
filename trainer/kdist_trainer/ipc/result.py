"""The result record of a rank, written when its work is done: an exit without one is no success."""

from __future__ import annotations

from pathlib import Path

from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import parse_json
from kdist_trainer.processes import preallocated

DONE, STOPPED = "done", "stopped"
_MOST_BYTES = 4096


def path_of(scratch: Path, local_rank: int) -> Path:
    """Where the rank leaves its result."""
    return scratch / f"rank-{local_rank}.result"


def left_path(scratch: Path, local_rank: int) -> Path:
    """Where the rank of a script leaves the line that ended it with exit code 0."""
    return scratch / f"rank-{local_rank}.left"


def read_left(scratch: Path, local_rank: int) -> str | None:
    """The line, in a traceback's form; None if the script ran to its end, or it is not known."""
    try:
        return left_path(scratch, local_rank).read_bytes()[:_MOST_BYTES].decode() or None
    except (OSError, ValueError):
        return None


def write_result(outcome: str, scratch: Path, local_rank: int) -> None:
    """Write the outcome `done` or `stopped`, also on a full disk. Raises `OSError`."""
    preallocated.write(path_of(scratch, local_rank), encode_json({"outcome": outcome}).encode())


def read_result(scratch: Path, local_rank: int) -> str | None:
    """The outcome that a rank has written, `done` or `stopped`; None if there is none."""
    try:
        outcome = parse_json(preallocated.read(path_of(scratch, local_rank)))["outcome"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return STOPPED if outcome == STOPPED else DONE
