"""The time that one call may spend on attempts."""

from __future__ import annotations

import random
import time
from typing import Final

FIRST_WAIT_SECONDS: Final = 0.1
LONGEST_WAIT_SECONDS: Final = 5.0
# An attempt that begins in the first half ends in the third quarter, and leaves one for reading
# back what it has done.
BEGIN_SHARE: Final = 0.5
REQUEST_SHARE: Final = 0.25


class Attempts:
    """The attempts of one call, with waits between them that double, and are random so that ranks
    that failed together do not come back together.
    """

    def __init__(self, seconds: float) -> None:
        self._begun = time.monotonic()
        self._last = self._begun + seconds * BEGIN_SHARE
        self._wait = FIRST_WAIT_SECONDS
        self.count = 1

    def another(self) -> bool:
        """Wait for the next attempt; False at once if there is no time for one."""
        left = self._last - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(self._wait * random.uniform(0.5, 1.0), left))  # noqa: S311 - spreads load
        self._wait = min(2 * self._wait, LONGEST_WAIT_SECONDS)
        self.count += 1
        return True

    def __str__(self) -> str:
        plural = "attempt" if self.count == 1 else "attempts"
        return f"{self.count} {plural} in {time.monotonic() - self._begun:.1f} s"
