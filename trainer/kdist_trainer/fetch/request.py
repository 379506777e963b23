"""What is to be fetched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kdist_trainer.config import source_url
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
        """That of the URL."""
        return self.url.partition("://")[0]

    def check(self) -> None:
        """Raise `ConfigError` for a URL or an address that cannot be one, without repeating it."""
        if problem := source_url.find_problem(self.url):
            raise ConfigError(f"{self.field}.url {problem}")
        if self.endpoint and (problem := source_url.find_server_problem(self.endpoint)):
            raise ConfigError(f"{self.field}.endpoint {problem}")
