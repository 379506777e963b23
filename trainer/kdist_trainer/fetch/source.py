"""What a place to fetch from can do, and what can go wrong there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


class TransientError(Exception):
    """A request failed, and may succeed when it is repeated; `wait_seconds` is how long the server
    asks to wait.
    """

    def __init__(self, reason: str, wait_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_seconds = wait_seconds


class ChangedError(Exception):
    """The file is no longer the listed one: it was changed or removed."""


@dataclass(frozen=True)
class RemoteFile:
    """A file to fetch.

    Attributes:
        name: Its path below the folder of files.
        size: In bytes; None if the server does not say.
        etag: The name of its version.
        modified: When it was changed, which stands for the version where there is no `etag`.
        sha256: Its digest, if the source knows it.
    """

    name: str
    size: int | None
    etag: str = ""
    modified: str = ""
    sha256: str = ""

    @property
    def tag(self) -> str:
        """Tells this version from others; empty if nothing does."""
        return self.etag or self.modified


@dataclass(frozen=True)
class FileBody:
    """The content of a file from byte `start` on, which is 0 where the server knows no ranges.
    Iterating raises `TransientError`, `ChangedError`, or an error that ends the fetch.
    """

    start: int
    chunks: Iterator[bytes | memoryview]


class FetchSource(Protocol):
    """A place to fetch from. Safe to use from several threads.

    Methods raise `TransientError`; `ConfigError` without a credential; `DataError` if it is refused
    or for good.
    """

    parallel: int
    """How many files to fetch at a time."""

    def list_files(self) -> list[RemoteFile]:
        """The files that the URL names, at least one."""
        ...

    def find_files(self, names: Sequence[str]) -> list[RemoteFile]:
        """These files in the folder of the one file that the URL names, of those that are there."""
        ...

    def read(self, file: RemoteFile, start: int) -> FileBody:
        """The content from byte `start` on, or from 0."""
        ...
