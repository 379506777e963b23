"""How long a run under faults stood still: watched from outside, reported, and never a reason to
fail.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

LOOK_SECONDS = 0.05


class Stall:
    """Watches the step ledger at `path` in the background while the `with` block lasts.

    `longest` is the longest time in seconds between two writes to it, the first one and the last
    one included.
    """

    def __init__(self, path: Path) -> None:
        self.longest = 0.0
        self._path = path
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        size, since = 0, time.monotonic()
        while not self._over.wait(LOOK_SECONDS):
            before = size
            with suppress(OSError):  # not there yet
                size = self._path.stat().st_size
            if size != before:
                now = time.monotonic()
                self.longest = max(self.longest, now - since if before else 0.0)
                since = now
