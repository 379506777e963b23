"""Fetches from object stores: an object, or all objects below a prefix."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from kdist_trainer.errors import ConfigError, DataError
from kdist_trainer.fetch import (
    ChangedError,
    FetchRequest,
    FileBody,
    RemoteFile,
    TransientError,
)
from kdist_trainer.object_store.errors import (
    ObjectAccessError,
    ObjectChangedError,
    ObjectCredentialError,
    ObjectTimeoutError,
)
from kdist_trainer.object_store.store import (
    RETRY_SECONDS,
    ObjectInfo,
    ObjectLocation,
    ObjectStore,
    Tag,
)

PARALLEL: Final = 12
"""Ranges that are requested at a time."""
BLOCK_BYTES: Final = 4 << 20
SMALLEST_BLOCK: Final = 256 << 10

T = TypeVar("T")


class BucketSource:
    """One object, or those below a prefix. Large objects are read by ranges, several at a time and
    each on the condition that the object is the listed one.
    """

    parallel = PARALLEL

    def __init__(self, request: FetchRequest) -> None:
        """Prepare, without a request. Raises `ConfigError`, or `ImportError` without obstore."""
        scheme, _, rest = request.url.partition("://")
        bucket, _, key = rest.partition("/")
        self._request = request
        self._key = key.rstrip("/")
        self._folder = self._key
        seconds = min(RETRY_SECONDS, request.stall_seconds)
        try:
            location = ObjectLocation(f"{scheme}://{bucket}", request.endpoint, request.region)
        except ValueError as error:
            raise ConfigError(f"{request.field}: {error}") from None
        self._store = self._call(
            lambda: ObjectStore(location, retry_seconds=seconds, any_names=True)
        )
        self._block_bytes = BLOCK_BYTES
        self._open_bodies = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(PARALLEL, "block")

    def list_files(self) -> list[RemoteFile]:
        one = self._find(self._key) if self._key else None
        # an empty object may stand for a folder
        found = [] if one and one.size else self._call(lambda: self._store.list(self._key))
        if one and not found:
            self._folder = self._key.rpartition("/")[0]
            return [self._describe(one)]
        self._folder = self._key
        folders = {
            "/".join(parts[:depth])
            for parts in (one.name.split("/") for one in found)
            for depth in range(1, len(parts))
        }
        files = [self._describe(one) for one in found if one.size or one.name not in folders]
        if not files:
            raise DataError(
                f"{self._request.field}: there is neither an object {self._request.url} nor one "
                "below it: correct the URL"
            )
        return files

    def find_files(self, names: Sequence[str]) -> list[RemoteFile]:
        found = (self._find(self._key_of(name)) for name in names)
        return [self._describe(one) for one in found if one is not None]

    def read(self, file: RemoteFile, start: int) -> FileBody:
        return FileBody(start, self._read_blocks(file, start))

    def _read_blocks(self, file: RemoteFile, position: int) -> Iterator[memoryview]:
        size = file.size or 0
        waiting: deque[Future[memoryview]] = deque()
        with self._lock:
            self._open_bodies += 1
        try:
            while position < size or waiting:
                # a single file gets all ranges, many files get one each
                ahead = max(1, PARALLEL // self._open_bodies)
                while position < size and len(waiting) < ahead:
                    length = min(self._block_bytes, size - position)
                    waiting.append(self._pool.submit(self._read_block, file, position, length))
                    position += length
                yield waiting.popleft().result()
        finally:
            with self._lock:
                self._open_bodies -= 1
            for one in waiting:
                one.cancel()

    def _read_block(self, file: RemoteFile, start: int, length: int) -> memoryview:
        name, tag = self._key_of(file.name), Tag(file.etag)
        try:
            data = self._call(
                lambda: self._store.read_range(name, start, length, file.size or 0, tag)
            )
        except FileNotFoundError as error:
            raise ChangedError(str(error)) from None
        except TransientError:
            # a request has a limited time, too little for a whole block on a slow connection
            self._block_bytes = max(SMALLEST_BLOCK, self._block_bytes // 4)
            raise
        self._block_bytes = min(BLOCK_BYTES, 2 * self._block_bytes)
        return data

    def _find(self, key: str) -> ObjectInfo | None:
        try:
            return self._call(lambda: self._store.info(key))
        except FileNotFoundError:
            return None

    def _key_of(self, name: str) -> str:
        return f"{self._folder}/{name}" if self._folder else name

    def _describe(self, one: ObjectInfo) -> RemoteFile:
        name = one.name[len(self._folder) + 1 :] if self._folder else one.name
        return RemoteFile(name, one.size, one.tag.etag, one.modified.isoformat())

    def _call(self, call: Callable[[], T]) -> T:
        """Call, and raise the errors of a source, or `FileNotFoundError`."""
        field = self._request.field
        try:
            return call()
        except FileNotFoundError:
            raise
        except ObjectTimeoutError as error:
            raise TransientError(str(error)) from None
        except ObjectChangedError as error:
            raise ChangedError(str(error)) from None
        except ObjectCredentialError as error:
            raise ConfigError(f"{field}: {error}; {_by_secret(field)}") from None
        except ObjectAccessError as error:
            raise DataError(f"{field}: {error}; {_by_secret(field)}") from None
        except (OSError, ValueError) as error:
            raise DataError(f"{field}: {error}") from None


def _by_secret(field: str) -> str:
    return f"the keys of the Secret that {field}.secret names are set as variables"
