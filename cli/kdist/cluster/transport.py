"""One request to the API server, tried again while it is away, and its answer or a `KdistError`."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from kdist.cluster import retry
from kdist.cluster.access import CONNECT_SECONDS, Access
from kdist.cluster.api_errors import explain, read_status
from kdist.cluster.credentials import Credential
from kdist.cluster.retry import PASSING, Attempts, RetryPolicy, is_lasting, is_wrong_certificate
from kdist.errors import Code, KdistError
from kdist.manifest import to_json

READ_SECONDS = 30.0
AT_ONCE = 40  # connections that are kept: more are made and thrown away, each with its handshake


@dataclass(frozen=True)
class ApiRequest:
    """What is asked. `what` names it in errors; `again` is False where a failure is an answer and
    not an outage.

    `timeout` is how many seconds its answer may be silent; None is what the connection has for all
    requests.
    """

    method: str
    path: str
    what: str
    query: Sequence[tuple[str, str]] = ()
    body: Mapping[str, Any] | None = None
    content_type: str = "application/json"
    accept: str = "application/json"
    again: bool = True
    timeout: float | None = None


@dataclass(frozen=True)
class ApiResponse:
    """What came back: status below 300, headers in lower case, the body, and the warnings that the
    server added.
    """

    status: int
    body: bytes
    warnings: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """The body as a document. Raises `KdistError` if it is none: then something else than an
        API server answers.
        """
        try:
            found = json.loads(self.body)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise KdistError(
                "the API server's address answers, but not as an API server does",
                hint=(
                    "a proxy or a login page may stand before it: check `server` in the kubeconfig"
                ),
                code=Code.UNREACHABLE,
            )
        return found


class Transport:
    """Sends requests over a pool of connections; threads may share it."""

    def __init__(
        self,
        access: Access,
        *,
        patience: float,
        tell: Callable[[str], None],
        request_timeout: float = READ_SECONDS,
        until: float | None = None,
    ) -> None:
        """`request_timeout` is how many seconds an answer may be silent; 0 is for ever."""
        import urllib3

        # Only a kubeconfig that says so is not verified, and urllib3 would complain of it at every
        # connection.
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        self.access = access
        self.patience = RetryPolicy(patience, tell, until=until)
        self._request_timeout = request_timeout or None
        self._lock = threading.Lock()
        self._forbidden: set[str] = set()
        self._pool: Any = None
        self._shown = Credential()  # whose certificate the connections of the pool show
        self._connect(access.credentials.get())

    def _connect(self, credential: Credential) -> Any:
        """The pool whose connections show this certificate; another one where a plugin has given
        another certificate.
        """
        with self._lock:
            if self._pool is None or (credential.certificate, credential.key) != (
                self._shown.certificate,
                self._shown.key,
            ):
                try:
                    self._pool = self.access.pool(AT_ONCE, credential)
                except (OSError, ValueError) as error:
                    raise KdistError(
                        f"the kubeconfig cannot be used: {error}", code=Code.UNREACHABLE
                    ) from error
                self._shown = credential
            return self._pool

    def send(self, request: ApiRequest) -> ApiResponse:
        """The answer to a request. Raises `ApiError` (a `ApiNotFoundError` for 404) or `KdistError`
        with code UNREACHABLE.
        """
        response = self.open(request)
        return ApiResponse(
            response.status,
            response.data,
            _warnings(response),
            {key.lower(): response.headers[key] for key in response.headers},
        )

    def open(self, request: ApiRequest, *, stream: bool = False) -> Any:
        """The pool's response itself; with `stream`, its body is still to be read by the caller,
        who releases it.
        """
        tries = Attempts(self.patience)
        asked_anew = False
        while True:
            try:
                response = self._once(request, stream=stream)
            except OSError as error:
                self.patience.lost()
                if self._give_up(error, request, tries):
                    raise self._unreachable(error, tries) from error
                continue
            self.patience.heard()
            if response.status < 300:
                self.patience.answered()
                return response
            body = response.data  # reads a stream's too, which ends with its refusal
            if response.status == 401 and not asked_anew and self.access.credentials.forget():
                asked_anew = True
                continue
            if not self._again(request, response, body, tries):
                raise self._refused(request, response.status, body)

    def _once(self, request: ApiRequest, *, stream: bool) -> Any:
        import urllib3

        credential = self.access.credentials.get()
        # A header that says two groups is two headers, and http.client knows Latin-1 alone where
        # UTF-8 is meant.
        told = self.access.headers(credential)
        headers = urllib3.HTTPHeaderDict(
            [(name, value.encode().decode("latin-1")) for name, value in told]
        )
        headers["accept"] = request.accept
        body = None
        if request.body is not None:
            headers["content-type"] = request.content_type
            body = to_json(request.body).encode()
        query = f"?{urlencode(request.query)}" if request.query else ""
        silence = self._request_timeout if request.timeout is None else request.timeout
        try:
            return self._connect(credential).request(
                request.method,
                f"{self.access.server}{request.path}{query}",
                body=body,
                headers=headers,
                timeout=urllib3.Timeout(
                    connect=min(CONNECT_SECONDS, silence or CONNECT_SECONDS), read=silence
                ),
                preload_content=not stream,
                retries=False,
            )
        except urllib3.exceptions.HTTPError as error:
            raise ConnectionError(_reason(error)) from error

    def _give_up(self, error: OSError, request: ApiRequest, tries: Attempts) -> bool:
        if not request.again or is_wrong_certificate(error):
            return True
        return not tries.pause(f"the API server does not answer ({error})")

    def _again(self, request: ApiRequest, response: Any, body: bytes, tries: Attempts) -> bool:
        if response.status == 403 and self._is_too_early(request):
            return tries.pause("the API server does not know its roles yet")
        if not request.again or response.status not in PASSING:
            return False
        message = str(read_status(body).get("message") or "")
        if is_lasting(response.status, message):
            return False
        at_most = retry.limit(response.status, message)
        if "failed calling webhook" in message:
            return tries.pause(f"an admission webhook does not answer ({message})", at_most=at_most)
        asked = response.headers.get("Retry-After", "")
        why = "is busy" if response.status == 429 else f"answers {response.status}"
        return tries.pause(
            f"the API server {why}",
            at_least=float(asked) if asked.isdecimal() else 0.0,
            at_most=at_most,
        )

    def _is_too_early(self, request: ApiRequest) -> bool:
        """Whether this may be allowed in a moment, as far as it was not refused before."""
        if request.again and self.patience.warms_up and request.path not in self._forbidden:
            return True
        self._forbidden.add(request.path)
        return False

    def _refused(self, request: ApiRequest, status: int, body: bytes) -> KdistError:
        error = explain(
            status,
            body,
            what=request.what,
            namespace=self.access.namespace,
            context=self.access.context,
        )
        message = str(read_status(body).get("message") or "")
        if status in PASSING and request.again and not is_lasting(status, message):
            error.code = Code.UNREACHABLE
        return error

    def _unreachable(self, error: OSError, tries: Attempts) -> KdistError:
        if is_wrong_certificate(error):
            return KdistError(
                (
                    f"the certificate of {self.access.server} is not the one that the "
                    f"kubeconfig expects: {error}"
                ),
                hint=(
                    "check `server` and `certificate-authority-data` of context "
                    f"{self.access.context}"
                ),
                code=Code.UNREACHABLE,
            )
        waited = f" after {tries.spent:.0f} s of trying" if tries.spent >= 1 else ""
        return KdistError(
            f"the API server at {self.access.server} does not answer{waited}: {error}",
            hint=(
                f"context {self.access.context}: is the cluster up, and is it reachable from here?"
            ),
            next_command="kdist doctor",
            code=Code.UNREACHABLE,
        )


def _reason(error: BaseException) -> str:
    """Why a connection failed, in a few words: those of the system, without the pool's wrapping."""
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


def _warnings(response: Any) -> tuple[str, ...]:
    """Texts of the `Warning: 299 - "…"` headers."""
    found = []
    for value in response.headers.getlist("Warning"):
        parts = value.split('"')
        found.append('"'.join(parts[1:-1]).replace('\\"', '"') if len(parts) > 2 else value)
    return tuple(found)


def deadline(timeout: float | None) -> float:
    """Moment on the monotonic clock that lies `timeout` seconds ahead; None is never."""
    return float("inf") if timeout is None else time.monotonic() + timeout
