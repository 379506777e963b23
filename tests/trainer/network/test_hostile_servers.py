"""Every client of the trainer against servers that answer a byte a second, never, or too much: each
request ends within its deadline, with an error of that client.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kdist_trainer.errors import KdistTrainerError
from kdist_trainer.fetch import FetchRequest, TransientError
from kdist_trainer.fetch.web import HubSource, StatusError, WebClient, read_chunks
from kdist_trainer.object_store.errors import ObjectStoreError
from kdist_trainer.object_store.store import ObjectLocation, ObjectStore
from kdist_trainer.rendezvous import configmap_client
from kdist_trainer.rendezvous.configmap_client import (
    ApiEndpoint,
    ApiRejectedError,
    ApiUnavailableError,
    ConfigMap,
)
from tests import hostile

SECONDS = 0.4
ERRORS = (
    TransientError,
    StatusError,
    KdistTrainerError,
    ObjectStoreError,
    ApiUnavailableError,
    ApiRejectedError,
)
SLOW = (
    hostile.drip_headers,
    hostile.drip_body,
    hostile.drip_before_reading,
    hostile.stay_silent,
    hostile.send_headers_without_end,
    hostile.talk_nonsense,
)


def read_web(port: int, _: Path) -> None:
    """A file over HTTP."""
    response = WebClient(timeout=SECONDS).open(f"http://127.0.0.1:{port}/set.tar")
    list(read_chunks(response, None))


def read_hub(port: int, folder: Path) -> None:
    """The list of a repository's files."""
    endpoint = f"http://127.0.0.1:{port}"
    request = FetchRequest(
        url="hf://datasets/owner/name@main",
        folder=folder,
        field="spec.data[0]",
        endpoint=endpoint,
        stall_seconds=SECONDS,
    )
    HubSource(request).list_files()


def read_bucket(port: int, _: Path) -> None:
    """An object of a bucket."""
    location = ObjectLocation("s3://bucket/prefix", endpoint=f"http://127.0.0.1:{port}")
    ObjectStore(location, retry_seconds=SECONDS).get("LATEST", 1024)


def read_config_map(port: int, folder: Path) -> None:
    """The ConfigMap through which agents meet."""
    (folder / "token").write_text("secret")
    server = ApiEndpoint("127.0.0.1", port, "http", folder)
    ConfigMap(server, "ml", "digits", retry_seconds=lambda: 0.0).read()


CLIENTS: dict[str, Callable[[int, Path], None]] = {
    "web": read_web,
    "hub": read_hub,
    "bucket": read_bucket,
    "config-map": read_config_map,
}


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configmap_client, "REQUEST_SECONDS", SECONDS)
    for name, value in (("AWS_ACCESS_KEY_ID", "id"), ("AWS_SECRET_ACCESS_KEY", "key")):
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("behaviour", SLOW, ids=lambda each: each.__name__)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_request_ends_within_its_deadline(
    client: str, behaviour: hostile.Behaviour, tmp_path: Path
) -> None:
    with hostile.serve(behaviour) as server:
        began = time.monotonic()
        with pytest.raises(ERRORS):
            CLIENTS[client](server.port, tmp_path)
        assert time.monotonic() - began < hostile.LIFE_SECONDS / 2
        assert server.connections > 0


@pytest.mark.parametrize("client", CLIENTS)
def test_a_server_that_redirects_to_a_slow_one_holds_nobody_up_either(
    client: str, tmp_path: Path
) -> None:
    with (
        hostile.serve(hostile.drip_headers) as slow,
        hostile.serve(hostile.redirect_to(slow.port)) as server,
    ):
        began = time.monotonic()
        with pytest.raises(ERRORS):
            CLIENTS[client](server.port, tmp_path)
        assert time.monotonic() - began < hostile.LIFE_SECONDS / 2


def test_a_file_that_keeps_coming_may_take_longer_than_the_time_out() -> None:
    def serve_slowly(connection: hostile.Connection, closed: hostile.Closed) -> None:
        hostile.read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10240\r\n\r\n")
        for _ in range(10):
            connection.sendall(b"x" * 1024)
            closed.wait(SECONDS / 4)

    with hostile.serve(serve_slowly) as server:
        response = WebClient(timeout=SECONDS).open(f"http://127.0.0.1:{server.port}/set.tar")
        assert sum(map(len, read_chunks(response, None))) == 10240
