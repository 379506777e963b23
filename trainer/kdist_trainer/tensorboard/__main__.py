"""`python -m kdist_trainer.tensorboard FOLDER`: TensorBoard on this machine's loopback, as long as
standard input is open.

It says on stdout, as JSON, at which port, or what is wrong; then an empty line now and then, which
keeps the line to whoever looks from falling asleep. When they leave, it ends: nothing is left
running. `--wait` is what a pod made only for looking does: it ends when nobody has looked for a
minute.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

NEEDED_BYTES = 192 * 2**20
"""Memory that must be free in the container: TensorBoard must never be what a training is killed
for.
"""
PULSE_SECONDS = 30.0
UNWATCHED_SECONDS = 60.0

_GROUP = Path("/sys/fs/cgroup")


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; 0, or 1 after a line that says what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m kdist_trainer.tensorboard")
    parser.add_argument("folder", type=Path, help="folder of event files")
    parser.add_argument(
        "--port", type=int, default=0, help="port of 127.0.0.1; a free one if it is 0"
    )
    parser.add_argument(
        "--wait", action="store_true", help="only wait, as long as others look from this pod"
    )
    asked = parser.parse_args(arguments)
    if asked.wait:
        wait_for_company()
        return 0
    try:
        port = serve(asked.folder, asked.port)
    except (OSError, MemoryError, ImportError) as error:
        cause = {FileNotFoundError: "empty", MemoryError: "memory"}.get(type(error), "other")
        tell({"problem": str(error), "cause": cause})
        return 1
    tell({"port": port})
    stay()
    return 0


def serve(folder: Path, port: int) -> int:
    """Start TensorBoard and return its port. Raises `OSError`, `MemoryError` or `ImportError`
    saying why it cannot be.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there are no event files in {folder}: train.tensorboard is off, or no step "
            "has been done yet"
        )
    free = free_bytes()
    if free is not None and free < NEEDED_BYTES:
        raise MemoryError(
            f"TensorBoard needs {NEEDED_BYTES >> 20} MiB, and {max(0, free) >> 20} MiB of "
            "memory are free here"
        )
    try:
        from tensorboard import program
    except ImportError as error:
        raise ImportError(f"TensorBoard is not installed here: {error}") from error
    os.nice(19)  # the training goes first
    board = program.TensorBoard()
    # Its fast loader would be a process more, with files of its own to write.
    words = [
        "--logdir",
        str(folder),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--load_fast=false",
        "--reload_interval=5",
    ]
    board.configure(argv=["tensorboard", *words])
    try:
        url: str = board.launch()
    except program.TensorBoardServerException as error:
        raise OSError(str(error)) from error
    return int(url.rstrip("/").rpartition(":")[2])


def free_bytes(group: Path = _GROUP) -> int | None:
    """Memory that this container may still take, its cached files counted as free; None where there
    is no limit to read.
    """
    try:
        most = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # "max" is no number
        return None
    return most - used + int(stat.get("inactive_file", 0))


def tell(document: dict[str, object]) -> None:
    """One line on stdout."""
    os.write(1, json.dumps(document).encode() + b"\n")


def stay() -> None:
    """Return when standard input ends, or nobody reads what is said."""
    with contextlib.suppress(OSError):
        while True:
            ready, _, _ = select.select([0], [], [], PULSE_SECONDS)
            if not ready:
                os.write(1, b"\n")
            elif not os.read(0, 4096):
                return


def wait_for_company() -> None:
    """Return once this container has had no other process for `UNWATCHED_SECONDS`."""
    # a container's first process has no default of its own
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    seen = time.monotonic()
    while time.monotonic() - seen < UNWATCHED_SECONDS:
        others = [
            each
            for each in Path("/proc").iterdir()
            if each.name.isdecimal() and each.name != str(os.getpid())
        ]
        if others:
            seen = time.monotonic()
        time.sleep(1.0)


if __name__ == "__main__":
    os._exit(main())  # its threads are in no hurry
