"""Retries requests while the API server is unreachable: for how long, with which pauses, and one
message for the user.

One `RetryPolicy` belongs to one connection and is shared by its threads: however many requests fail
in the same outage, it is reported once, and once more when it has ended.
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
FIRST_PAUSE = 0.2  # seconds
LONGEST_PAUSE = 5.0
QUIET_SECONDS = 1.0  # an outage as short as this is not reported
WEBHOOK_SECONDS = 30.0  # for a webhook that does not respond
WARM_UP_SECONDS = 30.0  # in which a restarted server may not have loaded its roles yet
UNEXPLAINED_SECONDS = 5.0  # for a 500 that does not say what is unavailable

# Statuses that a retry may change. 500 is also what an API server says while its storage or a
# webhook is away.
RETRYABLE = frozenset({429, 500, 502, 503, 504})
# Server-side apply answers 500 for an object whose fields it cannot merge: retries cannot help.
_PERMANENT = re.compile(
    (
        r"smd typed|typed patch object|managed ?fields|manager for existing fields|duplicate "
        r"entries for key"
    ),
    re.IGNORECASE,
)
# Messages about an unavailable etcd, webhook or other server behind the API server, or about its
# own start and shutdown.
_UNAVAILABLE = re.compile(
    (
        r"etcd|rpc error|deadline|timed? "
        r"?out|connect|dial|\bEOF\b|leader|unavailable|storage|shutting "
        r"down|overload|retry|not ready"
    ),
    re.IGNORECASE,
)


def is_permanent(status: int, message: str) -> bool:
    """Whether a response of status 500 is caused by the object that was sent, so that retries
    cannot help.
    """
    return status == 500 and _PERMANENT.search(message) is not None


def limit(status: int, message: str) -> float | None:
    """Seconds for which to retry such a response; None for as long as the policy allows."""
    if "failed calling webhook" in message:
        return WEBHOOK_SECONDS
    return (
        UNEXPLAINED_SECONDS
        if status == 500 and message and _UNAVAILABLE.search(message) is None
        else None
    )


class RetryPolicy:
    """For how long one connection retries.

    Args:
        seconds: for a server that has not responded yet, and for one outage.
        notify: receives a message when an outage starts and when it ends.
        until: time on the monotonic clock until which outages of a server that has responded once
            are retried; None for `seconds`.
    """

    def __init__(
        self, seconds: float, notify: Callable[[str], None], *, until: float | None = None
    ) -> None:
        self._seconds = seconds
        self._until = until
        self._notify = notify
        self._lock = threading.Lock()
        self._since: float | None = None
        self._notified = False
        self._last_success: float | None = None
        self._connection_lost = False
        self._reconnected: float | None = None

    def seconds_from(self, begun: float) -> float:
        """Seconds for which a request that started at `begun` is retried. May grow when the server
        responds to another request.
        """
        if self._until is None or self._last_success is None:
            return self._seconds
        return self._until - begun

    def failed(self, why: str, *, tried: float, pause: float, left: float) -> None:
        """Record a failed attempt, and report the outage if it lasts.

        Args:
            why: the reason, for the message.
            tried: when the attempt started, on the monotonic clock.
            pause: seconds until the next attempt.
            left: seconds for which the request is still retried.
        """
        now = time.monotonic()
        with self._lock:
            if self._last_success is not None and tried < self._last_success:
                return  # another thread has observed the end of the outage
            self._since = now if self._since is None else self._since
            if self._notified or now + pause - self._since < QUIET_SECONDS:
                return
            self._notified = True
            began = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - self._since)))
            duration = "until it does" if math.isinf(left) else f"for {left:.0f} s"
            self._notify(f"{why} since {began}, trying again {duration}")

    def connection_lost(self) -> None:
        """Record a failed connection: the server may have restarted when it responds next."""
        self._connection_lost = True

    def responded(self) -> None:
        """Record a response of any status."""
        if self._connection_lost:
            self._connection_lost = False
            self._reconnected = time.monotonic()

    @property
    def warming_up(self) -> bool:
        """Whether a server that accepted requests has just restarted: until it has loaded its
        roles, it forbids everything.
        """
        known = self._last_success is not None and self._reconnected is not None
        return known and time.monotonic() - (self._reconnected or 0.0) < WARM_UP_SECONDS

    def succeeded(self) -> None:
        """Record a successful attempt, which ends an outage."""
        self._last_success = time.monotonic()
        if self._since is None:  # read without the lock, because every request calls this
            return
        with self._lock:
            if self._notified:
                self._notify("the API server answers again")
            self._since = None
            self._notified = False


class Attempts:
    """The attempts of one request."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._begun = time.monotonic()
        self._tried = self._begun
        self._count = 0

    def pause(self, why: str, *, at_least: float = 0.0, at_most: float | None = None) -> bool:
        """Wait before the next attempt.

        Args:
            why: the reason for it.
            at_least: seconds that the server asked to wait.
            at_most: seconds for which to retry, if fewer than the policy's.

        Returns:
            Whether there is a next attempt.
        """
        limit = self._policy.seconds_from(self._begun)
        if at_most is not None:
            limit = min(at_most, limit)
        left = limit - (time.monotonic() - self._begun)
        step = min(FIRST_PAUSE * 2**self._count, LONGEST_PAUSE) * JITTER.uniform(0.8, 1.2)
        pause = max(step, at_least)
        self._count += 1
        if left <= 0 or at_least > left:
            return False
        self._policy.failed(why, tried=self._tried, pause=pause, left=left)
        time.sleep(min(pause, left))
        self._tried = time.monotonic()
        return True

    @property
    def elapsed(self) -> float:
        """Seconds since the first attempt."""
        return time.monotonic() - self._begun


def is_wrong_certificate(error: BaseException) -> bool:
    """Whether TLS failed because of the certificate. An end of file in the handshake is an outage:
    a load balancer without a server.
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
