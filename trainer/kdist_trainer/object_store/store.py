"""An object store: its location, which contains no credential; the requests, through obstore; the
operations on objects; and paths with the part of pathlib's interface that checkpoints use.

Each operation has one time limit, within which it is tried again after transient errors: 5xx, 429,
timeouts, lost connections. A conditional write whose reply was lost may have succeeded, and then
its next attempt conflicts with it: the object is read back and compared. So callers put something
into the content that no other writer would put there.

obstore is imported when a client is made. It starts threads of its own, which do not survive a
fork: make a client in the process that uses it. Requests are signed with the SHA-256 of the body,
so a store rejects one that was damaged on the way.
"""

from __future__ import annotations

import errno
import io
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import SplitResult, urlsplit

from kdist_trainer.formats import OBJECT_STORES
from kdist_trainer.object_store.errors import (
    FailureKind,
    ObjectChangedError,
    ObjectTimeoutError,
    RequestError,
    public_error,
    request_error,
)
from kdist_trainer.object_store.files import BLOCK_BYTES, ObjectReader, ObjectWriter

if TYPE_CHECKING:
    from obstore import GetOptions, PutMode, UpdateVersion, WritableFile
    from obstore.store import ClientConfig, RetryConfig
    from obstore.store import ObjectStore as Backend


_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
# The characters that all stores and clients encode alike.
_NAME = re.compile(r"[A-Za-z0-9 !$&'()+,\-.:;=@_/]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_LONGEST_NAME = 900
_REGION = re.compile(r"[a-z0-9-]*")


@dataclass(frozen=True)
class ObjectLocation:
    """A bucket and a prefix in it, such as `s3://bucket/prefix`; `az://` names a container.

    Raises `ValueError` for any other URL, and for one that contains a credential.
    """

    url: str
    endpoint: str = ""
    """URL of the service, unless it is the cloud's own."""
    region: str = ""
    """For S3; empty means `AWS_REGION`."""

    def __post_init__(self) -> None:
        parts = _split(self.url, "location")
        if parts.scheme not in OBJECT_STORES:
            known = ", ".join(f"{one}://" for one in OBJECT_STORES)
            raise ValueError(f"a location starts with one of {known}, not {parts.scheme}://")
        if _BUCKET.fullmatch(parts.netloc) is None:
            raise ValueError(f"{parts.netloc!r} is no name of a bucket")
        prefix = parts.path.strip("/")
        if prefix:
            check_name(prefix)
        if self.endpoint:
            endpoint = _split(self.endpoint, "endpoint")
            if endpoint.scheme not in {"http", "https"} or not endpoint.netloc:
                raise ValueError("an endpoint starts with http:// or https:// and names a host")
        if _REGION.fullmatch(self.region) is None:
            raise ValueError(f"{self.region!r} is no region")
        object.__setattr__(self, "url", f"{parts.scheme}://{parts.netloc}/{prefix}".rstrip("/"))
        object.__setattr__(self, "endpoint", self.endpoint.rstrip("/"))

    @property
    def scheme(self) -> str:
        return urlsplit(self.url).scheme

    @property
    def bucket(self) -> str:
        return urlsplit(self.url).netloc

    @property
    def prefix(self) -> str:
        """Without a slash at either end; empty for the whole bucket."""
        return urlsplit(self.url).path.strip("/")

    def __str__(self) -> str:
        return self.url


def check_name(name: str) -> None:
    """Raise `ValueError` unless this can be the name of an object: parts of ASCII letters, digits
    and some punctuation, separated by single slashes.
    """
    parts = name.split("/")
    if (
        _NAME.fullmatch(name) is None
        or len(name) > _LONGEST_NAME
        or any(part in {"", ".", ".."} for part in parts)
    ):
        raise ValueError(f"{name!r} is no name of an object")


def check_readable(name: str) -> None:
    """Raise `ValueError` unless an object with this name can be read: it has parts that are neither
    empty nor `.` or `..`, separated by single slashes, and no control characters.
    """
    if _CONTROL.search(name) or any(part in {"", ".", ".."} for part in name.split("/")):
        raise ValueError(f"{name!r} is no name of an object that can be read")


def _split(url: str, kind: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError(f"a {kind} is a URL") from None
    if "@" in parts.netloc or parts.query or parts.fragment or "?" in url or "#" in url:
        # not repeated here, since it may contain a password
        raise ValueError(
            f"a {kind} contains no user, password or query: credentials come from the environment"
        )
    return parts


FIRST_WAIT_SECONDS: Final = 0.1
LONGEST_WAIT_SECONDS: Final = 5.0
# An attempt begins in the first half of the time and takes at most a quarter, so the last quarter
# is left for reading back.
BEGIN_SHARE: Final = 0.5
REQUEST_SHARE: Final = 0.25


class Attempts:
    """The attempts of one call, with waits that double and are random, so that ranks that failed
    together do not retry together.
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
    written according to the store's clock, and its version.
    """

    name: str
    size: int
    modified: datetime
    tag: Tag = NO_TAG


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except RequestError:
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
    arguments: dict[str, Any] = {
        "prefix": location.prefix or None,
        "client_options": options,
        "retry_config": retry,
    }
    try:
        from obstore.store import AzureStore, GCSStore, S3Store

        if location.scheme == "gs":
            config = {"base_url": location.endpoint} if location.endpoint else {}
            return GCSStore(location.bucket, config=config, **arguments)  # type: ignore[arg-type]
        if location.scheme == "az":
            config = {"endpoint": location.endpoint} if location.endpoint else {}
            return AzureStore(location.bucket, config=config, **arguments)  # type: ignore[arg-type]
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        of_s3: dict[str, Any] = {"region": location.region or region or "us-east-1"}
        if location.endpoint:
            # other servers seldom have a host name for each bucket
            of_s3 |= {"endpoint": location.endpoint, "virtual_hosted_style_request": False}
        return S3Store(location.bucket, config=of_s3, **arguments)  # type: ignore[arg-type]
    except Exception as error:  # noqa: BLE001 - the library has a dozen types without a base
        # no request was made: the settings in the environment cannot be used
        raise RequestError(FailureKind.UNIDENTIFIED, request_error(error).cause) from None


RETRY_SECONDS: Final = 60.0
DELETE_BATCH: Final = 1000
# The metadata service of a node that has just started may need a moment.
IDENTITY_ATTEMPTS: Final = 3

T = TypeVar("T")
_Infos = list[ObjectInfo]  # in the class, `list` is the method
_Names = list[str]


class ObjectStore:
    """The objects below one location. Names are relative to it. Thread-safe.

    Every method raises `OSError` with a sentence that names the object: `ObjectAccessError` if the
    credential is missing or refused, `ObjectTimeoutError` after `retry_seconds`; and `ValueError`
    for an invalid name.
    """

    def __init__(
        self,
        location: ObjectLocation,
        *,
        retry_seconds: float = RETRY_SECONDS,
        any_names: bool = False,
    ) -> None:
        """Prepare requests, without making one. The library's threads start with the first one.

        Args:
            location: the bucket and prefix.
            retry_seconds: how long a call may take with all its attempts. A stream may take that
                long for each of its parts.
            any_names: whether names are accepted that kdist would not give, to read the objects of
                others.

        Raises:
            ImportError: obstore is not installed.
            OSError: the environment's settings for the service cannot be used.
        """
        self.location = location
        self._seconds = retry_seconds
        self._check_name = check_readable if any_names else check_name
        try:
            import obstore
        except ImportError:
            raise ImportError(
                f"{location} needs the package obstore: pip install 'obstore>=0.12'"
            ) from None
        self._obstore = obstore
        request = timedelta(seconds=max(retry_seconds * REQUEST_SHARE, 0.1))
        try:
            self._backend = _backend(location, timeout=request, retry_seconds=0)
            # obstore retries the parts of a stream itself, since nobody else still has them.
            self._streaming = _backend(
                location, timeout=timedelta(seconds=retry_seconds), retry_seconds=retry_seconds
            )
        except RequestError as error:
            raise public_error(f"use {location}", location.scheme, error) from None

    def get(self, name: str, max_bytes: int) -> Stored:
        """Read a whole object of at most `max_bytes`. Raises `FileNotFoundError` or `OSError`."""
        return self._call("get", name, lambda: self._get_once(name, max_bytes))

    @_translated()
    def _get_once(self, name: str, max_bytes: int) -> Stored:
        found = self._obstore.get(self._backend, name)
        size = found.meta["size"]
        if size > max_bytes:
            raise RequestError(
                FailureKind.TOO_LARGE, f"it has {size} bytes, more than the {max_bytes} it may have"
            )
        data = bytes(found.bytes())
        _check_length(data, size)
        return Stored(data, _tag(found.meta))

    def info(self, name: str) -> ObjectInfo:
        """An object's size, time and version. Raises `FileNotFoundError` or `OSError`."""
        return self._call("inspect", name, lambda: _info(self._obstore.head(self._backend, name)))

    def put(self, name: str, data: bytes) -> Tag:
        """Write an object unconditionally: the last writer wins. Raises `OSError`."""
        return self._call("put", name, lambda: self._put_once(name, data, "overwrite"))

    @_translated()
    def _put_once(self, name: str, data: bytes, mode: PutMode) -> Tag:
        return _tag(self._obstore.put(self._backend, name, data, mode=mode, use_multipart=False))

    def put_new(self, name: str, data: bytes) -> Tag:
        """Create an object unless it exists, with content that no other writer would write; of many
        callers, one succeeds. Returns its tag, also if an earlier attempt with this content had
        created it.

        Raises:
            FileExistsError: there is an object with other content.
            ObjectTimeoutError: the time has run out; a late request may still create it.
            OSError: it failed for another reason.
        """
        return self._put_if(name, data, None)

    def replace(self, name: str, data: bytes, tag: Tag) -> Tag:
        """Replace an object by content that no other writer would write, if it is still the version
        that `tag` names. Returns the new tag, also if an earlier attempt with this content had
        replaced it.

        Raises:
            ObjectChangedError: another writer has changed or deleted it.
            ObjectTimeoutError: the time has run out; a late request may still replace it.
            OSError: it failed for another reason.
        """
        return self._put_if(name, data, tag)

    def _put_if(self, name: str, data: bytes, tag: Tag | None) -> Tag:
        """Replace the object if it has this tag; without a tag, create it unless it exists."""
        attempts, verb = self._begin(name), "create" if tag is None else "replace"
        while True:
            try:
                return self._put_once(name, data, "create" if tag is None else _mode(tag))
            except RequestError as error:
                if error.kind is (FailureKind.EXISTS if tag is None else FailureKind.CHANGED):
                    found = self._read_back(verb, name, data, attempts)
                    # if there is none to create, a concurrent request was in the way and has failed
                    if found is not None or tag is not None:
                        return self._own(found, name, data, tag)
                # to replace, EXISTS means a concurrent request
                elif error.kind not in {FailureKind.TRANSIENT, FailureKind.EXISTS}:
                    raise self._error(verb, name, error, attempts) from None
                if not attempts.another():
                    with suppress(RequestError):
                        found = self._read_once(name, data)
                        if found.data == data or found.tag != tag:
                            return self._own(found, name, data, tag)
                    raise ObjectTimeoutError(
                        errno.ETIMEDOUT,
                        f"cannot {verb} {self.location}/{name}: {error.cause}, after {attempts}; "
                        "a late request may still do it",
                    ) from None

    def list(self, prefix: str = "") -> _Infos:
        """All objects below a prefix, which ends with a whole part of a name, sorted by name."""
        found: _Infos = []

        def read_pages() -> None:
            after = found[-1].name if found else None
            for page in self._obstore.list(
                self._backend, prefix or None, offset=after, chunk_size=PAGE
            ):
                found.extend(_info(one) for one in page)

        self._call("list", prefix, read_pages, self._begin_listing(prefix))
        return found

    def list_folders(self, prefix: str = "") -> _Names:
        """The prefixes one level below a prefix, without a slash at the end, sorted."""
        found = self._call(
            "list",
            prefix,
            lambda: self._obstore.list_with_delimiter(self._backend, prefix or None),
            self._begin_listing(prefix),
        )
        return sorted(found["common_prefixes"])

    def delete(self, name: str) -> None:
        """Delete an object; a missing one is no error. Raises `OSError`."""
        self._delete([name])

    def delete_prefix(self, prefix: str) -> None:
        """Delete all objects that are below a prefix now; after an `OSError` some may be left."""
        names = [one.name for one in self.list(prefix)]
        for start in range(0, len(names), DELETE_BATCH):
            self._delete(names[start : start + DELETE_BATCH])

    def rename(self, name: str, target: str) -> None:
        """Have the store copy an object, then delete the original. If an error leaves both, both
        are complete. Raises `FileNotFoundError` or `OSError`.
        """
        check_name(target)
        self._call("copy", name, lambda: self._obstore.copy(self._backend, name, target))
        self.delete(name)

    def create(self, name: str) -> ObjectWriter:
        """A stream into a large object whose name nobody else uses. Raises `OSError`."""
        check_name(name)
        return ObjectWriter(self, name)

    @_translated()
    def open_upload(self, name: str, part_bytes: int, parallel: int) -> WritableFile:
        """A stream into a new object. Raises `RequestError`, its methods the library's errors."""
        return self._obstore.open_writer(
            self._streaming, name, buffer_size=part_bytes, max_concurrency=parallel
        )

    def open(self, name: str, size: int) -> io.BufferedReader:
        """A file for reading an object of `size` bytes, which is seekable and reads ahead.

        Its methods raise `FileNotFoundError`, `ObjectChangedError` if the object has another size,
        or `OSError`.
        """
        check_name(name)
        return io.BufferedReader(ObjectReader(self, name, size), BLOCK_BYTES // 8)

    def stream(self, name: str) -> Iterator[bytes]:
        """The content of an object from start to end, in pieces. Raises `FileNotFoundError` or
        `OSError`, also between pieces.
        """
        size = self.info(name).size
        with ObjectReader(self, name, size) as file:
            while chunk := file.read(BLOCK_BYTES):
                yield chunk

    def read_range(
        self, name: str, start: int, length: int, size: int, tag: Tag = NO_TAG
    ) -> memoryview:
        """`length` bytes from byte `start` of an object of `size` bytes, without a copy. Raises as
        `open` does, and `ObjectChangedError` if the object no longer has this tag.
        """
        options: GetOptions = {"range": (start, start + length)}
        if tag.etag:
            options["if_match"] = tag.etag

        def read() -> memoryview:
            found = self._obstore.get(self._backend, name, options=options)
            actual, etag = found.meta["size"], found.meta["e_tag"]
            if actual != size:
                raise RequestError(FailureKind.CHANGED, f"it has {actual} bytes instead of {size}")
            if tag.etag and etag and etag != tag.etag:
                raise RequestError(FailureKind.CHANGED, "it is another version")
            data = memoryview(found.bytes())
            _check_length(data, length)
            return data

        return self._call("read", name, read)

    def _delete(self, names: _Names) -> None:
        try:
            self._call("delete", names[0], lambda: self._obstore.delete(self._backend, names))
        except FileNotFoundError:
            # Azure and Google report a missing object; others of the batch may be left
            if len(names) > 1:
                for name in names:
                    self._delete([name])

    def _begin(self, name: str) -> Attempts:
        self._check_name(name)
        return Attempts(self._seconds)

    def _begin_listing(self, prefix: str) -> Attempts:
        # an empty prefix is the location itself
        return self._begin(prefix) if prefix else Attempts(self._seconds)

    def _call(
        self, verb: str, name: str, request: Callable[[], T], attempts: Attempts | None = None
    ) -> T:
        """Make the request, again after transient errors."""
        attempts = attempts or self._begin(name)
        while True:
            try:
                with _translated():
                    return request()
            except RequestError as error:
                may_pass = error.kind is FailureKind.TRANSIENT or (
                    error.kind is FailureKind.UNIDENTIFIED and attempts.count < IDENTITY_ATTEMPTS
                )
                if not (may_pass and attempts.another()):
                    raise self._error(verb, name, error, attempts) from None

    def _read_back(self, verb: str, name: str, data: bytes, attempts: Attempts) -> Stored | None:
        """The object, without its content if that is larger than `data`; None if there is none."""
        try:
            return self._call(verb, name, lambda: self._read_once(name, data), attempts)
        except FileNotFoundError:
            return None

    def _read_once(self, name: str, data: bytes) -> Stored:
        try:
            return self._get_once(name, len(data))
        except RequestError as error:
            if error.kind is FailureKind.TOO_LARGE:
                return Stored(b"", Tag())
            raise

    def _own(self, found: Stored | None, name: str, data: bytes, tag: Tag | None) -> Tag:
        """The tag of what this writer has put there, or else the error, whose context is none."""
        if found is not None and found.data == data:
            return found.tag
        if tag is None:
            raise FileExistsError(errno.EEXIST, f"{self.location}/{name} exists") from None
        raise ObjectChangedError(
            errno.EIO, f"cannot replace {self.location}/{name}: another writer has changed it"
        ) from None

    def _error(self, verb: str, name: str, error: RequestError, attempts: Attempts) -> OSError:
        cause = error.cause
        if error.kind is FailureKind.TRANSIENT:
            cause += f", after {attempts}"
        operation = f"{verb} {self.location}/{name}".rstrip("/")
        return public_error(operation, self.location.scheme, RequestError(error.kind, cause))


def open_store(location: ObjectLocation) -> ObjectStore:
    """The store of this process for a location. Raises as `ObjectStore` does."""
    return _open_store(location, os.getpid())


@cache
def _open_store(location: ObjectLocation, _process: int) -> ObjectStore:
    """One for each process: its threads do not survive a fork."""
    return ObjectStore(location)


_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class ObjectPath:
    """The name of an object, or of the objects below it.

    There are no folders: one exists as long as there is an object below it. Writes are atomic, and
    visible to every reader at once.
    """

    store: ObjectStore
    key: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the name; another process uses it through a client of its own."""
        return _reopen, (self.store.location, self.key)

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.store, f"{self.key}/{name}" if self.key else name)

    def __str__(self) -> str:
        return f"{self.store.location}/{self.key}" if self.key else str(self.store.location)

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        """The path without its last part; the store is its own parent."""
        return ObjectPath(self.store, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> ObjectPath:
        return self.parent / name

    def read_bytes(self, max_bytes: int = _MOST_BYTES) -> bytes:
        return self.store.get(self.key, max_bytes).data

    def read_text(self, encoding: str = "utf-8") -> str:
        """The content as text. Raises `FileNotFoundError`, `OSError` or `UnicodeDecodeError`."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: bytes) -> None:
        """Replace the content. Raises `OSError`."""
        self.store.put(self.key, data)

    def is_dir(self) -> bool:
        """Whether there is an object below it. Raises `OSError`."""
        return bool(self.store.list(self.key))

    def exists(self) -> bool:
        """Whether it is an object. Raises `OSError`."""
        try:
            self.store.info(self.key)
        except FileNotFoundError:
            return False
        return True

    def modified_at(self) -> float:
        """When the object was written, in Unix seconds. Raises `FileNotFoundError` or `OSError`."""
        return self.store.info(self.key).modified.timestamp()

    def folders(self) -> Iterator[ObjectPath]:
        """The folders one level down. Raises `OSError`."""
        for key in self.store.list_folders(self.key):
            yield ObjectPath(self.store, key)

    def files(self) -> dict[str, int]:
        """The sizes in bytes of the objects below it, by relative name. Raises `OSError`."""
        prefix = f"{self.key}/" if self.key else ""
        return {found.name[len(prefix) :]: found.size for found in self.store.list(self.key)}

    def open(self, size: int) -> IO[bytes]:
        """Open an object of this size as a seekable file. Raises `OSError`."""
        return self.store.open(self.key, size)


def _reopen(location: ObjectLocation, key: str) -> ObjectPath:
    return ObjectPath(open_store(location), key)
