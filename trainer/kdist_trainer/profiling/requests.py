"""The files by which a profile is asked for and answered. Free of torch: whoever asks need not
import it.

A request is one file in the folder of an agent; a rank there finds it, and it is gone. The answer
is a folder of the run, with `plan.json` (who records which steps) from rank 0, and of each rank a
trace and, written last, its summary.
"""

from __future__ import annotations

import json
import secrets
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MOST_STEPS = 1000
_INBOX = "profile-request.json"
_ANSWERS = "profiles"
_PLAN = "plan.json"
_KEPT = 5


@dataclass(frozen=True)
class ProfileRequest:
    """Record `steps` steps on `ranks` (empty: on all); `name` is the answer's folder."""

    name: str
    steps: int
    ranks: tuple[int, ...] = ()

    def includes(self, rank: int) -> bool:
        """Whether this rank is to record."""
        return not self.ranks or rank in self.ranks


def ask(scratch: Path, *, steps: int, ranks: tuple[int, ...] = ()) -> ProfileRequest:
    """Leave a request with the agent whose folder is `scratch`. Raises `OSError`."""
    request = ProfileRequest(secrets.token_hex(6), min(MOST_STEPS, max(1, steps)), ranks)
    _write(scratch / _INBOX, asdict(request))
    return request


def inbox(scratch: Path) -> Path:
    """Where the ranks of that agent look for a request."""
    return scratch / _INBOX


def take(path: Path) -> ProfileRequest | None:
    """The request in that inbox, which is empty afterwards; None where there is none, or none that
    can be read.
    """
    document = read(path)
    with suppress(OSError):
        path.unlink()
    try:
        steps, ranks = int(document["steps"]), tuple(int(rank) for rank in document["ranks"])
        name = str(document["name"])
    except (KeyError, TypeError, ValueError):
        return None
    return ProfileRequest(name, min(MOST_STEPS, max(1, steps)), ranks) if name.isalnum() else None


def folder_of(root: Path, name: str) -> Path:
    """Where the traces of a request lie. `root` is the folder of checkpoints, or the agent's own
    where there is none.
    """
    return root / _ANSWERS / name


def announce(
    root: Path, request: ProfileRequest, *, ranks: list[int], first: int, last: int
) -> None:
    """Say who records which steps, and let go of the oldest answers. Raises `OSError`."""
    folder = folder_of(root, request.name)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / _PLAN, {"ranks": ranks, "first": first, "last": last})
    others = sorted(
        (one for one in (root / _ANSWERS).iterdir() if one != folder),
        key=lambda one: one.stat().st_mtime,
    )
    for old in others[: -_KEPT + 1]:
        shutil.rmtree(old, ignore_errors=True)


def trace_name(rank: int) -> str:
    """File of one rank's trace."""
    return f"rank-{rank}.trace.json.gz"


def finish(folder: Path, rank: int, summary: dict[str, Any]) -> None:
    """Say that a rank's trace is whole, and what is in it. Raises `OSError`."""
    _write(folder / f"rank-{rank}.json", summary)


def look(root: Path, name: str) -> dict[str, Any]:
    """What has come of a request: the plan (empty while no rank has begun) and the summaries so
    far, by rank.
    """
    folder = folder_of(root, name)
    found = {
        path.name.split(".")[0].removeprefix("rank-"): read(path)
        for path in sorted(folder.glob("rank-*.json"))
    }
    return {
        "plan": read(folder / _PLAN),
        "ranks": {rank: summary for rank, summary in found.items() if summary},
    }


def read(path: Path) -> dict[str, Any]:
    """A small document; empty where there is none that can be read."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _write(path: Path, document: dict[str, Any]) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(json.dumps(document))
    fresh.replace(path)
