"""The person's own terminal while a command in a container uses it: keys pass untouched, and its size is told."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class Terminal:
    """Remembers the size that was told last."""

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
    """Pass keys on as they are typed, Ctrl-C included, for as long as the context lasts; None where there is no terminal."""
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
