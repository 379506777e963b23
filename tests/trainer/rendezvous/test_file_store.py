"""The store of `kdist run`: what torch expects of a store, from many writers at once, any of which
may die.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import resource
import stat
import threading
from pathlib import Path
from random import Random
from urllib.parse import unquote

import pytest
import torch.distributed as dist

from kdist_trainer.rendezvous.stores import FileStore
from tests.patience import soon


def test_a_writer_does_not_wait_for_ever_for_one_that_was_stopped_in_the_middle(
    tmp_path: Path,
) -> None:
    store = FileStore(tmp_path, timeout_seconds=0.3)
    with (tmp_path / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(dist.DistStoreError, match=str(tmp_path / "lock")):
            store.set("key", "value")
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_a_reader_gets_the_value_as_soon_as_somebody_writes_it(tmp_path: Path) -> None:
    writer, reader = FileStore(tmp_path), FileStore(tmp_path)
    threading.Timer(0.2, writer.set, args=("late", "value")).start()
    assert reader.get("late") == b"value"


def test_of_many_writers_who_compare_and_set_each_step_is_made_once(tmp_path: Path) -> None:
    def count(store: FileStore, times: int) -> None:
        while times:
            seen = store.get("n")
            if store.compare_set("n", seen, str(int(seen) + 1)) == str(
                int(seen) + 1
            ).encode() and _won(store, seen):
                times -= 1

    wins: set[bytes] = set()
    lock = threading.Lock()

    def _won(store: FileStore, seen: bytes) -> bool:
        with lock:  # two writers may both read the value they wanted: only one of them wrote it
            new = seen not in wins
            wins.add(seen)
            return new

    FileStore(tmp_path).set("n", "0")
    threads = [threading.Thread(target=count, args=(FileStore(tmp_path), 25)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert FileStore(tmp_path).get("n") == b"100"


def test_a_disk_that_refuses_is_the_stores_failure_and_changes_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.set("key", "old")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(dist.DistStoreError, match="cannot be written"):
            store.compare_set("key", "old", "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert store.get("key") == b"old"
    assert store.compare_set("key", "old", "new") == b"new"


@pytest.mark.processes
@pytest.mark.sampled
def test_writers_killed_at_any_moment_leave_a_store_that_others_go_on_with(tmp_path: Path) -> None:
    def write(store: FileStore) -> None:
        while True:
            store.set("value", "x" * 5000)
            store.add("count", 1)

    store, last = FileStore(tmp_path, timeout_seconds=5), 0
    random = Random(7)
    for _ in range(12):
        writer = multiprocessing.get_context("fork").Process(target=write, args=(store,))
        writer.start()
        goal = last + random.randrange(1, 20)
        while int(store.get("count") if store.check(["count"]) else 0) < goal:
            assert writer.is_alive()
        writer.kill()
        writer.join()
        assert store.get("value") == b"x" * 5000
        count = store.add("count", 1)
        assert count > last
        last = count


def test_only_the_owner_may_read_what_is_stored_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = FileStore(tmp_path / "store")
        store.set("key", "first")
        store.set("key", "x")
    finally:
        os.umask(before)
    assert store.get("key") == b"x"
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in store.folder.iterdir()}
    assert set(modes.values()) == {0o600}, modes


def test_a_store_keeps_the_keys_of_the_round_that_begins_and_of_the_two_before(
    tmp_path: Path,
) -> None:
    stores = [FileStore(tmp_path), FileStore(tmp_path)]
    for number in range(12):
        for rank, store in enumerate(stores):
            store.set(f"torch.rendezvous.run.1.{number}/kdist/agent/{rank}", "node")
        stores[number % 2].compare_set(f"kdist/run.1/generation/{number}", "", "{}")
        stores[0].set("kdist/run.1/last", str(number))
    expected = {
        "kdist/run.1/last",
        *(f"kdist/run.1/generation/{number}" for number in (9, 10, 11)),
        *(f"torch.rendezvous.run.1.{n}/kdist/agent/{rank}" for n in (9, 10, 11) for rank in (0, 1)),
    }

    def kept() -> set[str]:
        assert stores[1].get("kdist/run.1/last") == b"11"  # whoever reads later removes
        return {unquote(each.name[1:]) for each in tmp_path.glob("=*")}

    assert kept() > expected, "not while the round begins"
    assert soon(lambda: kept() == expected, 20.0), kept()
