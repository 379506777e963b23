"""Stores for the tests: on our server, which fails on request, and on a real one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator

import pytest

from kdist_trainer.object_store.store import ObjectLocation, ObjectStore
from tests.trainer.object_store.s3_server import ACCESS_KEY, BUCKET, SECRET, S3Server
from tests.trainer.object_store.versitygw import versitygw

Open = Callable[..., ObjectStore]


@pytest.fixture(autouse=True)
def credential(monkeypatch: pytest.MonkeyPatch) -> None:
    """The credential of the servers, without any other setting of a cloud."""
    for name in tuple(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.fixture
def server() -> Iterator[S3Server]:
    """Our server, which lists three objects a page."""
    with S3Server(page=3) as server:
        yield server


@pytest.fixture
def open_store(server: S3Server) -> Open:
    """Opens a store on our server."""

    def make(*, bucket: str = BUCKET, retry_seconds: float = 20.0) -> ObjectStore:
        location = ObjectLocation(f"s3://{bucket}/a/prefix", endpoint=server.endpoint)
        return ObjectStore(location, retry_seconds=retry_seconds)

    return make


@pytest.fixture
def store(open_store: Open) -> ObjectStore:
    """A store on our server."""
    return open_store()


@pytest.fixture(scope="session")
def real_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Endpoint of a real S3 server."""
    folder = tmp_path_factory.mktemp("versitygw")
    with versitygw(folder, access_key=ACCESS_KEY, secret=SECRET, bucket=BUCKET) as endpoint:
        yield endpoint


@pytest.fixture(params=["ours", pytest.param("versitygw", marks=pytest.mark.e2e)])
def any_store(request: pytest.FixtureRequest) -> ObjectStore:
    """An empty store: on our server, and on a real one."""
    if request.param == "ours":
        store: ObjectStore = request.getfixturevalue("store")
        return store
    endpoint = request.getfixturevalue("real_endpoint")
    location = ObjectLocation(f"s3://{BUCKET}/{secrets.token_hex(8)}", endpoint=endpoint)
    return ObjectStore(location, retry_seconds=20.0)
