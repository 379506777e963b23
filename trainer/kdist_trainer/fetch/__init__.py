"""Fetches data and weights by URL: `python -m kdist_trainer.fetch` puts the files that a URL names
into a folder of this machine before a job starts, with progress, checksums and resume.

This module has what the others share: the request, and a file of a source, which is a place to
fetch from. `bucket` is the source for object stores, `web` has those for https:// and hf://. Their
methods, which several threads may call, raise `TransientError`; `ConfigError` without a credential;
`DataError` if the request is refused or for good. `fetcher` runs one fetch from start to end: it
lists the files, compares them with those that are there, downloads the missing ones, and decides
when and how long failed requests are repeated (`Retries`). Free of torch.

A fetch may be killed at any time. A file is moved to `files` when it is complete, and files of
another version are removed before `fetch.json` names the new one: so `files` has whole files of the
version that `fetch.json` names. Files are not synced, because a job would wait for the disk: after
a power failure, a file of the right size may lack content on file systems that give a file its size
first. Digests are compared once, when a file has arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kdist_trainer.config import sources
from kdist_trainer.errors import ConfigError

STALL_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class FetchRequest:
    """One fetch, as the command line gives it.

    Attributes:
        url: What to fetch, without credentials.
        folder: Where `files`, `partial` and `fetch.json` are.
        field: The field of job.yaml that asks for it, such as `spec.data[0]`.
        endpoint: The address of the server, if it is not the usual one.
        region: The region of an s3:// bucket.
        sha256: The digest of the file, or of SHA256SUMS; empty if it is not known.
        max_bytes: The most bytes of all files; None for any number.
        weights: Whether only weights are wanted of a repository of hf://.
        stall_seconds: How long to repeat failed requests without any progress.
    """

    url: str
    folder: Path
    field: str
    endpoint: str = ""
    region: str = ""
    sha256: str = ""
    max_bytes: int | None = None
    weights: bool = False
    stall_seconds: float = STALL_SECONDS

    @property
    def scheme(self) -> str:
        return self.url.partition("://")[0]

    def check(self) -> None:
        """Raise `ConfigError` for a URL or an address that cannot be one, without repeating it."""
        if problem := sources.find_problem(self.url):
            raise ConfigError(f"{self.field}.url {problem}")
        if self.endpoint and (problem := sources.find_server_problem(self.endpoint)):
            raise ConfigError(f"{self.field}.endpoint {problem}")


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
        """The name of this version; empty if there is none."""
        return self.etag or self.modified


@dataclass(frozen=True)
class FileBody:
    """The content of a file from byte `start` on, which is 0 where the server knows no ranges.
    Iterating raises `TransientError`, `ChangedError`, or an error that ends the fetch.
    """

    start: int
    chunks: Iterator[bytes | memoryview]
