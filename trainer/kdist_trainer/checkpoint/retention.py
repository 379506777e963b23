"""Which checkpoints are kept. Free of torch.

The newest `keep` stay, and the one that LATEST names stays whatever its age. What did not verify is evidence and stays too,
the newest few of it. Litter of saves that were cut short goes, unless a later epoch's writer may be at work on it.
"""

from __future__ import annotations

import time
from contextlib import suppress

from kdist_trainer.checkpoint import files
from kdist_trainer.checkpoint.layout import Checkpoint, CheckpointDirectory
from kdist_trainer.checkpoint.lock import Lock

KEEP_DAMAGED = 3
OLD_SECONDS = 3600


def prune(directory: CheckpointDirectory, lock: Lock, *, keep: int) -> None:
    """Remove what need not be kept; called by the holder of the lock after a commit. Never raises `OSError`."""
    with suppress(OSError):
        committed = directory.committed()
        valid = lock.valid(committed)
        named = directory.named()
        kept = {one.path for one in valid[:keep]} | {one.path for one in committed if one.name == named}
        for one in committed:
            if one.path not in kept:
                _discard(one)
        for one in directory.damaged()[KEEP_DAMAGED:]:
            files.remove_tree(one.path)


def sweep(directory: CheckpointDirectory, *, epoch: int) -> None:
    """Remove the litter of all epochs before this one, and of this one: called before its first save. Never raises `OSError`."""
    with suppress(OSError):
        for one in directory.temporary():
            if one.epoch <= epoch:
                files.remove_tree(one.path)
        for path in directory.loose_files():
            if time.time() - path.stat().st_mtime > OLD_SECONDS:  # a younger one may be in use this moment
                files.remove(path)


def set_aside(checkpoint: Checkpoint) -> None:
    """Keep a damaged checkpoint as evidence, out of the way of whoever looks for one to load. Raises `OSError`."""
    target = checkpoint.path.with_name(f"{checkpoint.name}.damaged")
    number = 1
    while target.exists():
        number += 1
        target = checkpoint.path.with_name(f"{checkpoint.name}.damaged-{number}")
    files.rename(checkpoint.path, target)
    files.sync_folder(target.parent)


def _discard(checkpoint: Checkpoint) -> None:
    """Take the committed name away first: a crash in the middle must not leave half a checkpoint under it."""
    with suppress(OSError):
        litter = checkpoint.path.with_name(f"{checkpoint.name}.tmp-pruned")
        files.remove_tree(litter)
        files.rename(checkpoint.path, litter)
        files.sync_folder(litter.parent)
        files.remove_tree(litter)
