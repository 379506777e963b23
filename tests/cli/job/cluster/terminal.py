"""A real terminal for a command of kdist: what it draws there, keys that are pressed, another
size.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tests.cli.job.cluster.screen import Screen
from tests.patience import soon

# The terminal must be the session's own, or its Ctrl-C reaches nobody.
_TAKE = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, sys.argv[1:])"
)
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_STARTS = re.compile(r"\x1b\[1A|\x1b\[2J")  # with which every new frame begins


class Terminal:
    """`kdist ARGS` on a terminal of its own; `columns` wide."""

    def __init__(
        self, *args: str, columns: int = 140, rows: int = 40, home: str | None = None, **env: str
    ) -> None:
        self.screen = Screen(columns, rows)
        self.written = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._ours, self._theirs = pty.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(self._theirs)
        environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)}
        environment.pop("FORCE_COLOR", None)
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        environment |= env
        line = [sys.executable, "-c", _TAKE, sys.executable, "-m", "kdist", *args]
        self.process = subprocess.Popen(
            line,
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            env=environment,
            cwd=home,
            start_new_session=True,
        )

    def resize(self, columns: int, rows: int = 40) -> None:
        """Another size, of which the kernel tells whoever runs there."""
        self.read()
        self.screen.resize(columns, rows)
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    @property
    def settings(self) -> list[Any]:
        """How the terminal treats keys now; as `before` when it was restored."""
        return termios.tcgetattr(self._theirs)

    def read(self) -> str:
        """All that was written so far."""
        while select.select([self._ours], [], [], 0)[0]:
            text = self._decoder.decode(os.read(self._ours, 1 << 16))
            self.written += text
            self.screen.write(text)
        return self.written

    def frame(self) -> list[str]:
        """The lines that were drawn last, without colour."""
        return _CODES.sub("", _STARTS.split(self.read())[-1]).splitlines()

    def shows(self, condition: Callable[[str], bool], seconds: float = 30.0) -> bool:
        """Whether the condition comes true for the last frame."""
        return soon(lambda: condition("\n".join(self.frame())), seconds)

    def end(self, seconds: float = 30.0) -> int:
        """The exit code, once it has ended."""
        assert soon(lambda: (self.read(), self.process.poll())[1] is not None, seconds), (
            self.frame()
        )
        self.read()
        return self.process.returncode

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)
