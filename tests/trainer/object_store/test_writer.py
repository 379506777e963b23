"""Large objects: written in parts with a digest, settled after lost replies, or not there at
all.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable

import pytest

from kdist_trainer.formats.digest import new_hasher
from kdist_trainer.object_store import files
from kdist_trainer.object_store.errors import ObjectChangedError, ObjectStoreError
from kdist_trainer.object_store.store import ObjectStore
from tests.trainer.object_store.conftest import Open
from tests.trainer.object_store.s3_server import Request, S3Server, always, in_turn

SMALLEST = 5 << 20
DATA = random.Random(1).randbytes(2 * SMALLEST + 12345)
KEY = "a/prefix/file"


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PART_BYTES", SMALLEST)


def digest_of(data: bytes) -> tuple[int, str]:
    hasher = new_hasher()
    hasher.update(data)
    return len(data), hasher.hexdigest()


def write(store: ObjectStore, data: bytes, *, piece: int = 1 << 20) -> tuple[int, str]:
    """Write an object called `file` in pieces; returns size and value of its digest."""
    with store.create("file") as file:
        for start in range(0, len(data), piece):
            file.write(memoryview(data)[start : start + piece])
        assert file.tell() == len(data)
    digest = file.close()
    return digest.size, digest.value


def completing(fault: str, *, times: int) -> Callable[[Request], str]:
    """This fault of the first requests that make one object of the parts."""
    left = [fault] * times
    return lambda one: (
        left.pop() if left and {one.method, *one.query} == {"POST", "uploadId"} else ""
    )


def test_a_large_object_goes_in_parts_and_has_its_digest(any_store: ObjectStore) -> None:
    assert write(any_store, DATA) == digest_of(DATA)
    assert any_store.get("file", len(DATA)).data == DATA
    assert any_store.info("file").size == len(DATA)


def test_a_piece_that_is_larger_than_a_part_is_written_whole(
    store: ObjectStore, server: S3Server
) -> None:
    assert write(store, DATA, piece=len(DATA)) == digest_of(DATA)
    assert server.objects[KEY].data == DATA
    sizes = [len(one.body) for one in server.requests if "partNumber" in one.query]
    assert sorted(sizes) == [12345, SMALLEST, SMALLEST]


@pytest.mark.parametrize("piece", [1000, 1 << 20, 3 << 20])
def test_memory_that_the_caller_uses_again_does_not_change_what_was_written(
    store: ObjectStore, server: S3Server, piece: int
) -> None:
    memory = bytearray(piece)
    with store.create("file") as file:
        for start in range(0, len(DATA), piece):
            part = DATA[start : start + piece]
            memory[: len(part)] = part
            file.write(memoryview(memory)[: len(part)])
            memory[:] = bytes(piece)
    assert server.objects[KEY].data == DATA
    assert (file.digest.size, file.digest.value) == digest_of(DATA)


def test_a_small_object_goes_in_one_request(store: ObjectStore, server: S3Server) -> None:
    with store.create("file") as file:
        pickle.dump([1, 2], file)
    assert [one.method for one in server.requests] == ["PUT"]
    assert server.objects[KEY].data == pickle.dumps([1, 2])


def test_an_empty_object_is_written(any_store: ObjectStore) -> None:
    assert write(any_store, b"") == digest_of(b"")
    assert any_store.info("file").size == 0


@pytest.mark.parametrize("fault", ["503", "429", "500-after", "close", "close-after", "slow"])
def test_parts_that_fail_are_sent_again(store: ObjectStore, server: S3Server, fault: str) -> None:
    with server.failing(in_turn(fault, fault, method="PUT")):
        assert write(store, DATA) == digest_of(DATA)
    assert server.objects[KEY].data == DATA
    assert server.uploads == {}


@pytest.mark.parametrize("fault", ["500-after", "close-after", "truncated"])
def test_an_object_whose_last_reply_was_lost_is_found(
    store: ObjectStore, server: S3Server, fault: str
) -> None:
    with server.failing(completing(fault, times=1)):
        assert write(store, DATA) == digest_of(DATA)
    assert server.objects[KEY].data == DATA


def test_an_object_is_found_also_when_no_reply_ever_came(
    open_store: Open, server: S3Server
) -> None:
    with server.failing(completing("close-after", times=1000)):
        assert write(open_store(retry_seconds=0.5), DATA) == digest_of(DATA)
    assert server.objects[KEY].data == DATA


def test_an_object_of_before_is_not_taken_for_this_one(open_store: Open, server: S3Server) -> None:
    store = open_store(retry_seconds=0.3)
    other = bytes(len(DATA))
    write(store, other)
    with (
        server.failing(completing("503", times=1000)),
        pytest.raises(TimeoutError, match="cannot write"),
    ):
        write(store, DATA)
    assert server.objects[KEY].data == other


def test_a_write_that_fails_leaves_nothing_and_goes_on_failing(
    open_store: Open, server: S3Server
) -> None:
    store = open_store(retry_seconds=0.3)
    file = store.create("file")
    with server.failing(always("503", method="PUT")):
        with pytest.raises(TimeoutError, match="503 SlowDown"):
            file.write(DATA * 3)
        with pytest.raises(TimeoutError):
            file.write(b"more")
        with pytest.raises(TimeoutError):
            file.close()
    with pytest.raises(TimeoutError):
        file.close()
    assert (server.objects, server.uploads) == ({}, {})


@pytest.mark.parametrize("size", [0, 100, len(DATA)])
def test_what_is_abandoned_is_not_there(store: ObjectStore, server: S3Server, size: int) -> None:
    def fail() -> None:
        with store.create("file") as file:
            opened.append(file)
            file.write(DATA[:size])
            raise KeyError

    opened: list[files.ObjectWriter] = []
    with pytest.raises(KeyError):
        fail()
    (file,) = opened
    file.abandon()
    with pytest.raises(ValueError, match="closed"):
        file.write(b"more")
    assert (server.objects, server.uploads) == ({}, {})


def test_a_full_bucket_is_named(store: ObjectStore, server: S3Server) -> None:
    server.quota = 100
    with pytest.raises(ObjectStoreError, match="QuotaExceeded") as full:
        write(store, DATA)
    assert full.value.errno == 28
    assert not isinstance(full.value, ObjectChangedError)


def test_an_object_with_too_many_parts_is_refused(
    store: ObjectStore, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_PARTS", 2)
    with pytest.raises(OSError, match="too large") as refused:
        write(store, DATA, piece=len(DATA))
    assert refused.value.errno == 27
    assert (server.objects, server.uploads) == ({}, {})
