"""Patience with an API server that is away: how long to try again, how long to pause, and whom to tell, once.

One `Patience` belongs to one connection and is shared by its threads: however many requests meet the same outage, the person
hears of it once, and once more when it is over.
"""

from __future__ import annotations

import random
import ssl
import threading
import time
from collections.abc import Callable

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds
QUIET = 1.0  # seconds that nobody needs to hear of
WEBHOOK_PATIENCE = 30.0  # seconds

# Answers that another try may change. 500 is also what an API server says while its storage or a webhook is away.
PASSING = frozenset({429, 500, 502, 503, 504})


class Patience:
    """How long one connection goes on trying. `seconds` is the patience with one outage; `tell` hears about it."""

    def __init__(self, seconds: float, tell: Callable[[str], None]) -> None:
        self.seconds = seconds
        self._tell = tell
        self._lock = threading.Lock()
        self._since: float | None = None
        self._told = False

    def failed(self, why: str, *, pause: float, left: float) -> None:
        """A try has failed, and after `pause` seconds comes another; there are `left` seconds of trying."""
        now = time.monotonic()
        with self._lock:
            self._since = now if self._since is None else self._since
            if self._told or now + pause - self._since < QUIET:
                return
            self._told = True
            self._tell(f"{why}, trying again for {left:.0f} s")

    def answered(self) -> None:
        """A try has succeeded: the outage, if there was one, is over."""
        if self._since is None:  # read without the lock, for every request passes here
            return
        with self._lock:
            if self._told:
                self._tell("the API server answers again")
            self._since, self._told = None, False


class Tries:
    """The tries of one request: `pause` waits for the next one, or says that there is none."""

    def __init__(self, patience: Patience, *, seconds: float | None = None) -> None:
        self._patience = patience
        self._seconds = patience.seconds if seconds is None else seconds
        self._begun = time.monotonic()
        self._count = 0

    def pause(self, why: str, *, at_least: float = 0.0, at_most: float | None = None) -> bool:
        """Wait before the next try; False when patience (`at_most` seconds of it) has run out.

        `at_least` is the number of seconds that the server asked to be left alone for.
        """
        limit = self._seconds if at_most is None else min(at_most, self._seconds)
        left = limit - (time.monotonic() - self._begun)
        step = min(FIRST_PAUSE * 2**self._count, LONGEST_PAUSE) * random.uniform(0.8, 1.2)  # noqa: S311 - spreads clients
        pause = max(step, at_least)
        self._count += 1
        if left <= 0 or at_least > left:
            return False
        self._patience.failed(why, pause=pause, left=left)
        time.sleep(min(pause, left))
        return True

    @property
    def spent(self) -> float:
        """Seconds since the first try began."""
        return time.monotonic() - self._begun


def is_wrong_certificate(error: BaseException) -> bool:
    """Whether TLS failed for good. An end of file in the handshake is a balancer without a server behind it: an outage."""
    seen: BaseException | None = error
    while seen is not None:
        reasons = [seen, *(each for each in seen.args if isinstance(each, BaseException)), getattr(seen, "reason", None)]
        if any(isinstance(each, ssl.SSLCertVerificationError) for each in reasons):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
