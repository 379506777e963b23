"""The agents of a run on this machine, asked from outside: which are at work, and what they answer."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
from pathlib import Path

from kdist.local import folder
from kdist.steer.readings import Reading

_MOST_BYTES = 4 << 20


def find_run(name: str) -> Path | None:
    """The run folder that NAME means: a job of `.kdist` (or `$KDIST_HOME`), or a path to one; None if there is none.

    A path to a folder of checkpoints will do too.
    """
    if os.sep not in name:
        root = folder.home() / name
        return root if (root / "run.json").is_file() else None
    root = Path(name).absolute()
    known = (root / "run.json").is_file() or (root / "ledger").is_dir() or any(root.glob("step-*"))
    return root if known else None


def is_at_work(root: Path) -> bool:
    """Whether a `kdist run` holds the folder."""
    try:
        lock = os.open(root / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(lock)


def read(root: Path, *, metrics: bool = False) -> dict[str, Reading]:
    """What each agent that is at work says, by its node."""
    found = {}
    for node, port in ports(root).items() if is_at_work(root) else ():
        status = ask(port, "/status")
        if status is None:
            continue
        page = ask(port, "/metrics") if metrics else b""
        with contextlib.suppress(ValueError):
            document = json.loads(status)
            found[node] = Reading(document if isinstance(document, dict) else {}, (page or b"").decode(errors="replace"))
    return found


def ports(root: Path) -> dict[str, int]:
    """Port of each agent by its node, as the agents wrote them down."""
    found = {}
    for scratch in sorted(root.glob("node-*")):
        note = folder.read_json(scratch / "agent.json")
        if note and isinstance(note.get("port"), int):
            found[scratch.name] = int(note["port"])
    return found


def ask(port: int, path: str, *, timeout: float = 2.0) -> bytes | None:
    """What an agent on this machine answers to `GET path`, None if it does not. Seconds."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.read(_MOST_BYTES) if response.status == 200 else None
    except (OSError, OverflowError, http.client.HTTPException):
        return None
    finally:
        connection.close()
