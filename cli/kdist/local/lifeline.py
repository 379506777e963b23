"""The owner's end of the lifeline: a FIFO whose end of file tells every agent that `kdist run` has died, however it died.

The agents hold the other end (`kdist_trainer.lifeline.watch`).
"""

from __future__ import annotations

import os
from pathlib import Path


class Lifeline:
    """The one write end. It is not inherited by any child and goes when this process goes."""

    def __init__(self, path: Path) -> None:
        """Make the FIFO anew. Raises `OSError`."""
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        # For reading as well, because a FIFO without a reader cannot be opened for writing alone; nobody ever writes into it.
        self._end: int | None = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        """Let go: whoever still watches ends at once. Closing twice is fine."""
        if self._end is not None:
            os.close(self._end)
            self._end = None
