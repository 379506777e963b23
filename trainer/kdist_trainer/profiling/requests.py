"""The files by which a profile is requested and answered. Free of torch, which is slow to import.

A request is a file in the folder of an agent, which a rank reads and removes. The answer is a
folder of the run with `plan.json` (which ranks record which steps), written by rank 0, and for each
rank a trace and, written last, its summary.
"""

from __future__ import annotations

import secrets
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import MalformedTextError, parse_json

MAX_STEPS = 1000
_INBOX = "profile-request.json"
_ANSWERS = "profiles"
_PLAN = "plan.json"
_KEPT = 5


@dataclass(frozen=True)
class ProfileRequest:
    """A request for a profile."""

    name: str
    """Of the answer's folder."""
    steps: int
    ranks: tuple[int, ...] = ()
    """The ranks that record; empty for all."""


def write_request(scratch: Path, *, steps: int, ranks: tuple[int, ...] = ()) -> ProfileRequest:
    """Write a request for the agent whose folder is `scratch`, of at most `MAX_STEPS` steps. Raises
    `OSError`.
    """
    request = ProfileRequest(secrets.token_hex(6), min(MAX_STEPS, max(1, steps)), ranks)
    _write(scratch / _INBOX, asdict(request))
    return request


def inbox(scratch: Path) -> Path:
    """File in which the agent's ranks find a request."""
    return scratch / _INBOX


def take(path: Path) -> ProfileRequest | None:
    """Read and remove the request in an inbox; None if there is none that can be read."""
    document = read(path)
    with suppress(OSError):
        path.unlink()
    try:
        steps, ranks = int(document["steps"]), tuple(int(rank) for rank in document["ranks"])
        name = str(document["name"])
    except (KeyError, TypeError, ValueError):
        return None
    return ProfileRequest(name, min(MAX_STEPS, max(1, steps)), ranks) if name.isalnum() else None


def folder_of(root: Path, name: str) -> Path:
    """Folder of the traces of a request; `root` is the checkpoint folder or, without one, the
    agent's.
    """
    return root / _ANSWERS / name


def write_plan(
    root: Path, request: ProfileRequest, *, ranks: list[int], first: int, last: int
) -> None:
    """Write which ranks record which steps, and remove the oldest profiles. Raises `OSError`."""
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


def write_summary(folder: Path, rank: int, summary: dict[str, Any]) -> None:
    """Write the summary of a rank's complete trace. Raises `OSError`."""
    _write(folder / f"rank-{rank}.json", summary)


def read_progress(root: Path, name: str) -> dict[str, Any]:
    """The state of a request: its plan (empty until the ranks start) and the summaries that are
    complete, by rank.
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
    """Read a small JSON document; empty if there is none that can be read."""
    try:
        document = parse_json(path.read_bytes())
    except (OSError, MalformedTextError):
        return {}
    return document if isinstance(document, dict) else {}


def _write(path: Path, document: dict[str, Any]) -> None:
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(encode_json(document))
    temporary.replace(path)
