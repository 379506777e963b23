"""Which of the folders that a training writes to are full, with what is to be freed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from kdist_trainer.checkpoint.group import BoundedCalls

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - its room is looked at, nothing is written
_LITTLE_BYTES: Final = 1 << 20
_LITTLE_SHARE: Final = 0.01
_ANSWER_SECONDS: Final = 1.0
_calls: dict[Path, BoundedCalls] = {}
_asking = threading.Lock()
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB")

ADVICE: Final[Mapping[str, str]] = {
    "checkpoints": "delete old checkpoints or other files there, keep fewer "
    "(spec.train.checkpoint.keep), or use a larger volume",
    "scratch": "delete other files there, it is the folder of this agent's own files",
    "shared memory": "lower train.loader.workers, or raise spec.resources.memory, of which "
    "/dev/shm is a part",
}
"""What helps, by the use of the folder."""


def describe_full(folders: Iterable[tuple[str, object]], *, has: str = "has") -> str:
    """A sentence that names each folder without room and what helps; empty if all have room.

    Args:
        folders: The use of each, a key of `ADVICE`, and the folder. What is no folder of this
            machine, such as one of an object store, is left out.
        has: `had` in a text that is read later.
    """
    return "; ".join(filter(None, (_describe(use, folder, has=has) for use, folder in folders)))


def describe_room(use: str, folder: object) -> str:
    """A sentence about the room of a folder and what makes more; empty for one that is none."""
    return _describe(use, folder, however=True)


def _describe(use: str, folder: object, *, however: bool = False, has: str = "has") -> str:
    """The sentence if the folder is full, or `however` full it is."""
    if not isinstance(folder, Path):
        return ""
    try:
        found = _ask(folder)
    except TimeoutError:
        return f"storage: {folder} ({use}) does not answer: look at its disk or its server"
    except FileNotFoundError:
        if folder == SHARED_MEMORY:
            return ""
        return f"storage: {folder} ({use}) does not exist: it was removed, or is not mounted"
    except OSError:
        return ""
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    no_files = found.f_files > 0 and found.f_favail == 0
    if total == 0 or not (however or no_files or free < min(_LITTLE_BYTES, _LITTLE_SHARE * total)):
        return ""
    left = "no room for another file" if no_files else f"{_show(free)} free of {_show(total)}"
    return f"storage: {folder} ({use}) {has} {left}: {ADVICE[use]}"


def _ask(folder: Path) -> os.statvfs_result:
    """The room of a folder. Raises `OSError`, and `TimeoutError` if it does not answer soon."""
    with _asking:
        if folder not in _calls:
            _calls[folder] = BoundedCalls(str(folder), seconds=_ANSWER_SECONDS)
        return _calls[folder].call(lambda: os.statvfs(folder))


def _show(amount: float) -> str:
    for unit in _UNITS:
        if amount < 1024 or unit == _UNITS[-1]:
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
