"""`kdist` as a person types it on a terminal of 80 columns: what is there to read when it is over.

It runs in this process, on a real terminal in the place of stdout and stderr, which saves each
command the seconds that a process of its own takes.
"""

from __future__ import annotations

import os
import pty
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from kdist.app import cli

COLUMNS = 80


def show(*words: str, press_at: str = "") -> tuple[int, str]:
    """Exit code of `kdist WORDS` and what it printed; Ctrl-C is pressed once it has printed
    `press_at`.
    """
    read: list[bytes] = []

    def look(data: bytes) -> None:
        seen = b"".join(read)
        read.append(data)
        if press_at and press_at.encode() not in seen and press_at.encode() in seen + data:
            os.kill(os.getpid(), signal.SIGINT)

    code = 0
    with _terminal(look):
        try:
            cli.main(words)
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, b"".join(read).decode().replace("\r\n", "\n")


@contextmanager
def _terminal(look: Callable[[bytes], None]) -> Iterator[None]:
    """Stdout and stderr of this process, and of those it starts, are a terminal; `look` receives
    what is written there.
    """
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (24, COLUMNS))
    reader = threading.Thread(target=_read, args=(ours, look))
    reader.start()
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    try:
        with os.fdopen(theirs, "w", buffering=1) as screen:
            for descriptor in (1, 2):
                os.dup2(theirs, descriptor)
            with redirect_stdout(screen), redirect_stderr(screen):
                yield
    finally:
        sys.stdout.flush()
        for descriptor, before in zip((1, 2), kept, strict=True):
            os.dup2(before, descriptor)
            os.close(before)
        reader.join()
        os.close(ours)


def _read(terminal: int, look: Callable[[bytes], None]) -> None:
    """Hand on what is written to a terminal, until nothing has it open."""
    while True:
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:  # nobody has it open
            return
        look(data)
