"""Fetches one file: continues what has come, repeats what fails, compares the digest."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kdist_trainer.errors import DataError
from kdist_trainer.fetch.folder import FetchFolder, is_full
from kdist_trainer.fetch.progress import FetchProgress, FetchStopped, Retries, RetryPolicy
from kdist_trainer.fetch.request import FetchRequest
from kdist_trainer.fetch.source import ChangedError, FetchSource, RemoteFile, TransientError
from kdist_trainer.fetch.space import full_error, too_large_error

_READ_BYTES: Final = 1 << 20


class Transfer:
    """Fetches files into a folder. Safe to use from several threads, for different files."""

    def __init__(
        self,
        request: FetchRequest,
        source: FetchSource,
        folder: FetchFolder,
        progress: FetchProgress,
        policy: RetryPolicy,
    ) -> None:
        self._request = request
        self._source = source
        self._folder = folder
        self._progress = progress
        self._policy = policy

    def fetch(self, file: RemoteFile, digest: str = "", *, most: int | None = None) -> None:
        """Fetch a file, unless it is there.

        Args:
            file: as it was listed.
            digest: its SHA-256; empty if it is not known.
            most: the most bytes that it may have; None for any number.

        Raises:
            ChangedError: it is no longer the listed one.
            DataError: it is too large, or its digest is another one twice.
            StorageError: the server failed for too long.
            FetchStopped: the fetch has failed otherwise.
            OSError: this machine's disk failed.
        """
        wanted = digest or file.sha256
        found = self._check_present(file, wanted)
        for is_last in (False, True):
            if found is None:
                found = self._download(file, is_hashed=bool(wanted), most=most)
                if found == wanted:
                    self._folder.finish(file, found)
            if found == wanted:
                break
            self._folder.discard(file.name)
            self._progress.set_position(file.name, 0)
            if is_last:
                raise DataError(
                    f"{self._request.field}: the SHA-256 of {file.name} is {found} instead of "
                    f"{wanted}, also when it is fetched again: correct the digest, or the file "
                    f"at {self._request.url}"
                )
            found = None
        self._progress.set_position(file.name, (self._folder.files / file.name).stat().st_size)
        self._progress.finish_file()

    def _check_present(self, file: RemoteFile, wanted: str) -> str | None:
        """The digest of the complete file, empty if none is wanted; None if it is not there."""
        if not self._folder.is_complete(file):
            return None
        if not wanted or self._folder.digest(file) == wanted:
            return wanted
        found = hash_file(self._folder.files / file.name)
        self._folder.record_digest(file, found)
        return found

    def _download(self, file: RemoteFile, *, is_hashed: bool, most: int | None) -> str:
        retries = Retries(self._policy)
        while True:
            try:
                return self._continue(file, is_hashed=is_hashed, most=most)
            except TransientError as error:
                retries.wait(file.name, error)

    def _continue(self, file: RemoteFile, *, is_hashed: bool, most: int | None) -> str:
        """Fetch what is missing; returns the digest, empty if it is not wanted."""
        path = self._folder.partial(file)
        start = self._folder.partial_bytes(file)
        try:
            with path.open("r+b" if path.exists() else "w+b", buffering=0) as partial:
                digest = hashlib.sha256()
                if is_hashed:
                    _hash_start(partial, start, digest)
                position = start
                chunks: Iterator[bytes | memoryview] = iter(())
                if file.size is None or start < file.size:
                    body = self._source.read(file, start)
                    position, chunks = body.start, body.chunks
                    if position != start:
                        digest = hashlib.sha256()
                partial.truncate(position)
                partial.seek(position)
                self._progress.set_position(file.name, position)
                for chunk in chunks:
                    position += len(chunk)
                    self._check_chunk(position, most)
                    _write_all(partial, chunk)
                    if is_hashed:
                        digest.update(chunk)
                    self._progress.set_position(file.name, position)
        except OSError as error:
            if is_full(error):
                raise full_error(self._request, file, path) from None
            raise
        if file.size is not None and position != file.size:
            raise ChangedError(f"{position} bytes came instead of {file.size}")
        return digest.hexdigest() if is_hashed else ""

    def _check_chunk(self, position: int, most: int | None) -> None:
        if self._policy.stopped.is_set():
            raise FetchStopped
        if most is not None and position > most:
            raise too_large_error(self._request, at_least=position)


def hash_file(path: Path) -> str:
    """The SHA-256 of a file. Raises `OSError`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_start(file: io.FileIO, length: int, digest: hashlib._Hash) -> None:
    left = length
    while left > 0 and (chunk := file.read(min(left, _READ_BYTES))):
        digest.update(chunk)
        left -= len(chunk)


def _write_all(file: io.FileIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
