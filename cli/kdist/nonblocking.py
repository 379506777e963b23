"""A stream that never makes its writer wait: what its reader does not take now is kept, and beyond
a limit left out.

For a loop that has more to do than to print. A pipe whose reader stops, a terminal that was halted
with Ctrl-S, a reader that has gone, a full disk: nothing of that may stop it.
"""

from __future__ import annotations

import errno
import io
import os
import select
import socket
import stat
from collections.abc import Callable

LIMIT = 1 << 18  # bytes that wait for the reader
_PIECE = 512  # bytes that a pipe takes without waiting once it takes anything, on every system


class NonBlockingWriter(io.TextIOBase):
    """Text for a descriptor. `write` and `flush` neither wait nor raise; `drain` waits."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._tty = os.isatty(descriptor)
        self._own: int | None = None
        self._gone = False
        self._kept = bytearray()
        self._left_out = 0
        self._put = self._choose()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """What text becomes on its way."""
        return "utf-8"

    def isatty(self) -> bool:
        """Whether the reader is a terminal."""
        return self._tty

    def fileno(self) -> int:
        """The descriptor that was given."""
        return self._descriptor

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, text: str) -> int:
        """Take a text whole, or leave it out whole while too much waits for the reader."""
        self.flush()
        if len(self._kept) > LIMIT:
            self._left_out += 1
        elif not self._gone:
            if self._left_out and not self._tty:
                self._kept += (
                    f"… {self._left_out} lines are left out: they were not read in time\n".encode()
                )
            self._left_out = 0
            self._kept += text.encode(errors="replace")
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Hand on what can be handed on now."""
        while self._kept and not self._gone:
            try:
                del self._kept[: self._put(bytes(self._kept[: 1 << 16]))]
            except BlockingIOError:
                return
            except OSError as error:
                self._kept.clear()
                # a disk may be cleared
                self._gone = error.errno not in (errno.ENOSPC, errno.EDQUOT)

    @property
    def is_behind(self) -> bool:
        """Whether something waits for the reader."""
        return bool(self._kept)

    def drain(self) -> None:
        """Wait until the reader has taken everything, or is gone. Interrupted by Ctrl-C it lets go
        of the descriptor.
        """
        try:
            while self.is_behind:
                select.select([], [self._descriptor], [])
                self.flush()
        except KeyboardInterrupt:
            null = os.open(os.devnull, os.O_WRONLY)
            # nothing that is printed from now on waits for that reader
            os.dup2(null, self._descriptor)
            os.close(null)
            raise

    def close(self) -> None:
        """Let go of what was opened here; the descriptor that was given stays open."""
        if self._own is not None:
            os.close(self._own)
            self._own = None
        super().close()

    def _choose(self) -> Callable[[bytes], int]:
        """How to write without waiting. `O_NONBLOCK` on the descriptor itself would be everybody's
        who shares it.
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
            self._own = own = os.open(
                path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            )
        except OSError:
            return self._write_piece
        return lambda data: os.write(own, data)

    def _send(self, data: bytes) -> int:
        with socket.socket(fileno=os.dup(self._descriptor)) as stream:
            return stream.send(data, socket.MSG_DONTWAIT)

    def _write_piece(self, data: bytes) -> int:
        if not select.select([], [self._descriptor], [], 0)[1]:
            raise BlockingIOError
        return os.write(self._descriptor, data[: 1 if self._tty else _PIECE])
