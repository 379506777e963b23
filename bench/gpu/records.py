"""Results of the parts as JSON lines, one for each attempt: the newest line of a part counts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]
"""`part`, `machine`, `commit`, `seconds`, and `figures` or `error`."""


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line, which is on the disk on return."""
    text = path.read_text() if path.exists() else ""
    whole = not text or text.endswith("\n")
    with path.open("a") as file:
        file.write(("" if whole else "\n") + json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def newest(path: Path, machine: Mapping[str, Any]) -> dict[str, Record]:
    """The newest record of each part on this machine, by the part's name.

    A line that an interrupted run left incomplete is skipped. Lines of other machines and versions
    are too, since a page with figures of both would compare what cannot be compared.
    """
    found: dict[str, Record] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("machine") == machine:
            found[record["part"]] = record
    return found


def is_done(path: Path, part: str, machine: Mapping[str, Any]) -> bool:
    """Whether the newest attempt at a part on this machine has figures."""
    return "figures" in newest(path, machine).get(part, {})
