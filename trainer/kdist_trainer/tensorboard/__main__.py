"""`python -m kdist_trainer.tensorboard FOLDER`: serves TensorBoard on the loopback interface until
standard input is closed. The folder may be in a bucket, whose event files are copied to a temporary
folder and followed there.

It prints one JSON line with the port or the problem, then an empty line every `PULSE_SECONDS` so
that the connection to the client does not time out. It exits when the client disconnects. With
`--wait` it is the main process of a pod that only serves TensorBoard, and exits after
`IDLE_SECONDS` without a client.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.storage import open_location
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.object_store.errors import ObjectChangedError
from kdist_trainer.object_store.store import ObjectPath
from kdist_trainer.processes.threads import OnError, start_thread
from kdist_trainer.tensorboard.writer import PREFIX

NEEDED_BYTES = 192 * 2**20
"""Memory in bytes that must be free in the container, so that TensorBoard never gets a training
OOM-killed.
"""
PULSE_SECONDS = 30.0
IDLE_SECONDS = 60.0
_MIRROR_SECONDS = 5.0

_CGROUP = Path("/sys/fs/cgroup")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0, or 1 after printing the problem."""
    parser = argparse.ArgumentParser(prog="python -m kdist_trainer.tensorboard")
    add = parser.add_argument
    add("folder", help="folder of event files, or the URL of one in a bucket")
    add("--port", type=int, default=0, help="port of 127.0.0.1; a free one if it is 0")
    add("--wait", action="store_true", help="only wait while another process runs in this pod")
    options = parser.parse_args(arguments)
    if options.wait:
        wait_until_idle()
        return 0
    with contextlib.ExitStack() as stack:
        try:
            port = serve(open_folder(options.folder, stack), options.port)
        except (OSError, MemoryError, ImportError, ValueError) as error:
            cause = {FileNotFoundError: "empty", MemoryError: "memory"}.get(type(error), "other")
            print_line({"problem": str(error), "cause": cause})
            return 1
        print_line({"port": port})
        wait_for_disconnect()
    return 0


def open_folder(text: str, stack: contextlib.ExitStack) -> Path:
    """The folder of event files; of a URL a temporary folder, removed with the stack, that follows
    it. Raises `FileNotFoundError`, `OSError`, or `ValueError` if the URL names no store.
    """
    location = open_location(text)
    try:
        if isinstance(location, Path):
            next(location.iterdir(), None)
            return location
        copy = stack.enter_context(tempfile.TemporaryDirectory(prefix="kdist-tensorboard-"))
        mirror(location, Path(copy))
        return Path(copy)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there are no event files in {text}: train.tensorboard is off, or no step has been "
            "completed yet"
        ) from None


def mirror(source: ObjectPath, folder: Path) -> None:
    """Copy the event files now, and keep the copies up to date until the process ends. Raises
    `FileNotFoundError` or `OSError`.
    """
    if not copy_new(source, folder):
        raise FileNotFoundError(source)

    def follow() -> None:
        while True:
            time.sleep(_MIRROR_SECONDS)
            with contextlib.suppress(OSError):  # the next round tries it again
                copy_new(source, folder)

    start_thread(follow, name="kdist-mirror", on_error=OnError.RESTART)


def copy_new(source: ObjectPath, folder: Path) -> int:
    """Append to the files in a folder what has been added to their objects, which only grow.
    Returns the number of objects. Raises `OSError`.
    """
    found = {
        name: size for name, size in storage.list_files(source).items() if name.startswith(PREFIX)
    }
    for name, size in sorted(found.items()):
        with (folder / name).open("ab") as copy:
            if copy.tell() < size:
                # one that grows meanwhile is copied in the next round
                with contextlib.suppress(ObjectChangedError), (source / name).open(size) as stream:
                    stream.seek(copy.tell())
                    copy.write(stream.read())
    return len(found)


def serve(folder: Path, port: int) -> int:
    """Start TensorBoard at this port, or at a free one for 0, and return the port.

    Raises:
        OSError: TensorBoard cannot start.
        MemoryError: The container has less than `NEEDED_BYTES` left.
        ImportError: TensorBoard is not installed.
    """
    free = free_bytes()
    if free is not None and free < NEEDED_BYTES:
        raise MemoryError(
            f"TensorBoard needs {NEEDED_BYTES >> 20} MiB of memory, but only "
            f"{max(0, free) >> 20} MiB are free"
        )
    try:
        from tensorboard import program
    except ImportError as error:
        raise ImportError(f"TensorBoard is not installed: {error}") from error
    os.nice(19)  # the training has priority
    board = program.TensorBoard()
    # The fast loader would be another process, which writes files of its own.
    arguments = [
        "--logdir",
        str(folder),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--load_fast=false",
        "--reload_interval=5",
    ]
    board.configure(argv=["tensorboard", *arguments])
    try:
        url: str = board.launch()
    except program.TensorBoardServerException as error:
        raise OSError(str(error)) from error
    return int(url.rstrip("/").rpartition(":")[2])


def free_bytes(cgroup: Path = _CGROUP) -> int | None:
    """Memory in bytes that this container can still allocate, where cached files count as free;
    None if it has no limit.
    """
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no limit is the word "max"
        return None
    return limit - used + int(stat.get("inactive_file", 0))


def print_line(document: dict[str, object]) -> None:
    """Write a document to stdout as one line of JSON."""
    os.write(1, encode_json(document).encode() + b"\n")


def wait_for_disconnect() -> None:
    """Return when standard input ends or stdout is closed."""
    with contextlib.suppress(OSError):
        while True:
            ready, _, _ = select.select([0], [], [], PULSE_SECONDS)
            if not ready:
                os.write(1, b"\n")
            elif not os.read(0, 4096):
                return


def wait_until_idle() -> None:
    """Return once this container has had no other process for `IDLE_SECONDS`."""
    # the first process of a container has no default handler
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    last_seen = time.monotonic()
    while time.monotonic() - last_seen < IDLE_SECONDS:
        others = [
            each
            for each in Path("/proc").iterdir()
            if each.name.isdecimal() and each.name != str(os.getpid())
        ]
        if others:
            last_seen = time.monotonic()
        time.sleep(1.0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a copy is removed
    code = 1
    try:
        code = main()
    finally:
        os._exit(code)  # without waiting for TensorBoard's threads
