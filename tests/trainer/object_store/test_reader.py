"""Objects as files: every byte in its place, wherever one seeks and whatever was cut short."""

from __future__ import annotations

import io
import random

import pytest

from kdist_trainer.object_store import files
from kdist_trainer.object_store.errors import ObjectChangedError
from kdist_trainer.object_store.store import ObjectStore
from tests.trainer.object_store.conftest import Open
from tests.trainer.object_store.s3_server import S3Server, always, drawn, in_turn

BLOCK = 1000
DATA = random.Random(2).randbytes(10 * BLOCK + 77)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", BLOCK)


def test_an_object_is_read_like_a_file(any_store: ObjectStore) -> None:
    any_store.put("file", DATA)
    expected = io.BytesIO(DATA)
    generator = random.Random(3)
    with any_store.open("file", len(DATA)) as file:
        assert file.readable()
        assert file.seekable()
        for _ in range(60):
            if generator.random() < 0.4:
                position = generator.randrange(len(DATA) + 10)
                assert file.seek(position) == expected.seek(position)
            size = generator.choice([0, 1, 10, BLOCK, 3 * BLOCK, -1])
            assert file.read(size) == expected.read(size)
            assert file.tell() == expected.tell()
        assert file.seek(-5, io.SEEK_END) == len(DATA) - 5
        assert file.read() == DATA[-5:]
        with pytest.raises(ValueError, match="seek"):
            files.ObjectReader(any_store, "file", 1).seek(-1)


def test_a_whole_object_is_read_with_one_request_a_block(
    store: ObjectStore, server: S3Server
) -> None:
    store.put("file", DATA)
    assert b"".join(store.stream("file")) == DATA
    assert server.count("GET") == 11
    assert server.count("HEAD") == 1


def test_the_next_blocks_are_requested_while_one_is_used(
    store: ObjectStore, server: S3Server
) -> None:
    store.put("file", DATA)
    file = files.ObjectReader(store, "file", len(DATA))
    file.read(1)
    file.read(1)
    file.close()
    file.close()
    assert server.count("GET") <= 1 + files.READ_AHEAD
    with pytest.raises(ValueError, match="closed"):
        file.read(1)


def test_who_jumps_fetches_nothing_ahead(store: ObjectStore, server: S3Server) -> None:
    store.put("file", DATA)
    with files.ObjectReader(store, "file", len(DATA)) as file:
        for number in (9, 3, 6):
            file.seek(number * BLOCK)
            assert file.read(10) == DATA[number * BLOCK :][:10]
    assert server.count("GET") == 3


@pytest.mark.parametrize("fault", ["truncated", "close", "503"])
def test_a_body_that_was_cut_short_is_requested_again(
    store: ObjectStore, server: S3Server, fault: str
) -> None:
    store.put("file", DATA)
    with server.failing(in_turn(fault, fault, method="GET")):
        assert store.open("file", len(DATA)).read() == DATA
    assert server.count("GET") == 13


def test_a_body_that_stays_short_is_an_error(open_store: Open, server: S3Server) -> None:
    store = open_store(retry_seconds=0.2)
    store.put("file", DATA)
    with (
        server.failing(always("truncated", method="GET")),
        pytest.raises(TimeoutError, match="cut short"),
    ):
        store.get("file", len(DATA))
    file = store.open("file", len(DATA))
    with server.failing(always("truncated", method="GET")), pytest.raises(TimeoutError):
        file.read()
    file.seek(0)
    assert file.read() == DATA


def test_many_faults_change_no_byte(store: ObjectStore, server: S3Server) -> None:
    store.put("file", DATA)
    with server.failing(drawn(4, 0.3)):
        assert b"".join(store.stream("file")) == DATA


@pytest.mark.parametrize("size", [1, len(DATA) - 1, len(DATA) + 1])
def test_an_object_of_another_size_is_an_error(store: ObjectStore, size: int) -> None:
    store.put("file", DATA)
    with pytest.raises(ObjectChangedError, match="instead of"):
        store.open("file", size).read()


def test_an_object_that_is_gone_is_not_found(store: ObjectStore) -> None:
    with pytest.raises(FileNotFoundError):
        store.open("file", 10).read()
