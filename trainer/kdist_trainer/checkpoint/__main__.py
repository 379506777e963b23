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
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from kdist_trainer.checkpoint import listing
from kdist_trainer.checkpoint.manifest import DamagedCheckpointError
from kdist_trainer.checkpoint.storage import open_location
from kdist_trainer.errors import KdistTrainerError
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.object_store.errors import ObjectStoreError

_DISK = 74


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer one question about a folder.

    Args:
        arguments: of the command line; by default those of this process.

    Returns:
        The exit code.
    """
    given = _parser().parse_args(arguments)
    try:
        given.folder = open_location(given.folder)
    except (ValueError, ImportError) as error:
        return _fail(str(error), 2)
    try:
        if given.question == "logs":
            return _print_log(given)
        document = _answer(given)
    except ObjectStoreError as error:  # it names the object
        return _fail(str(error), _DISK)
    except OSError as error:
        return _fail(f"{error.filename or given.folder}: {error.strerror or error}", _DISK)
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
        return listing.read_ledger(given.folder)
    if given.question == "records":
        return listing.copy_records(given.folder, given.out)
    if given.question == "aside":
        target = listing.archive_run(given.folder)
        return {"folder": str(given.folder), "moved": str(target) if target else None}
    if given.question == "export":
        return _export(given)
    if given.question == "verify":
        # imported here as in `_export`
        from kdist_trainer.checkpoint.reader import read_all_values

        return listing.describe(given.folder, verify=True, read=read_all_values, only=given.name)
    return listing.describe(given.folder, only=given.name)


def _print_log(given: argparse.Namespace) -> int:
    """Print what is kept of one node's log, or without a node a description of all as JSON."""
    if not given.name:
        sys.stdout.write(encode_json(listing.describe_logs(given.folder)) + "\n")
        return 0
    for piece in listing.read_log(given.folder, given.name, generation=given.generation):
        sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()
    return 0


def _export(given: argparse.Namespace) -> dict[str, Any]:
    listing.choose(
        given.folder, given.step
    )  # a missing checkpoint is reported without the seconds that torch takes
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kdist_trainer.checkpoint", description=__doc__)
    parser.add_argument(
        "question",
        choices=["list", "verify", "ledger", "records", "aside", "export", "logs"],
        help=(
            "list the checkpoints, verify every byte and whether a training could read "
            "them, show the run's ledger, copy the ledger and "
            "DONE to a folder (records), archive the folder (aside), export the weights, or print "
            "the log of the node --name"
        ),
    )
    parser.add_argument("folder", help="folder or URL of a run's checkpoints")
    parser.add_argument("--name", default="", help="the one checkpoint to describe, or the node")
    parser.add_argument("--generation", type=int, help="logs: only this generation")
    parser.add_argument(
        "--step", type=int, help="export: the checkpoint of this step instead of the newest"
    )
    parser.add_argument(
        "--ema", action="store_true", help="export: the moving average instead of the weights"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("-"),
        help="export: the file to write, - for stdout; records: the folder",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
