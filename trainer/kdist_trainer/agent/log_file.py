"""The log file that `kdist run` keeps of an agent: once it is long, it becomes the older of two
files, and the one before that is removed.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from kdist_trainer import log
from kdist_trainer.config import count_bytes

PATH_VARIABLE: Final = "KDIST_LOG_FILE"
"""The variable that names the file to which `kdist run` has opened standard output and error."""
LIMIT_VARIABLE: Final = "KDIST_LOG_LIMIT"
"""The variable with the most bytes of each of the two files, such as `1Gi`."""
DEFAULT_LIMIT: Final = "256Mi"
_STREAMS = (1, 2)


class LogFile:
    """The file, written through standard output and standard error of this process."""

    def __init__(self, path: Path, limit: int) -> None:
        """Write to `path`, until it has `limit` bytes."""
        self._path = path
        self._limit = limit

    @classmethod
    def from_environment(cls) -> LogFile | None:
        """The file that the environment names; None if the log is no file of `kdist run`."""
        path = os.environ.get(PATH_VARIABLE)
        if not path:
            return None
        try:
            limit = count_bytes(os.environ.get(LIMIT_VARIABLE, DEFAULT_LIMIT))
        except (KeyError, ValueError):
            limit = count_bytes(DEFAULT_LIMIT)
        return cls(Path(path), limit)

    def rotate_if_long(self) -> None:
        """Begin another file if this one has reached its limit; called between two lines. An
        `OSError` leaves the file as it is.
        """
        with suppress(OSError):
            found = os.fstat(_STREAMS[0])
            if not stat.S_ISREG(found.st_mode) or found.st_size < self._limit:
                return
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            fresh = os.open(self._path, flags, 0o600)
            for stream in _STREAMS:
                os.dup2(fresh, stream)
            os.close(fresh)
            os.write(_STREAMS[1], self._notice())

    def _notice(self) -> bytes:
        """The first line of each file but the first one."""
        message = (
            f"the log has reached {self._limit:,} bytes: {self._path.name}.1 has what came before, "
            f"older lines are removed; {LIMIT_VARIABLE} sets the size of each file"
        )
        return log.render("warning", "log-rotated", {"message": message}, now=datetime.now(UTC))
