"""The local terminal in raw mode, while a command runs in a container."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class Terminal:
    """Detects changes of the terminal's size."""

    def __init__(self) -> None:
        self._size: os.terminal_size | None = None

    def changed_size(self) -> os.terminal_size | None:
        """The terminal's size if it has changed since the last call, else None."""
        size = os.get_terminal_size(0)
        if size == self._size:
            return None
        self._size = size
        return size


@contextmanager
def raw_terminal(wanted: bool) -> Iterator[Terminal | None]:
    """Put the terminal into raw mode until the block ends, so that keys, including Ctrl-C, are
    read as they are typed; yields None if there is no terminal.
    """
    if not (wanted and sys.stdin.isatty()):
        yield None
        return
    import termios
    import tty

    before = termios.tcgetattr(0)
    try:
        tty.setraw(0)
        yield Terminal()
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
