"""The saves that a lost rank has cut, counted over restarts by the run's events.

Two of them in a row make the next save a blocking one (`SaveClock.must_block`). A rank 0 that lives
notes that its save was cut; one that was lost has left the folder of its files, which the next
group finds. Free of torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.lock import Lock
from kdist_trainer.checkpoint.manifest import CheckpointDirectory

EVENT: Final = "save_cut"
"""Name of the event in the run's ledger."""


def record_cut(ledger: RunLedger, *, step: int, folder: str) -> None:
    """Note that the save into `folder` was cut. Never raises `OSError`: what cannot be counted only
    makes a later save wait a little longer for its turn to block.
    """
    with suppress(OSError):
        ledger.append(EVENT, step=step, folder=folder)


def record_leftovers(directory: CheckpointDirectory, lock: Lock, *, spared: Iterable[str]) -> None:
    """Note the saves whose folders are left, before these are removed. Never raises `OSError`.

    Args:
        directory: the checkpoint folder.
        lock: its lock, which says what is valid.
        spared: names of folders that are still written to.
    """
    with suppress(OSError):
        left = [one for one in directory.temporary() if one.path.name not in spared]
        if not left:
            return
        newest = lock.find_newest()
        ledger = RunLedger(directory.root)
        known = {one.get("folder") for one in ledger.events() if one["event"] == EVENT}
        for one in left:
            is_newer = newest is None or one.step > newest.step
            if is_newer and one.path.name not in known:
                record_cut(ledger, step=one.step, folder=one.path.name)


def count_cuts(events: Iterable[Mapping[str, Any]]) -> int:
    """How many saves in a row were cut since the last commit.

    Args:
        events: of the run's ledger, oldest first.
    """
    cut: set[Any] = set()
    for event in events:
        if event.get("event") == "commit":
            cut.clear()
        elif event.get("event") == EVENT:
            cut.add(event.get("folder"))
    return len(cut)
