"""Patience with an API server that is away: how long to try again, how long to pause, and whom to
tell, once.

One `RetryPolicy` belongs to one connection and is shared by its threads: however many requests meet
the same outage, the person hears of it once, and once more when it is over.
"""

from __future__ import annotations

import math
import random
import re
import ssl
import threading
import time
from collections.abc import Callable

JITTER = random.SystemRandom()  # not the module's generator, which user code may have seeded
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds
QUIET = 1.0  # seconds that nobody needs to hear of
WEBHOOK_PATIENCE = 30.0  # seconds
WARM_UP = 30.0  # seconds in which a server that was started again may not have read its roles yet
BRIEFLY = 5.0  # seconds, for a 500 that does not say what is away

# Answers that another try may change. 500 is also what an API server says while its storage or a
# webhook is away.
PASSING = frozenset({429, 500, 502, 503, 504})
# Server-side apply answers 500 for an object whose fields it cannot merge: each try ends the same.
_LASTING = re.compile(
    (
        r"smd typed|typed patch object|managed ?fields|manager for existing fields|duplicate "
        r"entries for key"
    ),
    re.IGNORECASE,
)
# What a server says of an etcd, a webhook or another server behind it that is away, or of its own
# start and end.
_AWAY = re.compile(
    (
        r"etcd|rpc error|deadline|timed? "
        r"?out|connect|dial|\bEOF\b|leader|unavailable|storage|shutting "
        r"down|overload|retry|not ready"
    ),
    re.IGNORECASE,
)


def is_lasting(status: int, message: str) -> bool:
    """Whether an answer of 500 is about the object that was sent, so that no other try can help."""
    return status == 500 and _LASTING.search(message) is not None


def limit(status: int, message: str) -> float | None:
    """Seconds after which to believe such an answer; None: as long as there is patience."""
    if "failed calling webhook" in message:
        return WEBHOOK_PATIENCE
    return BRIEFLY if status == 500 and message and _AWAY.search(message) is None else None


class RetryPolicy:
    """How long one connection goes on trying; `tell` hears about it.

    `seconds` is the patience with a server that has not answered yet, and with one outage. Whoever
    stays with a job gives `until`, a moment on the monotonic clock: up to then outages of a server
    that has answered once are ridden out.
    """

    def __init__(
        self, seconds: float, tell: Callable[[str], None], *, until: float | None = None
    ) -> None:
        self._seconds = seconds
        self._until = until
        self._tell = tell
        self._lock = threading.Lock()
        self._since: float | None = None
        self._told = False
        self._answered: float | None = None
        self._lost = False
        self._back: float | None = None

    def seconds_from(self, begun: float) -> float:
        """Seconds that a request which began at `begun` keeps trying; may grow once the server has
        answered another one.
        """
        if self._until is None or self._answered is None:
            return self._seconds
        return self._until - begun

    def failed(self, why: str, *, tried: float, pause: float, left: float) -> None:
        """The try of moment `tried` has failed; after `pause` seconds comes another, in the `left`
        seconds of trying.
        """
        now = time.monotonic()
        with self._lock:
            if self._answered is not None and tried < self._answered:
                return  # another thread has met the end of the outage meanwhile
            self._since = now if self._since is None else self._since
            if self._told or now + pause - self._since < QUIET:
                return
            self._told = True
            began = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - self._since)))
            told = "until it does" if math.isinf(left) else f"for {left:.0f} s"
            self._tell(f"{why} since {began}, trying again {told}")

    def lost(self) -> None:
        """A connection has failed: the server may have been started again when it answers next."""
        self._lost = True

    def heard(self) -> None:
        """The server has answered something, be it a refusal."""
        if self._lost:
            self._lost, self._back = False, time.monotonic()

    @property
    def warms_up(self) -> bool:
        """Whether a server that knew us has just come back: until it has read its roles, it refuses
        everybody.
        """
        met = self._answered is not None and self._back is not None
        return met and time.monotonic() - (self._back or 0.0) < WARM_UP

    def answered(self) -> None:
        """A try has succeeded: the outage, if there was one, is over."""
        self._answered = time.monotonic()
        if self._since is None:  # read without the lock, for every request passes here
            return
        with self._lock:
            if self._told:
                self._tell("the API server answers again")
            self._since, self._told = None, False


class Attempts:
    """The tries of one request: `pause` waits for the next one, or says that there is none."""

    def __init__(self, patience: RetryPolicy) -> None:
        self._patience = patience
        self._begun = self._tried = time.monotonic()
        self._count = 0

    def pause(self, why: str, *, at_least: float = 0.0, at_most: float | None = None) -> bool:
        """Wait before the next try; False when patience (`at_most` seconds of it) has run out.

        `at_least` is the number of seconds that the server asked to be left alone for.
        """
        limit = self._patience.seconds_from(self._begun)
        if at_most is not None:
            limit = min(at_most, limit)
        left = limit - (time.monotonic() - self._begun)
        step = min(FIRST_PAUSE * 2**self._count, LONGEST_PAUSE) * JITTER.uniform(0.8, 1.2)
        pause = max(step, at_least)
        self._count += 1
        if left <= 0 or at_least > left:
            return False
        self._patience.failed(why, tried=self._tried, pause=pause, left=left)
        time.sleep(min(pause, left))
        self._tried = time.monotonic()
        return True

    @property
    def spent(self) -> float:
        """Seconds since the first try began."""
        return time.monotonic() - self._begun


def is_wrong_certificate(error: BaseException) -> bool:
    """Whether TLS failed for good. An end of file in the handshake is a balancer without a server
    behind it: an outage.
    """
    seen: BaseException | None = error
    while seen is not None:
        reasons = [
            seen,
            *(each for each in seen.args if isinstance(each, BaseException)),
            getattr(seen, "reason", None),
        ]
        if any(isinstance(each, ssl.SSLCertVerificationError) for each in reasons):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
