"""`python -m kdist_trainer.profiling`: requests a profile from the ranks of this agent and returns
it; JSON, or a trace, on stdout.

Exit codes: 0 answered, 2 usage, 74 the disk failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.profiling import requests


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kdist_trainer.profiling", description=__doc__)
    add = parser.add_argument
    does = "request a profile, print its state, or write its trace to stdout"
    add("what", choices=["ask", "look", "send"], help=does)
    add("--scratch", type=Path, required=True, help="the agent's folder")
    add("--root", type=Path, help="folder of the run's checkpoints, if it has one")
    add("--steps", type=int, default=5, help="ask: number of steps")
    add("--ranks", default="", help="ask: only these ranks, such as 0,3")
    add("--name", default="", help="look, send: name of the request")
    add("--rank", type=int, default=0, help="send: rank whose trace to write")
    given = parser.parse_args(arguments)
    root = given.root if given.root is not None and given.root.is_dir() else given.scratch
    try:
        if given.what == "send":
            trace = requests.folder_of(root, given.name) / requests.trace_name(given.rank)
            with trace.open("rb") as source, open(1, "wb", closefd=False) as stream:
                shutil.copyfileobj(source, stream)
            return 0
        if given.what == "ask":
            ranks = tuple(int(rank) for rank in given.ranks.split(",") if rank)
            document = {
                "name": requests.write_request(given.scratch, steps=given.steps, ranks=ranks).name
            }
        else:
            document = requests.read_progress(root, given.name)
    except OSError as error:
        sys.stderr.write(f"{error.filename or root}: {error.strerror or error}\n")
        return os.EX_IOERR
    sys.stdout.write(encode_json(document, separators=(",", ":")) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
