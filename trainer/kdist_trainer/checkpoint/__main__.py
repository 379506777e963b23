"""`python -m kdist_trainer.checkpoint`: looks into a checkpoint folder from inside a pod or beside `kdist run`; JSON on stdout.

Exit codes: 0 answered, 1 some checkpoint does not verify, 2 usage, 74 the disk did not answer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kdist_trainer.checkpoint import listing

_DISK = 74


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer one question about a folder; returns the exit code."""
    given = _parser().parse_args(arguments)
    try:
        document = _answer(given)
    except OSError as error:
        sys.stderr.write(f"{given.folder}: {error.strerror or error}\n")
        return _DISK
    sys.stdout.write(json.dumps(document, separators=(",", ":")) + "\n")
    bad = any(entry["state"] == "damaged" for entry in document.get("checkpoints", ()))
    return 1 if given.question == "verify" and bad else 0


def _answer(given: argparse.Namespace) -> dict[str, Any]:
    if given.question == "ledger":
        return listing.read_ledger(given.folder)
    if given.question == "aside":
        target = listing.put_aside(given.folder)
        return {"folder": str(given.folder), "moved": str(target) if target else None}
    return listing.describe(given.folder, verify=given.question == "verify", only=given.name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kdist_trainer.checkpoint", description=__doc__)
    parser.add_argument(
        "question",
        choices=["list", "verify", "ledger", "aside"],
        help="list the checkpoints, verify every byte of them, show the run's ledger, or put the folder aside",
    )
    parser.add_argument("folder", type=Path, help="folder of a run's checkpoints")
    parser.add_argument("--name", default="", help="the one checkpoint to look at")
    return parser


if __name__ == "__main__":
    sys.exit(main())
