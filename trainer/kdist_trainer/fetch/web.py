"""Fetches a file over HTTP, and files next to it."""

from __future__ import annotations

import http.client
import re
from collections.abc import Sequence
from contextlib import closing
from typing import Final
from urllib.parse import quote

from kdist_trainer.config.object_stores import AUTHORIZATION
from kdist_trainer.config.source_url import base_name
from kdist_trainer.errors import ConfigError, DataError, KdistTrainerError
from kdist_trainer.fetch.http_client import (
    TIMEOUT_SECONDS,
    StatusError,
    WebClient,
    read_authorization,
    read_chunks,
)
from kdist_trainer.fetch.request import FetchRequest
from kdist_trainer.fetch.source import ChangedError, FileBody, RemoteFile, TransientError

_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
UNAUTHORIZED: Final = 401
_DENIED: Final = frozenset({401, 403, 407})
_MISSING: Final = frozenset({404, 410})
_NO_SUCH_RANGE: Final = 416
_PARTIAL: Final = 206


class WebSource:
    """One file, which its URL names."""

    parallel = 8

    def __init__(self, request: FetchRequest) -> None:
        """Prepare, without a request. Raises `ConfigError`."""
        self._request = request
        self._parent = request.url.rpartition("/")[0]
        self._client = WebClient(
            read_authorization(AUTHORIZATION, request.field),
            timeout=min(TIMEOUT_SECONDS, request.stall_seconds),
        )

    def list_files(self) -> list[RemoteFile]:
        """The file."""
        return [self._inspect(base_name(self._request.url))]

    def find_files(self, names: Sequence[str]) -> list[RemoteFile]:
        """Files in the same folder."""
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
        url, validator = self._url(file.name), _strong(file)
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
    """The content of a file from byte `start` on, or from 0.

    Args:
        client: makes the request.
        url: of the file.
        file: as it was listed. A reply with another size or version raises `ChangedError`.
        start: the first byte to ask for.
        validator: the version on which a range is conditional; without one the URL itself stands
            for one version.
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
            total = _check_range(response, start)
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


def _strong(file: RemoteFile) -> str:
    """What a range may be conditional on; empty for none."""
    return file.etag if file.etag and not file.etag.startswith("W/") else file.modified


def _check_range(response: http.client.HTTPResponse, start: int) -> int | None:
    found = _RANGE.fullmatch(response.headers.get("Content-Range", "").strip())
    if found is None or int(found[1]) != start:
        raise TransientError("the server sent another range than it was asked for")
    return int(found[2]) if found[2] != "*" else None


def _check_version(response: http.client.HTTPResponse, file: RemoteFile) -> None:
    for header, known in (("ETag", file.etag), ("Last-Modified", file.modified)):
        found = response.headers.get(header, "")
        if known and found:
            if found != known:
                raise ChangedError(f"its {header} is {found} instead of {known}")
            return
