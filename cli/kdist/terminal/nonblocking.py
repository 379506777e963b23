"""A text stream whose writes never block: output that the reader does not accept yet is buffered,
and beyond a limit dropped.

It is for loops that must not stop because of their output: a pipe whose reader has stopped or gone,
a terminal that was paused with Ctrl-S, a full disk.
"""

from __future__ import annotations

import errno
import io
import os
import select
import socket
import stat
from collections.abc import Callable

LIMIT = 1 << 18  # bytes in the buffer beyond which lines are dropped
_PIECE = 512  # bytes that a writable pipe accepts without blocking on every system (POSIX PIPE_BUF)


class NonBlockingWriter(io.TextIOBase):
    """Writes text to a descriptor. `write` and `flush` neither block nor raise; `drain` blocks."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._tty = os.isatty(descriptor)
        self._reopened: int | None = None
        self._gone = False
        self._buffer = bytearray()
        self._dropped = 0
        self._put = self._choose()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def isatty(self) -> bool:
        return self._tty

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Write a text, or drop all of it while the buffer is full."""
        self.flush()
        if len(self._buffer) > LIMIT:
            self._dropped += 1
        elif not self._gone:
            if self._dropped and not self._tty:
                self._buffer += (
                    f"… {self._dropped} lines are left out: they were not read in time\n".encode()
                )
            self._dropped = 0
            self._buffer += text.encode(errors="replace")
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Write as much of the buffer as the descriptor accepts now."""
        while self._buffer and not self._gone:
            try:
                del self._buffer[: self._put(bytes(self._buffer[: 1 << 16]))]
            except BlockingIOError:
                return
            except OSError as error:
                self._buffer.clear()
                # space on a full disk may be freed
                self._gone = error.errno not in (errno.ENOSPC, errno.EDQUOT)

    @property
    def is_behind(self) -> bool:
        """Whether the buffer holds output."""
        return bool(self._buffer)

    def drain(self) -> None:
        """Wait until all is written or the reader is gone; Ctrl-C redirects the descriptor to
        /dev/null.
        """
        try:
            while self.is_behind:
                select.select([], [self._descriptor], [])
                self.flush()
        except KeyboardInterrupt:
            null = os.open(os.devnull, os.O_WRONLY)
            # later output does not block on that reader
            os.dup2(null, self._descriptor)
            os.close(null)
            raise

    def close(self) -> None:
        """Close the writer's reopened descriptor; the given one stays open."""
        if self._reopened is not None:
            os.close(self._reopened)
            self._reopened = None
        super().close()

    def _choose(self) -> Callable[[bytes], int]:
        """How to write without blocking. `O_NONBLOCK` on the given descriptor would affect every
        process that shares it.
        """
        mode = os.fstat(self._descriptor).st_mode
        if stat.S_ISSOCK(mode):
            return self._send
        if not stat.S_ISFIFO(mode) and not self._tty:
            return lambda data: os.write(self._descriptor, data)
        try:
            path = (
                os.ttyname(self._descriptor) if self._tty else f"/proc/self/fd/{self._descriptor}"
            )
            self._reopened = reopened = os.open(
                path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            )
        except OSError:
            return self._write_piece
        return lambda data: os.write(reopened, data)

    def _send(self, data: bytes) -> int:
        with socket.socket(fileno=os.dup(self._descriptor)) as stream:
            return stream.send(data, socket.MSG_DONTWAIT)

    def _write_piece(self, data: bytes) -> int:
        if not select.select([], [self._descriptor], [], 0)[1]:
            raise BlockingIOError
        return os.write(self._descriptor, data[: 1 if self._tty else _PIECE])
