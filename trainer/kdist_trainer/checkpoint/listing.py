"""Answers about a checkpoint folder as plain values: its checkpoints, the run's records, and the
logs kept next to them. Free of torch: agents and the command line use it.

A checkpoint whose manifest matches its files' names and sizes is *complete*; *verified* if every
byte matches the digests too. Which one a training resumes from follows the rules of the restore:
the lock's fences decide, and not LATEST. *Unreadable* is one whose bytes are as they were written,
and which no training can read.

Agents write the logs: `logs/node-0/g00003-0001.log` is the first segment of what node 0 has written
in generation 3. The segments of a node are bounded together, so the oldest may be missing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.ledger import EVENTS, FOLDER, STEPS, RunLedger
from kdist_trainer.checkpoint.lock import Lock
from kdist_trainer.checkpoint.manifest import (
    MANIFEST,
    Checkpoint,
    CheckpointDirectory,
    DamagedCheckpointError,
    Manifest,
    UnsupportedCheckpointError,
    check_digests,
    read_manifest,
)
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.errors import CheckpointMismatchError
from kdist_trainer.formats.json_text import encode_json

Entry = dict[str, Any]


ReadCheck = Callable[[StoragePath], object]
"""Reads what a training would of a checkpoint; raises `DamagedCheckpointError` if it cannot."""


def describe(
    root: StoragePath, *, verify: bool = False, read: ReadCheck | None = None, only: str = ""
) -> dict[str, Any]:
    """Describe a folder: its checkpoints, newest first, which is the latest, DONE, and which one a
    training would resume from.

    Args:
        root: the folder; a missing one is empty.
        verify: read every file of the committed checkpoints and compare its digest, which may take
            long.
        read: with `verify`, called with each checkpoint whose bytes match.
        only: name of the one checkpoint to describe; empty for all.

    Raises:
        OSError: the disk failed.
    """
    directory, lock = CheckpointDirectory(root), Lock(root)
    committed = directory.committed()
    valid = [one.name for one in lock.find_valid()]
    entries = [
        _entry(one, verify=verify, valid=one.name in valid, read=read)
        for one in committed
        if only in ("", one.name)
    ]
    entries += [
        _other(one, "damaged") for one in directory.damaged() if only in ("", one.path.name)
    ]
    entries += [
        _other(one, "unfinished") for one in directory.temporary() if only in ("", one.path.name)
    ]
    # an unsupported one is not skipped: the training refuses to start
    newest = next(
        (one for one in entries if one["state"] in ("complete", "verified", "unsupported")), None
    )
    resumed = newest["name"] if newest is not None and newest["state"] != "unsupported" else None
    claim = lock.last()
    return {
        "folder": str(root),
        "exists": root.is_dir(),
        "runId": claim.run_id if claim else None,
        "latest": next(iter(valid), None),
        "resumesFrom": resumed if only == "" else None,
        "done": directory.done(),
        "time": round(time.time(), 3),
        "checkpoints": entries,
    }


def _entry(one: Checkpoint, *, verify: bool, valid: bool, read: ReadCheck | None) -> Entry:
    """Describe a committed checkpoint: complete, verified, damaged, unreadable, unsupported (intact
    as far as its manifest says, but of another version), or superseded (committed after its writer
    had lost the lock).
    """
    entry, is_intact = _bare(one), False
    try:
        manifest = read_manifest(one.path)
        entry |= _facts(manifest)
        if verify:
            check_digests(one.path, manifest, manifest.files)
            is_intact = True
            if read is not None:
                read(one.path)
        entry["state"] = "superseded" if not valid else "verified" if verify else "complete"
    except DamagedCheckpointError as error:
        state = "unreadable" if is_intact else "damaged"
        entry |= {"state": state, "problem": str(error)}
    except UnsupportedCheckpointError as error:
        entry |= {"state": "unsupported" if valid else "superseded", "problem": str(error)}
    return entry


def _facts(manifest: Manifest) -> Entry:
    return {
        "bytes": manifest.nbytes,
        "files": len(manifest.files),
        "samplesSeen": manifest.samples_seen,
        "worldSize": manifest.world_size,
        "runId": manifest.run_id,
        "parent": manifest.parent,
        "versions": manifest.versions,
    }


def _other(one: Checkpoint, state: str) -> Entry:
    return _bare(one) | {"name": one.path.name, "state": state}


def _bare(one: Checkpoint) -> Entry:
    written = storage.modified_at(one.path / MANIFEST) or storage.modified_at(one.path)
    return {
        "name": one.name,
        "step": one.step,
        "epoch": one.epoch,
        "time": written,
        "bytes": None,
        "files": None,
        "samplesSeen": None,
        "worldSize": None,
        "runId": None,
        "parent": None,
        "versions": {},
        "problem": None,
    }


def choose(root: StoragePath, step: int | None) -> Checkpoint:
    """Choose the newest valid checkpoint of a folder, or that of `step`.

    Raises:
        CheckpointMismatchError: there is none.
        OSError: the disk failed.
    """
    valid = Lock(root).find_valid()
    chosen = next((one for one in valid if step is None or one.step == step), None)
    if chosen is not None:
        return chosen
    available = ", ".join(str(one.step) for one in valid[:10]) or "none"
    wanted = "" if step is None else f" of step {step}"
    raise CheckpointMismatchError(
        f"there is no checkpoint{wanted} in {root}; available steps: {available}"
    )


def read_ledger(root: StoragePath, *, most_steps: int | None = None) -> dict[str, Any]:
    """Read the events and steps of the run; of very many lines successive ones are merged, into
    about `most_steps` records. Raises `OSError` or `NewerFormatError`.
    """
    ledger = RunLedger(root)
    events = ledger.events()
    return {"events": events, "steps": ledger.sum_steps(events, most=most_steps)}


def copy_records(root: StoragePath, folder: Path) -> dict[str, Any]:
    """Copy what a run has recorded, its ledger and DONE, to a folder on a disk.

    Args:
        root: the folder of its checkpoints.
        folder: where they are copied to; what is there is replaced.

    Returns:
        The document in DONE as `done`.

    Raises:
        OSError: the storage failed.
    """
    ledger = RunLedger(root)
    done = CheckpointDirectory(root).read_done()
    events = ledger.events()
    text = "".join(encode_json(line, separators=(",", ":")) + "\n" for line in events)
    storage.make_folder(folder / FOLDER, durable=True)
    storage.replace(folder / FOLDER / EVENTS, text.encode())
    ledger.copy_steps(folder / FOLDER / STEPS)
    copy = CheckpointDirectory(folder)
    if done is None:
        copy.remove_done()
    else:
        copy.write_done(done)
    return {"folder": str(folder), "done": done}


def archive_run(root: StoragePath) -> StoragePath | None:
    """Rename the folder of a run that is not running, so that the next run starts from scratch.

    Returns:
        The new path; None if there was no folder.

    Raises:
        OSError: the disk failed.
    """
    if not root.is_dir():
        return None
    stamp, number = time.strftime("%Y%m%d-%H%M%S", time.gmtime()), 1
    target = root.with_name(f"{root.name}.{stamp}")
    while target.is_dir():
        number += 1
        target = root.with_name(f"{root.name}.{stamp}-{number}")
    storage.move_tree(root, target)
    return target


LOGS = "logs"
"""Folder next to the checkpoints."""
_NAME = re.compile(r"g(\d{5,})-(\d{4,})\.log")


class LogSegment(NamedTuple):
    """A part of a node's log, by the generation that it is of and its number, from 1."""

    generation: int
    number: int

    @property
    def name(self) -> str:
        """Name of its file."""
        return f"g{self.generation:05d}-{self.number:04d}.log"


def list_segments(folder: StoragePath) -> dict[LogSegment, int]:
    """The segments of one node, oldest first, with their sizes in bytes; none if there is no
    folder. Raises `OSError`.
    """
    found = {}
    for name, size in storage.list_files(folder).items():
        if match := _NAME.fullmatch(name):
            found[LogSegment(int(match[1]), int(match[2]))] = size
    return dict(sorted(found.items()))


def list_nodes(root: StoragePath) -> list[str]:
    """The nodes that have a folder of logs, in order of their numbers. Raises `OSError`."""
    names = [folder.name for folder in storage.list_folders(root / LOGS)]
    return sorted(names, key=lambda name: (len(name), name))


def describe_logs(root: StoragePath) -> dict[str, Any]:
    """What there is: `generations`, oldest first, each with its number, its nodes and bytes.

    Raises `OSError`.
    """
    found: dict[int, dict[str, Any]] = {}
    for node in list_nodes(root):
        for segment, size in list_segments(root / LOGS / node).items():
            entry = found.setdefault(
                segment.generation, {"generation": segment.generation, "nodes": [], "bytes": 0}
            )
            if node not in entry["nodes"]:
                entry["nodes"].append(node)
            entry["bytes"] += size
    return {"folder": str(root), "generations": [found[number] for number in sorted(found)]}


def read_log(root: StoragePath, node: str, *, generation: int | None = None) -> Iterator[bytes]:
    """Yield what a node has written, in pieces.

    Args:
        root: the folder of the checkpoints.
        node: the node.
        generation: only that of one generation; None for all.

    Raises:
        OSError: the disk failed.
    """
    folder = root / LOGS / node
    for segment in list_segments(folder):
        if generation not in (None, segment.generation):
            continue
        with suppress(FileNotFoundError):  # it was the oldest, and has gone meanwhile
            yield from map(bytes, storage.read_pieces(folder / segment.name))
