"""Errors that may pass: which are tried again, for how long, and what became of lost replies."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from kdist_trainer.object_store.errors import (
    ObjectAccessError,
    ObjectChangedError,
    ObjectTimeoutError,
)
from kdist_trainer.object_store.store import ObjectStore, Tag
from tests.trainer.object_store.conftest import Open
from tests.trainer.object_store.s3_server import (
    ACCESS_KEY,
    FAULTS,
    Entry,
    S3Server,
    always,
    in_turn,
)

LOST = ("500-after", "close-after")  # done, and the client is not told


@pytest.fixture(autouse=True)
def _soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdist_trainer.object_store.store.FIRST_WAIT_SECONDS", 0.01)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_operation_outlives_two_faults(
    store: ObjectStore, server: S3Server, fault: str
) -> None:
    operations: dict[str, Callable[[], object]] = {
        "put": lambda: store.put("a/put", b"1"),
        "put_new": lambda: store.put_new("a/new", b"2"),
        "get": lambda: store.get("a/new", 1).data,
        "replace": lambda: store.replace("a/new", b"3", store.get("a/new", 1).tag),
        "list": lambda: [one.name for one in store.list("a")],
        "list_folders": store.list_folders,
        "stream": lambda: b"".join(store.stream("a/new")),
        "delete": lambda: store.delete("a/put"),
    }
    results = {}
    for name, operation in operations.items():
        with server.failing(in_turn(fault, fault)):
            results[name] = operation()
    assert results["get"] == b"2"
    assert results["list"] == ["a/new", "a/put"]
    assert results["list_folders"] == ["a"]
    assert results["stream"] == b"3"
    assert {key: entry.data for key, entry in server.objects.items()} == {"a/prefix/a/new": b"3"}


@pytest.mark.parametrize("fault", LOST)
def test_a_creation_whose_reply_was_lost_is_ours(
    store: ObjectStore, server: S3Server, fault: str
) -> None:
    with server.failing(in_turn(fault, method="PUT")):
        tag = store.put_new("lock", b"mine")
    assert server.count("PUT") == 2
    assert store.get("lock", 4).tag == tag
    with server.failing(in_turn(fault, method="PUT")), pytest.raises(FileExistsError):
        store.put_new("lock", b"another's")


@pytest.mark.parametrize("fault", LOST)
def test_a_replacement_whose_reply_was_lost_is_ours(
    store: ObjectStore, server: S3Server, fault: str
) -> None:
    first = store.put_new("lock", b"1")
    with server.failing(in_turn(fault, method="PUT")):
        second = store.replace("lock", b"2", first)
    assert store.get("lock", 1).tag == second
    with server.failing(in_turn(fault, method="PUT")), pytest.raises(ObjectChangedError):
        store.replace("lock", b"3", first)


def test_a_replacement_that_was_replaced_before_its_reply_came_is_lost(
    store: ObjectStore, server: S3Server
) -> None:
    first = store.put_new("lock", b"1")

    def overtake() -> None:
        server.objects["a/prefix/lock"] = Entry(b"another's", '"other"', time.time())

    server.after_put = overtake
    with server.failing(in_turn("close-after", method="PUT")), pytest.raises(ObjectChangedError):
        store.replace("lock", b"2", first)
    assert store.get("lock", 100).data == b"another's"


@pytest.mark.parametrize("fault", LOST)
def test_what_was_done_by_the_last_attempt_is_found_when_the_time_is_over(
    open_store: Open, server: S3Server, fault: str
) -> None:
    store = open_store(retry_seconds=0.4)
    with server.failing(always(fault, method="PUT")):
        tag = store.put_new("lock", b"1")
        tag = store.replace("lock", b"2", tag)
    assert store.get("lock", 1).tag == tag
    assert store.get("lock", 1).data == b"2"


def test_the_time_of_a_call_is_bounded(open_store: Open, server: S3Server) -> None:
    store = open_store(retry_seconds=1.0)
    with server.failing(always("503")):
        for request in (
            lambda: store.get("name", 1),
            lambda: store.put_new("name", b""),
            store.list,
        ):
            begun = time.monotonic()
            with pytest.raises(ObjectTimeoutError, match=r"503 SlowDown.* after \d+ attempts"):
                request()
            assert time.monotonic() - begun > 0.4
    assert 3 < len(server.requests) < 60
    assert isinstance(ObjectTimeoutError(110, ""), TimeoutError)


def test_a_server_that_does_not_answer_is_given_up(open_store: Open, server: S3Server) -> None:
    store = open_store(retry_seconds=0.8)
    with server.failing(always("hang")), pytest.raises(ObjectTimeoutError, match="no reply"):
        store.get("name", 1)
    assert len(server.requests) > 1


def test_a_write_that_may_still_be_done_says_so(open_store: Open, server: S3Server) -> None:
    store = open_store(retry_seconds=0.2)
    with server.failing(always("503")):
        with pytest.raises(ObjectTimeoutError, match="a late request may still do it"):
            store.put_new("name", b"1")
        with pytest.raises(ObjectTimeoutError, match="a late request may still do it"):
            store.replace("name", b"1", Tag('"x"'))


def test_a_refusal_is_not_tried_again(
    open_store: Open, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "SOMEBODYELSE")
    with pytest.raises(ObjectAccessError):
        open_store().get("name", 1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    with pytest.raises(FileNotFoundError):
        open_store().get("name", 1)
    assert len(server.requests) == 2


def test_a_proxy_that_knows_no_object_does_not_make_it_missing(
    open_store: Open, server: S3Server
) -> None:
    store = open_store()
    store.put("name", b"1")
    with server.failing(in_turn("proxy-404")):
        assert store.get("name", 1).data == b"1"
    with server.failing(always("proxy-404")), pytest.raises(ObjectTimeoutError, match="404"):
        open_store(retry_seconds=0.2).get("name", 1)
