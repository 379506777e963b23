"""Requests to object stores by obstore, one attempt each, and what their errors mean.

obstore is imported when a client is made. It starts threads of its own, which do not survive a
fork: make a client in the process that uses it. Bodies are signed by their SHA-256, so a store
takes none that was damaged on its way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from kdist_trainer.object_store.errors import FailureKind, RequestError, request_error
from kdist_trainer.object_store.location import ObjectLocation
from kdist_trainer.object_store.retry import LONGEST_WAIT_SECONDS, REQUEST_SHARE

if TYPE_CHECKING:
    from obstore import GetOptions, PutMode, UpdateVersion, WritableFile
    from obstore.store import ClientConfig, RetryConfig
    from obstore.store import ObjectStore as Backend

CONNECT_SECONDS: Final = 5.0
PAGE: Final = 1000


@dataclass(frozen=True)
class Tag:
    """One version of an object. S3 and Azure compare `etag`, Google `version`."""

    etag: str = ""
    version: str = ""


NO_TAG: Final = Tag()


@dataclass(frozen=True)
class Stored:
    """An object's content and its version."""

    data: bytes
    tag: Tag


@dataclass(frozen=True)
class ObjectInfo:
    """An object in a listing: its name below the store's prefix, its size in bytes, when it was
    written by the store's clock, and its version.
    """

    name: str
    size: int
    modified: datetime
    tag: Tag = NO_TAG


class Client:
    """Requests for objects below one location. Every method raises `RequestError`; safe to use from
    several threads.
    """

    def __init__(self, location: ObjectLocation, retry_seconds: float) -> None:
        try:
            import obstore
        except ImportError:
            raise ImportError(
                f"{location} needs the package obstore: pip install 'obstore>=0.12'"
            ) from None
        self._obstore = obstore
        request = timedelta(seconds=max(retry_seconds * REQUEST_SHARE, 0.1))
        self._backend = _backend(location, timeout=request, retry_seconds=0)
        # Streams retry their parts themselves, since only they still have them.
        self._streaming = _backend(
            location, timeout=timedelta(seconds=retry_seconds), retry_seconds=retry_seconds
        )

    def get(self, name: str, max_bytes: int) -> Stored:
        """A whole object, unless it is larger."""
        with _translated():
            found = self._obstore.get(self._backend, name)
            meta = found.meta
            size = meta["size"]
            if size > max_bytes:
                raise RequestError(
                    FailureKind.TOO_LARGE,
                    f"it has {size} bytes, more than the {max_bytes} it may have",
                )
            data = bytes(found.bytes())
        _check_length(data, size)
        return Stored(data, _tag(meta))

    def get_range(
        self, name: str, start: int, length: int, size: int, tag: Tag = NO_TAG
    ) -> memoryview:
        """`length` bytes from byte `start` of an object of `size` bytes, of the version with this
        tag if it has one. They are not copied.
        """
        options: GetOptions = {"range": (start, start + length)}
        if tag.etag:
            options["if_match"] = tag.etag
        with _translated():
            found = self._obstore.get(self._backend, name, options=options)
            actual, etag = found.meta["size"], found.meta["e_tag"]
            if actual != size:
                raise RequestError(FailureKind.CHANGED, f"it has {actual} bytes instead of {size}")
            if tag.etag and etag and etag != tag.etag:
                raise RequestError(FailureKind.CHANGED, "it is another version")
            data = memoryview(found.bytes())
        _check_length(data, length)
        return data

    def put(
        self, name: str, data: bytes, condition: Tag | None = None, *, new: bool = False
    ) -> Tag:
        """Write an object by one request: any, only a `new` one, or one that still has the tag."""
        mode: PutMode = "create" if new else "overwrite" if condition is None else _mode(condition)
        with _translated():
            return _tag(
                self._obstore.put(self._backend, name, data, mode=mode, use_multipart=False)
            )

    def info(self, name: str) -> ObjectInfo:
        """Size and time of an object."""
        with _translated():
            return _info(self._obstore.head(self._backend, name))

    def list(self, prefix: str, after: str | None) -> Iterator[Sequence[ObjectInfo]]:
        """Pages of the objects below a prefix whose names come after one."""
        with _translated():
            for page in self._obstore.list(
                self._backend, prefix or None, offset=after, chunk_size=PAGE
            ):
                yield [_info(one) for one in page]

    def list_folders(self, prefix: str) -> Sequence[str]:
        """Prefixes directly below a prefix."""
        with _translated():
            found = self._obstore.list_with_delimiter(self._backend, prefix or None)
        return sorted(found["common_prefixes"])

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects."""
        with _translated():
            self._obstore.delete(self._backend, names)

    def copy(self, name: str, target: str) -> None:
        """Have the store copy an object."""
        with _translated():
            self._obstore.copy(self._backend, name, target)

    def open_writer(self, name: str, part_bytes: int, parallel: int) -> WritableFile:
        """A stream into a new object, whose own methods raise other errors."""
        with _translated():
            return self._obstore.open_writer(
                self._streaming, name, buffer_size=part_bytes, max_concurrency=parallel
            )


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (RequestError, GeneratorExit):
        raise
    except Exception as error:  # noqa: BLE001 - the library has a dozen types without a base
        raise request_error(error) from None


def _check_length(data: bytes | memoryview, length: int) -> None:
    if len(data) != length:
        raise RequestError(FailureKind.TRANSIENT, f"{len(data)} bytes came instead of {length}")


def _tag(found: Any) -> Tag:
    return Tag(found["e_tag"] or "", found["version"] or "")


def _mode(tag: Tag) -> UpdateVersion:
    mode: UpdateVersion = {}
    if tag.etag:
        mode["e_tag"] = tag.etag
    if tag.version:
        mode["version"] = tag.version
    return mode


def _info(meta: Any) -> ObjectInfo:
    return ObjectInfo(meta["path"], meta["size"], meta["last_modified"], _tag(meta))


def _backend(location: ObjectLocation, *, timeout: timedelta, retry_seconds: float) -> Backend:
    connect = min(timeout, timedelta(seconds=CONNECT_SECONDS))
    options: ClientConfig = {
        "timeout": timeout,
        "connect_timeout": connect,
        "allow_http": location.endpoint.startswith("http://"),
        "user_agent": "kdist",
    }
    retry: RetryConfig = {
        "max_retries": 10_000 if retry_seconds else 0,
        "retry_timeout": timedelta(seconds=retry_seconds),
        "backoff": {"max_backoff": timedelta(seconds=LONGEST_WAIT_SECONDS)},
    }
    build: dict[str, Callable[..., Backend]] = {"s3": _s3, "gs": _google, "az": _azure}
    try:
        return build[location.scheme](
            location, prefix=location.prefix or None, client_options=options, retry_config=retry
        )
    except Exception as error:  # noqa: BLE001 - the library has a dozen types without a base
        # no request was made: what is in the environment cannot be used
        raise RequestError(FailureKind.UNIDENTIFIED, request_error(error).cause) from None


def _s3(location: ObjectLocation, **arguments: Any) -> Backend:
    from obstore.store import S3Store

    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    config: dict[str, Any] = {"region": location.region or region or "us-east-1"}
    if location.endpoint:
        # servers of one's own seldom have a host name for each bucket
        config |= {"endpoint": location.endpoint, "virtual_hosted_style_request": False}
    return S3Store(location.bucket, config=config, **arguments)  # type: ignore[arg-type]


def _google(location: ObjectLocation, **arguments: Any) -> Backend:
    from obstore.store import GCSStore

    config: dict[str, Any] = {"base_url": location.endpoint} if location.endpoint else {}
    return GCSStore(location.bucket, config=config, **arguments)  # type: ignore[arg-type]


def _azure(location: ObjectLocation, **arguments: Any) -> Backend:
    from obstore.store import AzureStore

    config: dict[str, Any] = {"endpoint": location.endpoint} if location.endpoint else {}
    return AzureStore(location.bucket, config=config, **arguments)  # type: ignore[arg-type]
