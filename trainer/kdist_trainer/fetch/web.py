"""The sources over HTTP: a file of a web server with the files next to it, and a repository of
Hugging Face or another hub with its interface.

The requests are made with the standard library. obstore's HTTP client refuses a whole file in reply
to a range, and a reply without `Content-Length`; and it shows neither status nor headers, which are
needed to continue a partial file.

Of a hub, huggingface_hub finds the commit that a revision names, and its files with their sizes and
digests. The files are downloaded by the same requests as those of https://: huggingface_hub's own
download, tried without Xet, took a damaged file of the right size for the file, received more bytes
than the file has, and had no bound on the time of a slow server. The URL of a file names the
commit, so it never changes.
"""

from __future__ import annotations

import http.client
import os
import re
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from email.message import Message
from pathlib import PurePosixPath
from queue import Empty, SimpleQueue
from typing import IO, Any, Final
from urllib import request as urls
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit

from kdist_trainer.config.sources import AUTHORIZATION, HUB, HUB_TOKEN, base_name
from kdist_trainer.errors import ConfigError, DataError, KdistTrainerError
from kdist_trainer.fetch import (
    ChangedError,
    FetchRequest,
    FileBody,
    RemoteFile,
    TransientError,
)
from kdist_trainer.formats.untrusted_text import parse_json
from kdist_trainer.network.deadline_http import (
    DeadlineConnection,
    DeadlineTlsConnection,
    Pace,
    guard_tls,
)
from kdist_trainer.processes.threads import OnError, start_thread

TIMEOUT_SECONDS: Final = 60.0
LONGEST_RETRY_AFTER_SECONDS: Final = 120.0
CHUNK_BYTES: Final = 1 << 20
SLOWEST: Final = 1024
"""Bytes a second; a slower answer counts as none."""
_DEADLINE: Any = DeadlineConnection  # urllib always gives the time-out that it requires
_DEADLINE_TLS: Any = DeadlineTlsConnection
_SAFE = "/%:@!$&'()*+,;=~-._"


class StatusError(Exception):
    """The server refused the request with a status of 4xx that is not retried."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"status {status} {reason}".rstrip())
        self.status = status


class WebClient:
    """Makes requests with one credential, which no other server gets by a redirect."""

    def __init__(self, authorization: str = "", *, timeout: float = TIMEOUT_SECONDS) -> None:
        """Prepare. `authorization` is the value of that header; empty for none. An answer has to
        begin within `timeout` seconds, and to continue at a rate of at least `SLOWEST` bytes a
        second.
        """
        self.authorization = authorization
        self._timeout = Pace(timeout, each=max(1, round(timeout * SLOWEST)))
        self._opener = urls.OpenerDirector()
        for handler in (
            urls.ProxyHandler(),
            urls.UnknownHandler(),
            _Plain(),
            _Tls(),
            urls.HTTPDefaultErrorHandler(),
            _Redirects(),
            urls.HTTPErrorProcessor(),
        ):
            self._opener.add_handler(handler)

    def open(
        self, url: str, headers: Mapping[str, str] | None = None, *, method: str = "GET"
    ) -> http.client.HTTPResponse:
        """Request a URL; the caller closes the response.

        Raises:
            TransientError: it may succeed later.
            StatusError: the status is 4xx.
            DataError: for good, for another reason.
        """
        given = {"User-Agent": "kdist", "Accept-Encoding": "identity", **(headers or {})}
        if self.authorization:
            given["Authorization"] = self.authorization
        request = urls.Request(encode(url), headers=given, method=method)  # noqa: S310 - see _opener
        try:
            response: http.client.HTTPResponse = self._opener.open(request, timeout=self._timeout)
        except HTTPError as error:
            with closing(error):
                raise _status_error(error, url) from None
        except (URLError, OSError, http.client.HTTPException) as error:
            raise _transport_error(error, url) from None
        return response


def read_chunks(response: http.client.HTTPResponse, length: int | None) -> Iterator[bytes]:
    """The body in pieces, and no more than `length` bytes of it. Raises `TransientError` if it is
    cut short.
    """
    left = length
    with closing(response):
        while left is None or left > 0:
            try:
                chunk = response.read1(CHUNK_BYTES if left is None else min(left, CHUNK_BYTES))
            except (OSError, http.client.HTTPException) as error:
                raise TransientError(_describe(error)) from None
            if not chunk:
                break
            left = None if left is None else left - len(chunk)
            yield chunk
    if left:
        raise TransientError(f"the reply was cut short: {left} bytes are missing")


def read_authorization(variable: str, field: str) -> str:
    """The value of a variable that is sent in a header; empty if it is not set. Raises
    `ConfigError` if it cannot be sent.
    """
    value = os.environ.get(variable, "").strip()
    if not (value.isascii() and value.isprintable()):
        raise ConfigError(
            f"{field}: {variable} has characters that no header can have: correct that key of the "
            f"Secret that {field}.secret names"
        )
    return value


def encode(url: str) -> str:
    """The URL with the characters that a request may have."""
    parts = urlsplit(url)
    return parts._replace(path=quote(parts.path, safe=_SAFE)).geturl()


class _Plain(urls.HTTPHandler):
    def http_open(self, req: urls.Request) -> http.client.HTTPResponse:
        return self.do_open(_DEADLINE, req)


class _Tls(urls.HTTPSHandler):
    def __init__(self) -> None:
        super().__init__()
        self._tls = guard_tls(ssl.create_default_context())

    def https_open(self, req: urls.Request) -> http.client.HTTPResponse:
        return self.do_open(_DEADLINE_TLS, req, context=self._tls)


class _Redirects(urls.HTTPRedirectHandler):
    def redirect_request(
        self, req: urls.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urls.Request | None:
        fresh = super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
        if fresh is None:
            return None
        before, after = urlsplit(req.full_url), urlsplit(fresh.full_url)
        if (before.scheme, after.scheme) == ("https", "http"):
            raise DataError(
                f"{before.scheme}://{before.netloc} redirects from https to http://{after.netloc}, "
                "where what is fetched could be changed on its way"
            )
        if (before.scheme, before.netloc) != (after.scheme, after.netloc):
            fresh.remove_header("Authorization")
        fresh.method = req.get_method()
        return fresh


def _is_transient(status: int) -> bool:
    """Whether a later request may get another answer; 501 and 505 say that none will."""
    return status in {408, 425, 429} or (status >= 500 and status not in {501, 505})


def _status_error(error: HTTPError, url: str) -> Exception:
    status, reason = error.code, str(error.reason).splitlines()[0] if error.reason else ""
    if _is_transient(status):
        text = error.headers.get("Retry-After", "") if error.headers is not None else ""
        seconds = min(float(text), LONGEST_RETRY_AFTER_SECONDS) if text.isdecimal() else 0.0
        return TransientError(f"status {status} {reason}".rstrip(), seconds)
    if status in {409, 412}:
        return ChangedError(f"status {status} {reason}".rstrip())
    if 300 <= status < 400:
        return DataError(f"{url} cannot be fetched: its redirects do not end at a file")
    return StatusError(status, reason)


def _transport_error(error: Exception, url: str) -> Exception:
    reason: Any = error.reason if isinstance(error, URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        return DataError(
            f"{url} cannot be fetched: the server's certificate is not valid "
            f"({reason.verify_message}); SSL_CERT_FILE can name a file of further authorities"
        )
    if isinstance(error, URLError) and isinstance(reason, str):
        return DataError(f"{url} cannot be fetched: {reason}")
    if isinstance(error, http.client.InvalidURL):
        return ConfigError(f"{url} is no URL: {error}")
    return TransientError(_describe(reason))


def _describe(error: Any) -> str:
    if isinstance(error, TimeoutError):
        return "no reply in time"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0][:200]


_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
UNAUTHORIZED: Final = 401
_DENIED: Final = frozenset({401, 403, 407})
_MISSING: Final = frozenset({404, 410})
_NO_SUCH_RANGE: Final = 416
_PARTIAL: Final = 206


class WebSource:
    """One file, which its URL names."""

    parallel = 8
    """How many files to fetch at a time."""

    def __init__(self, request: FetchRequest) -> None:
        """Prepare, without a request. Raises `ConfigError`."""
        self._request = request
        self._parent = request.url.rpartition("/")[0]
        self._client = WebClient(
            read_authorization(AUTHORIZATION, request.field),
            timeout=min(TIMEOUT_SECONDS, request.stall_seconds),
        )

    def list_files(self) -> list[RemoteFile]:
        """The files that the URL names, at least one."""
        return [self._inspect(base_name(self._request.url))]

    def find_files(self, names: Sequence[str]) -> list[RemoteFile]:
        """These files in the folder of the one file that the URL names, of those that are there."""
        found = []
        for name in names:
            try:
                found.append(self._inspect(name))
            except _MissingError:
                continue
        return found

    def read(self, file: RemoteFile, start: int) -> FileBody:
        """The content from byte `start` on if the server sends ranges and the file is the same, or
        from 0.
        """
        url = self._url(file.name)
        # a range can be conditional on a strong version only
        validator = file.etag if file.etag and not file.etag.startswith("W/") else file.modified
        try:
            return read_web(self._client, url, file, start if validator else 0, validator)
        except StatusError as error:
            if error.status in _MISSING:
                raise ChangedError(f"{url}: {error}") from None
            raise self._refused(url, error) from None

    def _inspect(self, name: str) -> RemoteFile:
        url = self._url(name)
        try:
            try:
                response = self._client.open(url, method="HEAD")
            except StatusError as error:
                if error.status in {UNAUTHORIZED, 407}:
                    raise
                # not every server answers HEAD
                response = self._client.open(url)
        except StatusError as error:
            raise self._refused(url, error) from None
        with closing(response):
            return RemoteFile(
                name,
                length_of(response),
                response.headers.get("ETag", ""),
                response.headers.get("Last-Modified", ""),
            )

    def _url(self, name: str) -> str:
        if name == base_name(self._request.url):
            return self._request.url
        return f"{self._parent}/{quote(name)}"

    def _refused(self, url: str, error: StatusError) -> KdistTrainerError:
        field = self._request.field
        if error.status in _MISSING:
            return _MissingError(f"{field}: {url} is not there ({error}): correct the URL")
        if error.status in _DENIED:
            key = f"the key {AUTHORIZATION} of the Secret that {field}.secret names"
            if self._client.authorization:
                return DataError(
                    f"{field}: access to {url} is denied ({error}): check the value of {key}"
                )
            kind = ConfigError if error.status == UNAUTHORIZED else DataError
            return kind(
                f"{field}: access to {url} is denied ({error}), and there is no credential: put "
                f"the value of the Authorization header into {key}"
            )
        return DataError(f"{field}: {url} cannot be fetched: {error}")


class _MissingError(DataError):
    pass


def read_web(
    client: WebClient, url: str, file: RemoteFile, start: int, validator: str = ""
) -> FileBody:
    """The content of a file from byte `start` on, or from 0. A reply with another size or version
    than was listed raises `ChangedError`. `validator` is the version on which a range is
    conditional; without one the URL itself stands for one version.
    """
    headers = {"Range": f"bytes={start}-"} if start else {}
    if start and validator:
        headers["If-Range"] = validator
    try:
        response = client.open(url, headers)
    except StatusError as error:
        if start and error.status == _NO_SUCH_RANGE:
            return read_web(client, url, file, 0, validator)
        raise
    try:
        if response.status == _PARTIAL:
            found = _RANGE.fullmatch(response.headers.get("Content-Range", "").strip())
            if found is None or int(found[1]) != start:
                raise TransientError("the server sent another range than it was asked for")
            total = int(found[2]) if found[2] != "*" else None
        else:
            start, total = 0, length_of(response)
        if validator:
            _check_version(response, file)
        if total is not None and file.size is not None and total != file.size:
            raise ChangedError(f"it has {total} bytes instead of {file.size}")
    except (TransientError, ChangedError):
        response.close()
        raise
    size = total if file.size is None else file.size
    length = None if size is None else size - start
    return FileBody(start, read_chunks(response, length))


def length_of(response: http.client.HTTPResponse) -> int | None:
    """The size of the file in bytes, if the server says it."""
    text = response.headers.get("Content-Length", "")
    return int(text) if text.isdecimal() else None


def _check_version(response: http.client.HTTPResponse, file: RemoteFile) -> None:
    for header, known in (("ETag", file.etag), ("Last-Modified", file.modified)):
        found = response.headers.get(header, "")
        if known and found:
            if found != known:
                raise ChangedError(f"its {header} is {found} instead of {known}")
            return


INDEX: Final = ".safetensors.index.json"
LARGEST_INDEX: Final = 256 << 20
_FURTHER: Final = frozenset({"config.json", "SHA256SUMS"})


def is_weights(name: str) -> bool:
    """Whether a file of a repository is needed to start from its weights. Those in folders are of
    other models or other formats, and are never read.
    """
    return "/" not in name and (name.endswith((".safetensors", INDEX)) or name in _FURTHER)


def shards_of(index: bytes, where: str) -> list[str]:
    """The names of the files in an index. Raises `DataError`, which names the index by `where`, if
    it is none, or names files that are not next to it.
    """
    try:
        names = set(parse_json(index, max_bytes=LARGEST_INDEX)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{where}: is no index of safetensors files") from None
    if not names or not all(
        isinstance(name, str)
        and PurePosixPath(name).name == name
        and name not in ("", "..")
        and name.isprintable()
        for name in names
    ):
        raise DataError(f"{where}: its weight_map must name files next to it")
    return sorted(names)


ENDPOINT: Final = "HF_ENDPOINT"
_NO_ACCESS: Final = frozenset({401, 403})


class HubSource:
    """The files of a repository, those below one of its folders, or one of them."""

    parallel = 8

    def __init__(self, request: FetchRequest) -> None:
        """Prepare, without a request. Raises `ConfigError`, also without huggingface_hub."""
        try:
            from huggingface_hub import HfApi, constants, hf_hub_url
        except ImportError:
            raise ConfigError(
                f"{request.field}: {request.url} needs the package huggingface_hub: "
                "pip install 'huggingface-hub>=1.0'"
            ) from None
        found = HUB.fullmatch(request.url)
        if found is None:
            raise ConfigError(f"{request.field}.url is no URL of a repository")
        self._request = request
        self._url_of = hf_hub_url
        self._repo = f"{found['owner']}/{found['name']}"
        self._kind = "dataset" if found["kind"] == "datasets" else "model"
        self._revision: str | None = found["revision"]
        self._path = (found["path"] or "").rstrip("/")
        self._folder = self._path
        self._commit = ""
        self._token = read_authorization(HUB_TOKEN, request.field)
        given = request.endpoint or os.environ.get(ENDPOINT, "")
        self._endpoint = (given or constants.ENDPOINT).rstrip("/")
        self._api = HfApi(endpoint=self._endpoint, token=self._token or False)
        self._timeout = min(TIMEOUT_SECONDS, request.stall_seconds)
        authorization = f"Bearer {self._token}" if self._token else ""
        self._client = WebClient(authorization, timeout=self._timeout)

    def list_files(self) -> list[RemoteFile]:
        found = self._list_commit()
        if self._path in found:
            self._folder = self._path.rpartition("/")[0]
            return [self._describe(found[self._path])]
        self._folder = self._path
        prefix = f"{self._path}/" if self._path else ""
        names = [name for name in found if name.startswith(prefix)]
        if self._request.weights:
            names = [name for name in names if is_weights(name[len(prefix) :])]
        if not names:
            what = "no safetensors file" if self._request.weights else "nothing"
            raise DataError(
                f"{self._request.field}: {self._request.url} has {what} at commit "
                f"{self._commit}: correct the URL"
            )
        return [self._describe(found[name]) for name in names]

    def find_files(self, names: Sequence[str]) -> list[RemoteFile]:
        found = self._list_commit()
        keys = [self._key_of(name) for name in names]
        return [self._describe(found[key]) for key in keys if key in found]

    def read(self, file: RemoteFile, start: int) -> FileBody:
        url = self._url_of(
            self._repo,
            self._key_of(file.name),
            repo_type=self._kind,
            revision=self._commit,
            endpoint=self._endpoint,
        )
        try:
            return read_web(self._client, url, file, start)
        except StatusError as error:
            raise self._refused(error.status, str(error)) from None

    def _list_commit(self) -> dict[str, Any]:
        """The files of the commit by their names."""
        try:
            info = self._request_info()
        except Exception as error:  # noqa: BLE001 - types of the HTTP library of that package
            raise self._translated(error) from None
        self._commit = str(info.sha)
        return {one.rfilename: one for one in info.siblings or []}

    def _request_info(self) -> Any:
        """What the hub says of the commit. That package has a time-out for each read only, so it is
        left behind on a thread of its own once the time is over.
        """
        answers: SimpleQueue[Any] = SimpleQueue()

        def ask() -> None:
            try:
                answers.put(
                    self._api.repo_info(
                        self._repo,
                        revision=self._commit or self._revision,
                        repo_type=self._kind,
                        files_metadata=True,
                        timeout=self._timeout,
                    )
                )
            except Exception as error:  # noqa: BLE001 - raised where the answer is awaited
                answers.put(error)

        start_thread(ask, name="hub", on_error=OnError.REPORT)
        try:
            found = answers.get(timeout=2 * self._timeout)
        except Empty:
            raise TimeoutError(f"{self._endpoint} has not answered in time") from None
        if isinstance(found, Exception):
            raise found
        return found

    def _key_of(self, name: str) -> str:
        return f"{self._folder}/{name}" if self._folder else name

    def _describe(self, one: Any) -> RemoteFile:
        name = one.rfilename[len(self._folder) + 1 :] if self._folder else one.rfilename
        digest = str(one.lfs.sha256) if one.lfs is not None else ""
        return RemoteFile(name, one.size, etag=digest or str(one.blob_id or ""), sha256=digest)

    def _translated(self, error: Exception) -> Exception:
        status = getattr(getattr(error, "response", None), "status_code", None)
        name = type(error).__name__
        if name == "OfflineModeIsEnabled":
            return ConfigError(f"{self._request.field}: HF_HUB_OFFLINE is set: unset it")
        if isinstance(status, int):
            if _is_transient(status):
                return TransientError(f"status {status}")
            return self._refused(status, f"status {status}", name)
        if isinstance(error, ValueError) and not isinstance(error, OSError):
            return DataError(f"{self._request.field}: {self._request.url}: {name}")
        return TransientError(f"{name}: {str(error).splitlines()[0][:200] if str(error) else ''}")

    def _refused(self, status: int, reason: str, kind: str = "") -> KdistTrainerError:
        field, url = self._request.field, self._request.url
        key = f"the key {HUB_TOKEN} of the Secret that {field}.secret names"
        if kind == "RevisionNotFoundError":
            return DataError(
                f"{field}: {self._endpoint} has no revision {self._revision} of {url}: correct the "
                "part after @"
            )
        is_gated = kind == "GatedRepoError"
        if is_gated or status in _NO_ACCESS:
            if self._token:
                terms = ", and that its owner has accepted the terms" if is_gated else ""
                return DataError(
                    f"{field}: access to {url} is denied ({reason}), or it does not exist: check "
                    f"that the token in {key} may read it{terms}"
                )
            return ConfigError(
                f"{field}: access to {url} is denied ({reason}) without a token, or it does not "
                f"exist: put a token that may read it into {key}"
            )
        if status == 404:
            private = "" if self._token else f", or, if it is private, put a token into {key}"
            return DataError(
                f"{field}: {self._endpoint} has no {url} ({reason}): correct the URL{private}"
            )
        return DataError(f"{field}: {url} cannot be fetched: {reason}")
