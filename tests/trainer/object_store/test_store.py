"""The operations of a store, on our server and on a real one: conditions, races, listings."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from kdist_trainer.object_store.errors import ObjectChangedError, ObjectStoreError
from kdist_trainer.object_store.store import ObjectStore
from tests.trainer.object_store.conftest import Open
from tests.trainer.object_store.s3_server import S3Server

RACERS = 12


def race(run: Callable[[int], None]) -> None:
    """Call `run` on many threads at once."""
    barrier = threading.Barrier(RACERS)

    def start(number: int) -> None:
        barrier.wait()
        run(number)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_what_was_put_is_read_with_its_tag(any_store: ObjectStore) -> None:
    tag = any_store.put("folder/name", b"content")
    found = any_store.get("folder/name", 7)
    assert (found.data, found.tag) == (b"content", tag)
    assert any_store.put("folder/name", b"other") != tag
    assert any_store.get("folder/name", 100).data == b"other"


def test_an_empty_object_is_an_object(any_store: ObjectStore) -> None:
    any_store.put("empty", b"")
    assert any_store.get("empty", 0).data == b""
    assert list(any_store.stream("empty")) == []


def test_names_keep_their_signs(any_store: ObjectStore) -> None:
    names = ["a b&c'(d)+,:;=@_!$.x", ".metadata", "step-00000100-e3/__0_0.distcp"]
    for name in names:
        any_store.put(name, name.encode())
    assert sorted(one.name for one in any_store.list()) == sorted(names)
    assert [any_store.get(name, 100).data.decode() for name in names] == names


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "../a", "a/./b", "ä", "a\nb", "a%b"])
def test_a_name_that_stores_encode_differently_is_refused(store: ObjectStore, name: str) -> None:
    with pytest.raises(ValueError, match="no name of an object"):
        store.put(name, b"")


def test_a_missing_object_is_not_found(any_store: ObjectStore) -> None:
    with pytest.raises(FileNotFoundError, match=r"cannot get s3://bucket/.*/nothing"):
        any_store.get("nothing", 1)
    with pytest.raises(FileNotFoundError):
        any_store.info("nothing")
    with pytest.raises(FileNotFoundError):
        list(any_store.stream("nothing"))


def test_an_object_that_is_too_large_is_not_read(any_store: ObjectStore) -> None:
    any_store.put("name", b"12345")
    with pytest.raises(ObjectStoreError, match="5 bytes, more than the 4"):
        any_store.get("name", 4)


def test_a_new_object_is_created_once(any_store: ObjectStore) -> None:
    tag = any_store.put_new("lock", b"first")
    with pytest.raises(FileExistsError, match="lock exists"):
        any_store.put_new("lock", b"other")
    with pytest.raises(FileExistsError):
        any_store.put_new("lock", b"longer than the first")
    assert any_store.put_new("lock", b"first") == tag
    assert any_store.get("lock", 100).data == b"first"


def test_only_the_version_that_was_read_is_replaced(any_store: ObjectStore) -> None:
    first = any_store.put_new("lock", b"1")
    second = any_store.replace("lock", b"2", first)
    with pytest.raises(ObjectChangedError, match="another writer"):
        any_store.replace("lock", b"3", first)
    assert any_store.get("lock", 1).data == b"2"
    third = any_store.replace("lock", b"4", second)
    assert any_store.get("lock", 1).tag == third


def test_a_deleted_object_is_not_replaced(any_store: ObjectStore) -> None:
    tag = any_store.put_new("lock", b"1")
    any_store.delete("lock")
    with pytest.raises(ObjectChangedError):
        any_store.replace("lock", b"2", tag)
    assert any_store.list() == []


def test_of_many_creators_one_wins(any_store: ObjectStore) -> None:
    won: list[int] = []
    lost: list[int] = []

    def create(number: int) -> None:
        try:
            any_store.put_new("lock", f"holder {number}".encode())
            won.append(number)
        except FileExistsError:
            lost.append(number)

    race(create)
    assert (len(won), len(lost)) == (1, RACERS - 1)
    assert any_store.get("lock", 100).data == f"holder {won[0]}".encode()


def test_of_many_replacers_one_wins(any_store: ObjectStore) -> None:
    tag = any_store.put_new("lock", b"free")
    won: list[int] = []
    lost: list[int] = []

    def take(number: int) -> None:
        try:
            any_store.replace("lock", f"holder {number}".encode(), tag)
            won.append(number)
        except ObjectChangedError:
            lost.append(number)

    race(take)
    assert (len(won), len(lost)) == (1, RACERS - 1)
    assert any_store.get("lock", 100).data == f"holder {won[0]}".encode()


def test_no_increment_of_many_writers_is_lost(any_store: ObjectStore) -> None:
    any_store.put_new("count", b"0 nobody")

    def increment(number: int) -> None:
        while True:
            found = any_store.get("count", 100)
            count = int(found.data.split()[0]) + 1
            try:
                any_store.replace("count", f"{count} writer {number}".encode(), found.tag)
                return
            except ObjectChangedError:
                continue

    race(increment)
    assert any_store.get("count", 100).data.split()[0] == str(RACERS).encode()


def test_a_listing_has_every_page_in_order(any_store: ObjectStore) -> None:
    names = [f"step-{number:02}/file" for number in range(8)]
    before = datetime.now(UTC) - timedelta(minutes=1)
    for number, name in enumerate(reversed(names)):
        any_store.put(name, b"x" * number)
    found = any_store.list()
    assert [one.name for one in found] == names
    assert [one.size for one in found] == list(range(7, -1, -1))
    assert all(before < one.modified < before + timedelta(minutes=5) for one in found)


def test_a_prefix_is_a_whole_part_of_names(any_store: ObjectStore) -> None:
    for name in ("step-1/a", "step-1/b/c", "step-10/a", "step"):
        any_store.put(f"run/{name}", b"")
    assert [one.name for one in any_store.list("run/step-1")] == ["run/step-1/a", "run/step-1/b/c"]
    assert any_store.list("ru") == []


def test_folders_are_what_has_objects_below_it(any_store: ObjectStore) -> None:
    for name in ("step-1/a", "step-1/b/c", "step-2/a", "step-3/x", "step-4/x", "latest"):
        any_store.put(name, b"")
    assert any_store.list_folders() == ["step-1", "step-2", "step-3", "step-4"]
    assert any_store.list_folders("step-1") == ["step-1/b"]
    assert any_store.list_folders("nothing") == []


def test_a_deleted_object_is_gone_and_deleting_it_again_is_no_error(any_store: ObjectStore) -> None:
    any_store.put("a", b"")
    any_store.put("b", b"")
    any_store.delete("a")
    any_store.delete("a")
    assert [one.name for one in any_store.list()] == ["b"]


def test_a_prefix_is_deleted_with_all_its_pages_and_nothing_else(any_store: ObjectStore) -> None:
    for name in ("a/1", "a/2", "a/3", "a/4", "a/b/5", "ab/6", "7"):
        any_store.put(name, b"")
    any_store.delete_prefix("a")
    any_store.delete_prefix("a")
    assert [one.name for one in any_store.list()] == ["7", "ab/6"]


def test_objects_of_other_prefixes_are_not_seen(store: ObjectStore, server: S3Server) -> None:
    store.put("name", b"mine")
    (key,) = server.objects
    assert key == "a/prefix/name"
    server.objects["a/prefix-of-others/name"] = server.objects[key]
    assert [one.name for one in store.list()] == ["name"]
    store.delete_prefix("name")
    assert set(server.objects) == {key, "a/prefix-of-others/name"}


def test_an_object_that_may_not_be_deleted_is_an_error(
    store: ObjectStore, server: S3Server
) -> None:
    store.put("folder/a", b"")
    store.put("folder/b", b"")
    server.kept = {"a/prefix/folder/b"}
    with pytest.raises(OSError, match="AccessDenied"):
        store.delete_prefix("folder")
    assert [one.name for one in store.list()] == ["folder/b"]


def test_a_missing_bucket_is_not_an_empty_one(open_store: Open) -> None:
    store = open_store(bucket="nowhere")
    for request in (lambda: store.get("name", 1), store.list, lambda: store.put("name", b"")):
        with pytest.raises(ObjectStoreError, match="no such bucket"):
            request()


def test_a_full_bucket_is_a_full_disk(store: ObjectStore, server: S3Server) -> None:
    server.quota = 10
    with pytest.raises(ObjectStoreError, match="QuotaExceeded") as full:
        store.put("name", b"x" * 11)
    assert full.value.errno == 28
    assert server.count("PUT") == 1
