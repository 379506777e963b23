"""`python -m kdist_trainer.checkpoint`: answers questions about a checkpoint folder, in a pod or on
the machine of `kdist run`; JSON on stdout. The folder may be in an object store.

There are two exceptions: of `export --out -` the weights go to stdout and the JSON to stderr, and
`logs --name NODE` prints text.

Exit codes: 0 answered, 1 a checkpoint does not verify, cannot be read or does not exist, 2 usage,
74 the disk failed.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from kdist_trainer.checkpoint import commit, storage
from kdist_trainer.checkpoint.ledger import RunLedger, encode_lines
from kdist_trainer.checkpoint.lock import Lock
from kdist_trainer.checkpoint.manifest import (
    LOGS,
    MANIFEST,
    Checkpoint,
    CheckpointDirectory,
    DamagedCheckpointError,
    UnsupportedCheckpointError,
    check_digests,
    list_segments,
    read_manifest,
)
from kdist_trainer.checkpoint.storage import StoragePath, open_location
from kdist_trainer.errors import KdistTrainerError
from kdist_trainer.formats import EVENTS_FILE, LEDGER, STEPS_FILE
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.object_store.errors import ObjectStoreError


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer one question about a folder; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kdist_trainer.checkpoint", description=__doc__)
    add = parser.add_argument
    add(
        "question",
        choices=["list", "verify", "ledger", "records", "aside", "export", "logs"],
        help=(
            "list the checkpoints, verify every byte and whether a training could read them, show "
            "the run's ledger, copy the ledger and DONE to a folder (records), archive the folder "
            "(aside), export the weights, or print the log of the node --name"
        ),
    )
    add("folder", help="folder or URL of a run's checkpoints")
    add("--name", default="", help="the one checkpoint to describe, or the node")
    add("--generation", type=int, help="logs: only this generation")
    add("--step", type=int, help="export: the checkpoint of this step instead of the newest")
    add("--ema", action="store_true", help="export: the moving average instead of the weights")
    add(
        "--out",
        type=Path,
        default=Path("-"),
        help="export: the file to write, - for stdout; records: the folder",
    )
    given = parser.parse_args(arguments)
    try:
        given.folder = open_location(given.folder)
    except (ValueError, ImportError) as error:
        return _fail(str(error), 2)
    try:
        if given.question == "logs":
            if not given.name:
                sys.stdout.write(encode_json(describe_logs(given.folder)) + "\n")
                return 0
            for piece in read_log(given.folder, given.name, generation=given.generation):
                sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
            return 0
        document = _answer(given)
    except ObjectStoreError as error:  # it names the object
        return _fail(str(error), os.EX_IOERR)
    except OSError as error:
        return _fail(f"{error.filename or given.folder}: {error.strerror or error}", os.EX_IOERR)
    except (DamagedCheckpointError, KdistTrainerError) as error:
        return _fail(str(error), 1)
    out: TextIO = (
        sys.stderr if given.question == "export" and given.out == Path("-") else sys.stdout
    )
    out.write(encode_json(document, separators=(",", ":")) + "\n")
    states = {entry["state"] for entry in document.get("checkpoints", ())}
    bad = not states.isdisjoint({"damaged", "unreadable", "unsupported"})
    return 1 if given.question == "verify" and bad else 0


def _fail(why: str, code: int) -> int:
    sys.stderr.write(f"{why}\n")
    return code


def _answer(given: argparse.Namespace) -> dict[str, Any]:
    if given.question == "ledger":
        return read_ledger(given.folder)
    if given.question == "records":
        return copy_records(given.folder, given.out)
    if given.question == "aside":
        target = archive_run(given.folder)
        return {"folder": str(given.folder), "moved": str(target) if target else None}
    if given.question == "export":
        return _export(given)
    if given.question == "verify":
        # imported here as in `_export`
        from kdist_trainer.checkpoint.reader import read_all_values

        return describe(given.folder, verify=True, read=read_all_values, only=given.name)
    return describe(given.folder, only=given.name)


def _export(given: argparse.Namespace) -> dict[str, Any]:
    # a missing checkpoint is reported without the seconds that torch takes
    Lock(given.folder).choose(given.step)
    # otherwise a third of torch's import is spent searching for garbage, of which there is none
    gc.disable()
    # imported here because the other questions need no torch
    from kdist_trainer.checkpoint import export

    gc.freeze()
    gc.enable()
    found = export.prepare(given.folder, step=given.step, average=given.ema)
    if given.out != Path("-"):
        return export.write_file(found, given.out)
    with open(1, "wb", closefd=False) as stream:
        return found.write(stream)


Entry = dict[str, Any]
ReadCheck = Callable[[StoragePath], object]
"""Reads what a training would of a checkpoint; raises `DamagedCheckpointError` if it cannot."""


def describe(
    root: StoragePath, *, verify: bool = False, read: ReadCheck | None = None, only: str = ""
) -> dict[str, Any]:
    """Describe a folder: its checkpoints, newest first, which is the latest, DONE, and which one a
    training would resume from, by the rules of the restore: the lock's fences decide, not LATEST.

    A checkpoint whose manifest matches its files' names and sizes is *complete*; *verified* if
    every byte matches the digests too. *Unreadable* is one whose bytes are as they were written,
    and which no training can read.

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
    counting = lock.find_valid()
    valid = [one.name for one in counting]
    kept: dict[str, list[str]] = {}
    with suppress(OSError, ValueError):  # the checkpoints are listed in any case
        kept = commit.explain_kept(counting, RunLedger(root))
    entries = [
        _entry(one, verify=verify, valid=one.name in valid, read=read)
        for one in committed
        if only in ("", one.name)
    ]
    for state, found in (("damaged", directory.damaged()), ("unfinished", directory.temporary())):
        others = [one for one in found if only in ("", one.path.name)]
        entries += [_bare(one) | {"name": one.path.name, "state": state} for one in others]
    for entry in entries:
        entry["kept"] = kept.get(entry["name"], [])
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
        entry |= {
            "bytes": manifest.nbytes,
            "files": len(manifest.files),
            "samplesSeen": manifest.samples_seen,
            "worldSize": manifest.world_size,
            "runId": manifest.run_id,
            "parent": manifest.parent,
            "versions": manifest.versions,
        }
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


def read_ledger(root: StoragePath, *, most_steps: int | None = None) -> dict[str, Any]:
    """Read the events and steps of the run; of very many lines successive ones are merged, into
    about `most_steps` records. Raises `OSError` or `NewerFormatError`.
    """
    ledger = RunLedger(root)
    events = ledger.events()
    return {"events": events, "steps": ledger.sum_steps(events, most=most_steps)}


def copy_records(root: StoragePath, folder: Path) -> dict[str, Any]:
    """Copy what a run has recorded, its ledger and DONE, from the folder of its checkpoints to one
    on a disk, where it replaces what is there. Returns the document in DONE as `done`. Raises
    `OSError`.
    """
    ledger = RunLedger(root)
    done = CheckpointDirectory(root).read_done()
    events = ledger.events()
    lines = encode_lines(events)
    storage.make_folder(folder / LEDGER, durable=True)
    storage.replace(folder / LEDGER / EVENTS_FILE, lines)
    ledger.copy_steps(folder / LEDGER / STEPS_FILE)
    copy = CheckpointDirectory(folder)
    if done is None:
        copy.remove_done()
    else:
        copy.write_done(done)
    return {"folder": str(folder), "done": done}


def archive_run(root: StoragePath) -> StoragePath | None:
    """Rename the folder of a run that is not running, so that the next run starts from scratch.
    Returns the new path; None if there was no folder. Raises `OSError`.
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


def describe_logs(root: StoragePath) -> dict[str, Any]:
    """What there is: `generations`, oldest first, each with its number, its nodes and bytes.

    Raises `OSError`.
    """
    found: dict[int, dict[str, Any]] = {}
    names = [folder.name for folder in storage.list_folders(root / LOGS)]
    for node in sorted(names, key=lambda name: (len(name), name)):  # in order of their numbers
        for segment, size in list_segments(root / LOGS / node).items():
            entry = found.setdefault(
                segment.generation, {"generation": segment.generation, "nodes": [], "bytes": 0}
            )
            if node not in entry["nodes"]:
                entry["nodes"].append(node)
            entry["bytes"] += size
    return {"folder": str(root), "generations": [found[number] for number in sorted(found)]}


def read_log(root: StoragePath, node: str, *, generation: int | None = None) -> Iterator[bytes]:
    """Yield what a node has written, in pieces, of all generations or only of this one. Raises
    `OSError`.
    """
    folder = root / LOGS / node
    for segment in list_segments(folder):
        if generation not in (None, segment.generation):
            continue
        with suppress(FileNotFoundError):  # it was the oldest, and has gone meanwhile
            yield from map(bytes, storage.read_pieces(folder / segment.name))


if __name__ == "__main__":
    sys.exit(main())
