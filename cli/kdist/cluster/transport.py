"""Requests to the API server, repeated while it is unavailable.

The time-out of a request is for its response as a whole, and the size of the response is bounded:
what answers may be another server, or pass on what a pod sends. Streams say how they are bounded.

`RetryPolicy` decides how long requests are repeated and with which pauses, and reports an outage to
the user. One policy belongs to one connection and is shared by its threads: however many requests
fail in the same outage, it is reported once, and once more when it has ended.
"""

from __future__ import annotations

import math
import random
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from urllib.parse import urlencode

from kdist.cluster.api_errors import ApiError, explain, read_status
from kdist.cluster.kubeconfig import CONNECT_SECONDS, Access, Credential, unusable
from kdist.errors import Code, KdistError
from kdist.manifest import to_json
from kdist_trainer.formats import RETRYABLE_STATUSES
from kdist_trainer.formats.untrusted_text import MalformedTextError, parse_object
from kdist_trainer.network.deadline_http import Pace, TooLargeError

JITTER = random.SystemRandom()  # not the module's generator, which user code may have seeded
FIRST_PAUSE = 0.2  # seconds
LONGEST_PAUSE = 5.0
QUIET_SECONDS = 1.0  # an outage as short as this is not reported
WEBHOOK_SECONDS = 30.0  # for a webhook that does not respond
WARM_UP_SECONDS = 30.0  # in which a restarted server may not have loaded its roles yet
UNEXPLAINED_SECONDS = 5.0  # for a 500 that does not say what is unavailable

# Server-side apply answers 500 for an object whose fields it cannot merge: retries cannot help.
_PERMANENT = re.compile(
    r"smd typed|typed patch object|managed ?fields|manager for existing fields|duplicate "
    r"entries for key",
    re.IGNORECASE,
)
# Messages about an unavailable etcd, webhook or other server behind the API server, or about its
# own start and shutdown.
_UNAVAILABLE = re.compile(
    r"etcd|rpc error|deadline|timed? "
    r"?out|connect|dial|\bEOF\b|leader|unavailable|storage|shutting "
    r"down|overload|retry|not ready",
    re.IGNORECASE,
)


def is_permanent(status: int, message: str) -> bool:
    """Whether a response of status 500 is caused by the object that was sent, so that retries
    cannot help.
    """
    return status == 500 and _PERMANENT.search(message) is not None


def limit_retries(status: int, message: str) -> float | None:
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
        """Wait before the next attempt; returns whether there is one.

        Args:
            why: the reason for it.
            at_least: seconds that the server asked to wait.
            at_most: seconds for which to retry, if fewer than the policy's.
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


READ_SECONDS = 30.0
RETRY_SECONDS = 60.0  # of one request, while the server is unreachable
MOST_BYTES = 128 << 20
"""Of a response; a page of a list has some 10 MB on a large cluster."""
_MOST_ERROR_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20
MAX_CONNECTIONS = 40  # that are kept open; further ones are closed after use


_T = TypeVar("_T")


class ResponseTooLargeError(KdistError):
    """A response has more bytes than were asked for at most."""


@dataclass(frozen=True)
class ApiRequest:
    """A request.

    Attributes:
        method: HTTP method.
        path: path of the URL.
        description: the request in words, for errors.
        query: parameters of the URL.
        body: document to send.
        content_type: of the body.
        accept: content type of the response.
        retry: whether to repeat the request after an outage.
        timeout: seconds for the response; None for the default of the connection.
        each: number of bytes after which the time-out starts again, for a response without end; 0
            where it is for the whole response.
        most: bytes of the response, if it is not a stream.
    """

    method: str
    path: str
    description: str
    query: Sequence[tuple[str, str]] = ()
    body: Mapping[str, Any] | None = None
    content_type: str = "application/json"
    accept: str = "application/json"
    retry: bool = True
    timeout: float | None = None
    each: int = 0
    most: int = MOST_BYTES


@dataclass(frozen=True)
class ApiResponse:
    """A successful response.

    Attributes:
        status: HTTP status code, below 300.
        body: the body.
        warnings: texts of the server's `Warning` headers.
        headers: headers by lower-case name.
        source: what answered, for errors.
    """

    status: int
    body: bytes
    warnings: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    source: str = "the API server"

    def document(self) -> dict[str, Any]:
        """The body as a document. Raises `KdistError` if it is none, because something other than
        an API server answered.
        """
        try:
            return parse_object(self.body, max_bytes=MOST_BYTES)
        except MalformedTextError:
            raise KdistError(
                f"{self.source} answers, but not like an API server",
                hint=(
                    "a proxy or a login page may be in front of it: check `server` in the "
                    "kubeconfig"
                ),
                code=Code.UNREACHABLE,
            ) from None


class Transport:
    """Sends requests over a pool of connections; threads may share it."""

    def __init__(
        self,
        access: Access,
        *,
        retry_seconds: float | None,
        notify: Callable[[str], None],
        request_timeout: float = READ_SECONDS,
        until: float | None = None,
    ) -> None:
        """Create the connection pool. Raises `KdistError` if there are no usable credentials
        (UNREACHABLE).

        Args:
            access: address and identity for the API server.
            retry_seconds: how long each request is repeated during an outage; None for
                `RETRY_SECONDS`.
            notify: receives messages about outages.
            request_timeout: seconds for a request and its response; 0 for no limit.
            until: monotonic time until which outages of a server that has responded once are
                retried, instead of `retry_seconds`.
        """
        import urllib3

        # Verification is off only if the kubeconfig disables it; urllib3 would warn at every
        # connection.
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        self.access = access
        self._notify = notify
        seconds = RETRY_SECONDS if retry_seconds is None else retry_seconds
        self.retry_policy = RetryPolicy(seconds, notify, until=until)
        self._request_timeout = request_timeout or None
        self._lock = threading.Lock()
        self._forbidden: set[str] = set()
        self._pool: Any = None
        self._pool_credential = Credential()  # whose certificate the connections use
        self._connect(access.credentials.get())

    def staying(self, timeout: float | None) -> Transport:
        """The same connections, with patience as long as the time-out in seconds, or without an
        end.
        """
        found, seconds = copy(self), RETRY_SECONDS if timeout is None else timeout
        found.retry_policy = RetryPolicy(seconds, self._notify, until=deadline(timeout))
        return found

    def _connect(self, credential: Credential) -> Any:
        """The pool whose connections use this certificate; a new pool if the certificate has
        changed.
        """
        with self._lock:
            if self._pool is None or credential[1:] != self._pool_credential[1:]:
                try:
                    self._pool = self.access.pool(MAX_CONNECTIONS, credential)
                except (OSError, ValueError) as error:
                    raise unusable(str(error)) from error
                self._pool_credential = credential
            return self._pool

    def send(self, request: ApiRequest) -> ApiResponse:
        """Send a request and read the response.

        Raises:
            ApiError: the server rejected the request (`ApiNotFoundError` for 404).
            KdistError: the server is unreachable (UNREACHABLE).
        """
        found = self._repeat(request, _read_response)
        return replace(found, source=f"{request.description}: {self.access.server}")

    def open(self, request: ApiRequest) -> Any:
        """Send a request; the response of urllib3, whose body the caller reads before it releases
        the connection. Raises the errors of `send`.
        """
        return self._repeat(request, lambda response, _: response)

    def _repeat(self, request: ApiRequest, read: Callable[[Any, int], _T]) -> _T:
        attempts = Attempts(self.retry_policy)
        reauthenticated = False
        while True:
            try:
                response = self._send_once(request)
                accepted = response.status < 300
                found = read(response, request.most) if accepted else None
                body = b"" if accepted else _read_body(response, _MOST_ERROR_BYTES)
            except TooLargeError as error:
                raise ResponseTooLargeError(
                    f"{request.description}: {error}",
                    hint=f"{self.access.server} sends more than an API server does: check its "
                    "address",
                    code=Code.UNREACHABLE,
                ) from error
            except OSError as error:
                self.retry_policy.connection_lost()
                if not self._pause_after_error(error, request, attempts):
                    raise self._unreachable(error, attempts) from error
                continue
            self.retry_policy.responded()
            if found is not None:
                self.retry_policy.succeeded()
                return found
            if response.status == 401 and not reauthenticated and self.access.credentials.forget():
                reauthenticated = True
                continue
            if not self._pause_after_response(request, response, body, attempts):
                refusal = self.explain(request.description, response.status, body)
                message = str(read_status(body).get("message") or "")
                permanent = not request.retry or is_permanent(response.status, message)
                if response.status in RETRYABLE_STATUSES and not permanent:
                    refusal.code = Code.UNREACHABLE
                raise refusal

    def _send_once(self, request: ApiRequest) -> Any:
        import urllib3

        credential = self.access.credentials.get()
        # Two groups need two headers of one name; http.client encodes headers as Latin-1, and the
        # server expects UTF-8.
        identity = self.access.headers(credential)
        headers = urllib3.HTTPHeaderDict(
            [(name, value.encode().decode("latin-1")) for name, value in identity]
        )
        headers["accept"] = request.accept
        body = None
        if request.body is not None:
            headers["content-type"] = request.content_type
            body = to_json(request.body).encode()
        query = f"?{urlencode(request.query)}" if request.query else ""
        timeout = self._request_timeout if request.timeout is None else request.timeout
        read = Pace(timeout, each=request.each) if timeout and request.each else timeout
        try:
            return self._connect(credential).request(
                request.method,
                f"{self.access.server}{request.path}{query}",
                body=body,
                headers=headers,
                timeout=urllib3.Timeout(
                    connect=min(CONNECT_SECONDS, timeout or CONNECT_SECONDS), read=read
                ),
                preload_content=False,
                retries=False,
                redirect=False,
            )
        except urllib3.exceptions.HTTPError as error:
            raise ConnectionError(reason(error)) from error

    def _pause_after_error(self, error: OSError, request: ApiRequest, attempts: Attempts) -> bool:
        """Wait before the next attempt; returns whether there is one."""
        if not request.retry or is_wrong_certificate(error):
            return False
        return attempts.pause(f"the API server does not answer ({error})")

    def _pause_after_response(
        self, request: ApiRequest, response: Any, body: bytes, attempts: Attempts
    ) -> bool:
        """Wait before the next attempt; returns whether there is one."""
        if response.status == 403 and self._rbac_not_synced_yet(request):
            return attempts.pause("the API server does not know its roles yet")
        if not request.retry or response.status not in RETRYABLE_STATUSES:
            return False
        message = str(read_status(body).get("message") or "")
        if is_permanent(response.status, message):
            return False
        at_most = limit_retries(response.status, message)
        if "failed calling webhook" in message:
            return attempts.pause(
                f"an admission webhook does not answer ({message})", at_most=at_most
            )
        retry_after = response.headers.get("Retry-After", "")
        why = "is busy" if response.status == 429 else f"answers {response.status}"
        return attempts.pause(
            f"the API server {why}",
            at_least=float(retry_after) if retry_after.isdecimal() else 0.0,
            at_most=at_most,
        )

    def _rbac_not_synced_yet(self, request: ApiRequest) -> bool:
        """Whether a forbidden request may be allowed soon: the server is starting, and has not
        forbidden this path before.
        """
        if request.retry and self.retry_policy.warming_up and request.path not in self._forbidden:
            return True
        self._forbidden.add(request.path)
        return False

    def explain(self, description: str, status: int, body: bytes) -> ApiError:
        """The error for a response with an error status."""
        access = self.access
        return explain(
            status,
            body,
            description=description,
            namespace=access.namespace,
            context=access.context,
        )

    def _unreachable(self, error: OSError, attempts: Attempts) -> KdistError:
        if is_wrong_certificate(error):
            return KdistError(
                f"the certificate of {self.access.server} is not the one that the "
                f"kubeconfig expects: {error}",
                hint=(
                    "check `server` and `certificate-authority-data` of context "
                    f"{self.access.context}"
                ),
                code=Code.UNREACHABLE,
            )
        waited = f" after {attempts.elapsed:.0f} s of trying" if attempts.elapsed >= 1 else ""
        return KdistError(
            f"the API server at {self.access.server} does not answer{waited}: {error}",
            hint=(
                f"context {self.access.context}: is the cluster up, and is it reachable from here?"
            ),
            next_command="kdist doctor",
            code=Code.UNREACHABLE,
        )


def _read_response(response: Any, most: int) -> ApiResponse:
    # texts of the `Warning: 299 - "…"` headers
    found = []
    for value in response.headers.getlist("Warning"):
        parts = value.split('"')
        found.append('"'.join(parts[1:-1]).replace('\\"', '"') if len(parts) > 2 else value)
    return ApiResponse(
        response.status,
        _read_body(response, most),
        tuple(found),
        {key.lower(): response.headers[key] for key in response.headers},
    )


def _read_body(response: Any, most: int) -> bytes:
    """The body. Raises `TooLargeError`, and `ConnectionError` where it does not come in time."""
    import urllib3

    body = bytearray()
    try:
        while chunk := response.read(_CHUNK_BYTES, decode_content=False):
            body += chunk
            if len(body) > most:
                raise TooLargeError(f"the response has more than {most >> 10} KiB")
    except urllib3.exceptions.HTTPError as error:
        response.close()
        raise ConnectionError(reason(error)) from error
    except TooLargeError:
        response.close()
        raise
    response.release_conn()
    return bytes(body)


_MOST_LINE_BYTES = 4 << 20  # more of a line is dropped


def read_lines(response: Any) -> Iterator[bytes]:
    """Yield lines without their line ends as they arrive, including an unterminated last one.
    Raises `ConnectionError` if the connection was lost, or timed out.
    """
    import urllib3

    rest = bytearray()
    try:
        for piece in response.stream(2**16, decode_content=False):
            *lines, tail = piece.split(b"\n")
            for line in lines:
                rest += line
                yield bytes(rest)
                rest.clear()
            rest += tail
            del rest[_MOST_LINE_BYTES:]
    except urllib3.exceptions.HTTPError as error:
        raise ConnectionError(reason(error)) from error
    finally:
        # A connection whose response was not read to its end cannot be reused.
        response.close()
        response.release_conn()
    if rest:
        yield bytes(rest)


def reason(error: BaseException) -> str:
    """Why a connection failed: the system's message, without the pool's wrapping."""
    if "timed out" in str(error).lower():
        return "timed out"
    inner: BaseException | None = error
    found = ""
    while inner is not None:
        if isinstance(inner, ssl.SSLCertVerificationError):
            return inner.verify_message
        if isinstance(inner, ssl.SSLError):
            return (inner.reason or "TLS failed").replace("_", " ").lower()
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror.lower()
        if isinstance(inner, OSError):
            found = str(inner).lower()
        inner = inner.__cause__ or inner.__context__
    return found or type(error).__name__


def deadline(timeout: float | None) -> float:
    """Monotonic time in `timeout` seconds; infinity for None."""
    return float("inf") if timeout is None else time.monotonic() + timeout
