"""The operations on objects that everything else is made of.

Each call has one budget of time, in which it is tried again after errors that may pass: 5xx, 429,
timeouts, lost connections. A conditional write whose reply was lost may have been done, and then
meets itself when it is tried again: it is settled by reading back. So callers put something into
the content that no other writer would put there.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from functools import cache
from typing import Final, TypeVar

from kdist_trainer.object_store.client import NO_TAG, Client, ObjectInfo, Stored, Tag
from kdist_trainer.object_store.errors import (
    FailureKind,
    ObjectChangedError,
    ObjectTimeoutError,
    RequestError,
    public_error,
)
from kdist_trainer.object_store.location import ObjectLocation, check_name, check_readable
from kdist_trainer.object_store.reader import BLOCK_BYTES, ObjectReader
from kdist_trainer.object_store.retry import Attempts
from kdist_trainer.object_store.writer import ObjectWriter

RETRY_SECONDS: Final = 60.0
DELETE_BATCH: Final = 1000
# The metadata service of a node that has just started may need a moment.
IDENTITY_ATTEMPTS: Final = 3

T = TypeVar("T")
_Infos = list[ObjectInfo]
_Names = list[str]


class ObjectStore:
    """The objects below one location. Names are relative to it. Safe to use from several threads.

    Every method raises `OSError`, with a sentence that names the object: `ObjectAccessError` if the
    credential is missing or refused, `ObjectTimeoutError` if `retry_seconds` were not enough; and
    `ValueError` for a name that cannot be one.
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
            any_names: whether objects may have names that we would not give them; for reading what
                others have written.

        Raises:
            ImportError: obstore is not installed.
            OSError: what the environment says about the service cannot be used.
        """
        self.location = location
        self._seconds = retry_seconds
        self._check_name = check_readable if any_names else check_name
        try:
            self._client = Client(location, retry_seconds)
        except RequestError as error:
            raise public_error(f"use {location}", location.scheme, error) from None

    def get(self, name: str, max_bytes: int) -> Stored:
        """Read a whole object of at most `max_bytes`. Raises `FileNotFoundError` or `OSError`."""
        return self._call("get", name, lambda: self._client.get(name, max_bytes))

    def info(self, name: str) -> ObjectInfo:
        """Size of an object in bytes and when it was written. Raises `FileNotFoundError` or
        `OSError`.
        """
        return self._call("inspect", name, lambda: self._client.info(name))

    def put(self, name: str, data: bytes) -> Tag:
        """Write an object, whether there is one or not: the last writer wins. Raises `OSError`."""
        return self._call("put", name, lambda: self._client.put(name, data))

    def put_new(self, name: str, data: bytes) -> Tag:
        """Create an object, unless there is one; of many callers one succeeds.

        Args:
            name: the object.
            data: its content, which no other writer would write.

        Returns:
            Its tag, also if an earlier attempt with this content had created it.

        Raises:
            FileExistsError: there is an object with other content.
            ObjectTimeoutError: the time was over; it may still be created by a late request.
            OSError: it failed otherwise.
        """
        attempts = self._begin(name)
        while True:
            try:
                return self._client.put(name, data, new=True)
            except RequestError as error:
                if error.kind is FailureKind.EXISTS:
                    # without an object it was a request at the same time, which has failed since
                    found = self._read_back("create", name, data, attempts)
                    if found is not None:
                        return self._own(found, name, data)
                elif error.kind is not FailureKind.TRANSIENT:
                    raise self._error("create", name, error, attempts) from None
                if not attempts.another():
                    found = self._read_at_last(name, data)
                    if found is not None:
                        return self._own(found, name, data)
                    raise self._uncertain("create", name, error, attempts) from None

    def replace(self, name: str, data: bytes, tag: Tag) -> Tag:
        """Replace an object if it is still the version that `tag` names.

        Args:
            name: the object.
            data: its content, which no other writer would write.
            tag: of the version to replace, as another method returned it.

        Returns:
            The new tag, also if an earlier attempt with this content had replaced it.

        Raises:
            ObjectChangedError: another writer has changed or deleted it.
            ObjectTimeoutError: the time was over; it may still be replaced by a late request.
            OSError: it failed otherwise.
        """
        attempts = self._begin(name)
        while True:
            try:
                return self._client.put(name, data, tag)
            except RequestError as error:
                if error.kind is FailureKind.CHANGED:
                    found = self._read_back("replace", name, data, attempts)
                    if found is not None and found.data == data:
                        return found.tag
                    raise self._changed(name) from None
                # EXISTS stands for a request at the same time
                if error.kind not in {FailureKind.TRANSIENT, FailureKind.EXISTS}:
                    raise self._error("replace", name, error, attempts) from None
                if not attempts.another():
                    found = self._read_at_last(name, data)
                    if found is not None and found.data == data:
                        return found.tag
                    if found is not None and found.tag != tag:
                        raise self._changed(name) from None
                    raise self._uncertain("replace", name, error, attempts) from None

    def list(self, prefix: str = "") -> _Infos:
        """All objects below a prefix, which is a whole part of names, in the order of names. Raises
        `OSError`.
        """
        found: _Infos = []

        def read_on() -> None:
            for page in self._client.list(prefix, found[-1].name if found else None):
                found.extend(page)

        self._call("list", prefix, read_on, self._begin_listing(prefix))
        return found

    def list_folders(self, prefix: str = "") -> _Names:
        """What is directly below a prefix and has objects below it, as prefixes of names without a
        slash at the end, sorted. Raises `OSError`.
        """
        attempts = self._begin_listing(prefix)
        return list(self._call("list", prefix, lambda: self._client.list_folders(prefix), attempts))

    def delete(self, name: str) -> None:
        """Delete an object; a missing one is no error. Raises `OSError`."""
        self._delete([name])

    def delete_prefix(self, prefix: str) -> None:
        """Delete all objects that are below a prefix now. Raises `OSError`, after which some are
        left.
        """
        names = [one.name for one in self.list(prefix)]
        for start in range(0, len(names), DELETE_BATCH):
            self._delete(names[start : start + DELETE_BATCH])

    def rename(self, name: str, target: str) -> None:
        """Have the store copy an object, then delete it; of two objects after an error both are
        whole. Raises `FileNotFoundError` or `OSError`.
        """
        check_name(target)
        self._call("copy", name, lambda: self._client.copy(name, target))
        self.delete(name)

    def create(self, name: str) -> ObjectWriter:
        """A stream into a large object whose name nobody else uses. Raises `OSError`."""
        check_name(name)
        return ObjectWriter(self, name, self._client)

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
        """`length` bytes from byte `start` of an object of `size` bytes. Raises as `open` does, and
        `ObjectChangedError` if the object no longer has this tag.
        """
        return self._call(
            "read", name, lambda: self._client.get_range(name, start, length, size, tag)
        )

    def _delete(self, names: _Names) -> None:
        try:
            self._call("delete", names[0], lambda: self._client.delete(names))
        except FileNotFoundError:
            # Azure and Google say so; of several one may be left
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
        """Do it, again after errors that may pass."""
        attempts = attempts or self._begin(name)
        while True:
            try:
                return request()
            except RequestError as error:
                may_pass = error.kind is FailureKind.TRANSIENT or (
                    error.kind is FailureKind.UNIDENTIFIED and attempts.count < IDENTITY_ATTEMPTS
                )
                if not (may_pass and attempts.another()):
                    raise self._error(verb, name, error, attempts) from None

    def _read_back(self, verb: str, name: str, data: bytes, attempts: Attempts) -> Stored | None:
        """What is there, without content if it is larger than `data`; None if nothing is."""
        try:
            return self._call(verb, name, lambda: self._read_once(name, data), attempts)
        except FileNotFoundError:
            return None

    def _read_at_last(self, name: str, data: bytes) -> Stored | None:
        """The same by one attempt; None also if it fails."""
        try:
            return self._read_once(name, data)
        except RequestError:
            return None

    def _read_once(self, name: str, data: bytes) -> Stored:
        try:
            return self._client.get(name, len(data))
        except RequestError as error:
            if error.kind is FailureKind.TOO_LARGE:
                return Stored(b"", Tag())
            raise

    def _own(self, found: Stored, name: str, data: bytes) -> Tag:
        if found.data != data:
            raise FileExistsError(errno.EEXIST, f"{self.location}/{name} exists")
        return found.tag

    def _changed(self, name: str) -> ObjectChangedError:
        return ObjectChangedError(
            errno.EIO, f"cannot replace {self.location}/{name}: another writer has changed it"
        )

    def _uncertain(
        self, verb: str, name: str, error: RequestError, attempts: Attempts
    ) -> ObjectTimeoutError:
        return ObjectTimeoutError(
            errno.ETIMEDOUT,
            f"cannot {verb} {self.location}/{name}: {error.cause}, after {attempts}; "
            "a late request may still do it",
        )

    def _error(self, verb: str, name: str, error: RequestError, attempts: Attempts) -> OSError:
        cause = error.cause
        if error.kind is FailureKind.TRANSIENT:
            cause += f", after {attempts}"
        what = f"{verb} {self.location}/{name}".rstrip("/")
        return public_error(what, self.location.scheme, RequestError(error.kind, cause))


def open_store(location: ObjectLocation) -> ObjectStore:
    """The store of this process for a location. Raises as `ObjectStore` does."""
    return _open_store(location, os.getpid())


@cache
def _open_store(location: ObjectLocation, _process: int) -> ObjectStore:
    """One for each process: its threads do not survive a fork."""
    return ObjectStore(location)
