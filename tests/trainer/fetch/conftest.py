"""Places to fetch from."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.fetch.program import Ended, Program, start
from tests.trainer.fetch.web_server import WebServer
from tests.trainer.object_store.s3_server import ACCESS_KEY, BUCKET, SECRET, Entry, S3Server
from tests.trainer.object_store.versitygw import versitygw


@pytest.fixture
def web() -> Iterator[WebServer]:
    """A server of files."""
    with WebServer() as server:
        yield server


@dataclass
class Bucket:
    """A bucket, and fetches from it with its credential."""

    endpoint: str
    server: S3Server | None = None
    root: Path | None = None

    def put(self, name: str, data: bytes, *, tag: str = "first") -> None:
        """Store an object."""
        if self.server is not None:
            self.server.objects[name] = Entry(data, f'"{tag}"', time.time())
        elif self.root is not None:
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def start(self, name: str, folder: Path, *options: str, **variables: Any) -> Program:
        """Start a fetch of an object or a prefix."""
        credential = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        url = f"s3://{BUCKET}/{name}".rstrip("/")
        return start(url, folder, "--endpoint", self.endpoint, *options, **(credential | variables))

    def fetch(self, name: str, folder: Path, *options: str, **variables: Any) -> Ended:
        """Run a fetch to its end."""
        return self.start(name, folder, *options, **variables).wait()

    def got(self, name: str) -> list[str]:
        """The ranges that were read of an object; only of our server."""
        assert self.server is not None
        return [
            one.headers.get("range", "")
            for one in self.server.requests
            if one.method == "GET" and one.key == name
        ]


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    """A bucket on our server, which lists three objects a page."""
    with S3Server(page=3) as server:
        yield Bucket(server.endpoint, server)


@pytest.fixture(scope="session")
def _real_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    folder = tmp_path_factory.mktemp("versitygw")
    with versitygw(folder, access_key=ACCESS_KEY, secret=SECRET, bucket=BUCKET) as endpoint:
        yield Bucket(endpoint, root=folder / "data" / BUCKET)


@pytest.fixture(params=["ours", pytest.param("versitygw", marks=pytest.mark.e2e)])
def any_bucket(request: pytest.FixtureRequest) -> Bucket:
    """A bucket on our server, and one on a real one."""
    name = "bucket" if request.param == "ours" else "_real_store"
    found: Bucket = request.getfixturevalue(name)
    return found
