"""Small files whose disk space is reserved in advance, so that they can be written on a full disk.

A rank writes its failure and its result for its agent into such files. The agent reserves a file
while there is space. A reader sees nothing until the content is complete. Without a reserved file a
new one is created, which fails on a full disk.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kdist_trainer.processes.descriptors import spend

SIZE = 1 << 15
"""The number of reserved bytes; more can be written if the disk has space."""


def reserve(path: Path) -> None:
    """Create or replace `path` by a blank file. Raises `OSError`."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_bytes(bytes(SIZE))
    fresh.replace(path)


def write(path: Path, content: bytes) -> None:
    """Write `content` unless the file has content already. It must not begin with a zero byte.
    Raises `OSError`.
    """
    try:
        descriptor = spend(lambda: os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            fresh.write_bytes(content)
            fresh.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise
        return
    try:
        if os.pread(descriptor, 1, 0) in (b"\0", b""):
            os.pwrite(descriptor, content[1:], 1)
            # last, since a file whose first byte is zero counts as empty
            os.pwrite(descriptor, content[:1], 0)
    finally:
        os.close(descriptor)


def read(path: Path) -> bytes:
    """Read the content; empty if none was written. Raises `OSError` if the file is missing."""
    content = spend(path.read_bytes).rstrip(b"\0")
    return b"" if content[:1] == b"\0" else content
