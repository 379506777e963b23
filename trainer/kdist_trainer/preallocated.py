"""Small files whose place on the disk is taken beforehand, so that what is written when a disk is
full can still be written.

A rank leaves its last words for its agent in one. The agent makes the file while there is room; a
reader sees nothing until all of it is there. Without a reserved file a new one is made, which a
full disk refuses.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

SIZE = 1 << 15
"""Bytes that are reserved; more may be written where the disk has room."""


def reserve(path: Path) -> None:
    """Make `path` anew, blank. Raises `OSError` where there is no room."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_bytes(bytes(SIZE))
    fresh.replace(path)


def write(path: Path, content: bytes) -> None:
    """Write `content`, which begins with no zero byte, once: what stands there already stays.
    Raises `OSError`.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        _make(path, content)
        return
    try:
        if os.pread(descriptor, 1, 0) in (b"\0", b""):
            os.pwrite(descriptor, content[1:], 1)
            # last, since a reader takes a first byte of zero for nothing
            os.pwrite(descriptor, content[:1], 0)
    finally:
        os.close(descriptor)


def read(path: Path) -> bytes:
    """What was written; empty while nothing was. Raises `OSError` where there is no such file."""
    content = path.read_bytes().rstrip(b"\0")
    return b"" if content[:1] == b"\0" else content


def _make(path: Path, content: bytes) -> None:
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        fresh.write_bytes(content)
        fresh.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
