"""Checkpoints in an object store: what a save costs, and what is left by writers that are killed,
cut off or too late, over a real socket with a server that fails on request.

KDIST_FAULTS says how many histories with random faults are tried (20).
"""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from kdist_trainer.agent.logs import KeptLog
from kdist_trainer.checkpoint.__main__ import describe, describe_logs, read_log
from kdist_trainer.checkpoint.checkpointer import CheckpointManager
from kdist_trainer.checkpoint.ledger import RunLedger, StepLedger, read_lines
from kdist_trainer.checkpoint.lock import LockLostError
from kdist_trainer.checkpoint.manifest import CheckpointDirectory
from kdist_trainer.errors import CheckpointMismatchError, KdistTrainerError, StorageError
from kdist_trainer.formats import LEDGER, STEPS_FILE
from kdist_trainer.metrics.persistence import (
    CounterState,
    counters_path,
    read_counters,
    write_counters,
)
from kdist_trainer.object_store.store import ObjectLocation, ObjectPath, ObjectStore
from tests.patience import soon
from tests.trainer.checkpoint.states import load, open_store, save
from tests.trainer.object_store.s3_server import (
    ACCESS_KEY,
    BUCKET,
    SECRET,
    Faults,
    Request,
    S3Server,
    drawn,
)

HISTORIES = int(os.environ.get("KDIST_FAULTS", "20"))
RETRY_SECONDS = 0.1
"""How long a call is tried again while requests fail on purpose."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with S3Server() as running:
        yield running


def root_of(server: S3Server) -> ObjectPath:
    """The folder of one run, through a client of its own."""
    location = ObjectLocation(f"s3://{BUCKET}/jobs", server.endpoint, "us-east-1")
    return ObjectPath(ObjectStore(location)) / "run"


@contextmanager
def failing(server: S3Server, faults: Faults, *roots: ObjectPath) -> Iterator[None]:
    """Within the `with` block, requests fail, and clients soon give up."""
    patient = [root.store.__dict__.copy() for root in roots]
    for root in roots:
        root.store.__dict__.update(
            ObjectStore(root.store.location, retry_seconds=RETRY_SECONDS).__dict__
        )
    try:
        with server.failing(faults):
            yield
    finally:
        for root, before in zip(roots, patient, strict=True):
            root.store.__dict__.update(before)


def resume(root: ObjectPath, generation: int) -> tuple[CheckpointManager, int | None]:
    """The next group of the run, and the step it resumes from, every bit of it compared."""
    store = open_store(root, generation=generation)
    return store, load(store)


def names(server: S3Server) -> list[str]:
    return sorted(key.removeprefix("jobs/run/") for key in server.objects)


def dying_at(number: int, *, is_done: bool) -> Faults:
    """As from a process that is killed at its request of this number, before or after it is
    done.
    """
    count = 0
    lock = threading.Lock()

    def draw(_: Request) -> str:
        nonlocal count
        with lock:
            count += 1
            return (
                "" if count < number else "close-after" if count == number and is_done else "close"
            )

    return draw


def losing(key: str, number: int) -> Faults:
    """The request with this number and all later ones for this object fail; requests for other
    objects do not.
    """
    count = 0

    def draw(request: Request) -> str:
        nonlocal count
        count += 1
        return "close" if request.key == key and count >= number else ""

    return draw


def test_what_was_saved_is_loaded_and_old_checkpoints_go_with_their_files(server: S3Server) -> None:
    root = root_of(server)
    first, found = resume(root, 1)
    assert found is None
    for step in (5, 10, 15, 20):
        assert save(first, step).ok
    first.close()
    second, found = resume(root, 2)
    assert found == 20
    second.close()
    folders = {name.partition("/")[0] for name in names(server) if name.startswith("step-")}
    kept = {name.partition(".")[0] for name in folders}
    assert kept == {f"step-{step:08d}-e1" for step in (10, 15, 20)}
    assert len(folders) == 2 * len(kept), "a manifest and a folder of files each"
    described = describe(root, verify=True)
    assert [one["state"] for one in described["checkpoints"]] == ["verified"] * 3
    assert described["resumesFrom"] == described["latest"] == "step-00000020-e1"


def test_a_save_puts_every_object_once_and_asks_little(server: S3Server) -> None:
    store, _ = resume(root_of(server), 1)
    assert save(store, 1).ok
    before = len(server.requests)
    assert save(store, 2).ok
    requests = server.requests[before:]
    put = [one.key for one in requests if one.method == "PUT"]
    assert len(put) == len(set(put)) == 6  # tensors, index, state, manifest, LATEST, event
    assert len(requests) <= 15


@pytest.mark.sampled
@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
def test_a_writer_killed_at_any_request_of_a_save_leaves_the_old_checkpoint_or_the_new_one(
    server: S3Server, is_done: bool
) -> None:
    root = root_of(server)
    store, _ = resume(root, 1)
    before = len(server.requests)
    assert save(store, 1).ok
    requests, newest, found_steps = len(server.requests) - before, 1, set()
    for number in range(1, requests + 2):
        generation = number + 1
        step = generation * 10
        store, found = resume(root, generation)
        assert found == newest
        with failing(server, dying_at(number, is_done=is_done), root):
            result = save(store, step)
        _, newest_now = resume(root, 1000 * generation)
        assert newest_now in (newest, step)
        assert not result.ok or newest_now == step, "what was acknowledged is never lost"
        found_steps.add(newest_now == step)
        newest = newest_now
        server.objects.pop("jobs/run/lock.json")  # so that generations can go on from here
    assert found_steps == {True, False}
    last, _ = resume(root, 10**6)
    assert save(last, 10**5).ok
    assert CheckpointDirectory(root).temporary() == [], "what the dead have left is swept"


def test_an_object_that_cannot_be_read_any_more_is_not_taken_for_damage(server: S3Server) -> None:
    saved, _ = resume(root_of(server), 1)
    assert [save(saved, step).ok for step in (1, 2)] == [True, True]
    root = root_of(server)
    store = open_store(root, generation=2)
    before = len(server.requests)
    assert load(store) == 2
    for number, request in enumerate(server.requests[before:], start=1):
        with (
            failing(server, losing(request.key, number), root),
            pytest.raises((StorageError, OSError)),
        ):
            load(store)
    assert load(store) == 2


def test_a_writer_that_wakes_up_after_a_take_over_never_wins(server: S3Server) -> None:
    first, _ = resume(root_of(server), 1)
    assert save(first, 10).ok
    sleeper, found = resume(root_of(server), 2)
    assert found == 10
    root, winners = root_of(server), []

    def take_over(request: Request) -> str:
        if request.method == "PUT" and request.key.endswith("step-00000100-e2/manifest.json"):
            server.faults = lambda _: ""
            winner, found = resume(root, 3)
            assert found == 10, "not committed yet"
            winners.append(winner)
        return ""

    with server.failing(take_over), pytest.raises(LockLostError):
        save(sleeper, 100)
    assert "step-00000100-e2/manifest.json" in names(server), "it came after its look at the lock"
    _, found = resume(root, 4)
    assert found == 10, "and counts for nothing"
    with pytest.raises(LockLostError):
        save(winners[0], 20)
    last, _ = resume(root, 5)
    assert save(last, 30).ok
    assert "step-00000100-e2/manifest.json" not in names(server)


def test_of_two_groups_that_lock_the_folder_at_once_one_does(server: S3Server) -> None:
    for generation in range(1, 9):
        outcomes: list[str] = []

        def lock(generation: int = generation, outcomes: list[str] = outcomes) -> None:
            try:
                open_store(root_of(server), generation=generation)
                outcomes.append("locked")
            except LockLostError:
                outcomes.append("lost")

        threads = [threading.Thread(target=lock) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == ["locked", "lost", "lost", "lost"]


def test_a_late_request_of_an_attempt_that_was_given_up_replaces_nothing(server: S3Server) -> None:
    root = root_of(server)
    store, _ = resume(root, 1)
    key = "jobs/run/step-00000005-e1/manifest.json"
    late: list[Request] = []

    def hold(request: Request) -> str:
        if request.key == key:
            late.append(request)
            return "close"
        return ""

    with failing(server, hold, root):
        assert not save(store, 5).ok
    assert save(store, 5).ok
    kept = server.objects[key]
    assert server.serve(late[0]).status == 412
    assert server.objects[key] == kept
    _, found = resume(root, 2)
    assert found == 5


def test_a_checkpoint_that_was_damaged_is_archived_and_the_one_before_is_loaded(
    server: S3Server,
) -> None:
    root = root_of(server)
    store, _ = resume(root, 1)
    for step in (1, 2):
        assert save(store, step).ok
    store.close()
    (key,) = (one for one in server.objects if "00002-e1.files" in one and one.endswith(".distcp"))
    entry = server.objects[key]
    changed = bytearray(entry.data)
    changed[len(changed) // 2] ^= 1
    server.objects[key] = type(entry)(bytes(changed), entry.tag, entry.modified)
    second, found = resume(root, 2)
    assert found == 1
    assert [one.path.name for one in CheckpointDirectory(root).damaged()] == [
        "step-00000002-e1.damaged"
    ]
    assert key in server.objects, "it stays as evidence"
    assert save(second, 3).ok
    assert key in server.objects


@pytest.mark.parametrize("condition", ["If-None-Match", "If-Match"])
def test_a_store_that_ignores_a_condition_is_refused(server: S3Server, condition: str) -> None:
    def ignore(request: Request) -> str:
        request.headers.pop(condition.lower(), None)
        return ""

    with server.failing(ignore), pytest.raises(CheckpointMismatchError, match=f" {condition},"):
        open_store(root_of(server))
    assert server.objects == {}


def test_the_ledger_is_written_in_segments_and_read_as_one(server: S3Server) -> None:
    root = root_of(server)
    for generation in (1, 2):
        ledger = StepLedger(root)
        for step in range(3):
            ledger.append([{"step": step, "generation": generation}])
            ledger.sync()
        ledger.append([{"step": 99, "generation": generation}])  # its writer dies before a sync
    lines = read_lines(root / LEDGER / STEPS_FILE)
    assert [(one["generation"], one["step"]) for one in lines] == [
        (generation, step) for generation in (1, 2) for step in range(3)
    ]
    wanted = {(1, 2), (2, 0), (2, 99)}
    assert StepLedger.find_written(root, wanted) == {(1, 2), (2, 0)}
    for number in range(5):
        RunLedger(root).append("generation", generation=number)
    assert [one["generation"] for one in RunLedger(root).events()] == list(range(5))
    assert RunLedger(root).last_generation() == 4
    assert len([one for one in names(server) if one.startswith("ledger/events")]) == 1


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(HISTORIES))
def test_through_random_faults_nothing_acknowledged_is_lost_and_nobody_wins_twice(
    server: S3Server, seed: int
) -> None:
    random_numbers = random.Random(seed)
    acknowledged, generation, step = 0, 0, 0
    former: CheckpointManager | None = None
    roots: list[ObjectPath] = []
    for _ in range(4):
        generation += 1
        faults = drawn(random_numbers.randrange(10**9), random_numbers.random() * 0.3)
        roots.append(root_of(server))
        with failing(server, faults, *roots[-2:]):
            try:
                store = open_store(roots[-1], generation=generation)
                resumed = load(store) or 0
            except (KdistTrainerError, OSError):
                continue  # as a group that fails to start: the next one takes over
            assert resumed >= acknowledged, "an acknowledged save is never lost"
            step = max(step, resumed)
            if former is not None:
                with suppress(LockLostError, StorageError):
                    assert not save(former, 10_000 + step).ok, "it has been taken over from"
            for _ in range(random_numbers.randint(1, 3)):
                step += 1
                with suppress(LockLostError):
                    if save(store, step).ok:
                        acknowledged = step
        former = store
    last, found = resume(root_of(server), generation + 1)
    assert (found or 0) >= acknowledged
    assert (found or 0) <= step
    later = itertools.count(step + 1)

    def sweeps() -> bool:
        assert save(last, next(later)).ok
        return CheckpointDirectory(root_of(server)).temporary() == []

    # a request that its client gave up may reach the store after the sweep of one save
    assert soon(sweeps)


def test_a_node_s_log_is_kept_in_the_bucket(server: S3Server) -> None:
    root = root_of(server)
    for generation in (1, 2):
        log = KeptLog(root, "node-0", max_bytes=1 << 20, secrets=[b"hidden-value"])
        log.begin(generation)
        log.put(f"line of {generation} with hidden-value\n".encode())
        log.put(b"another\n")
        log.close()
    assert b"".join(read_log(root, "node-0", generation=2)) == b"line of 2 with ***\nanother\n"
    described = describe_logs(root)["generations"]
    assert [(one["generation"], one["nodes"]) for one in described] == [
        (1, ["node-0"]),
        (2, ["node-0"]),
    ]


def test_counters_go_on_from_the_bucket(server: S3Server) -> None:
    path = counters_path(root_of(server), run_id="run-1", node="node-0")
    assert read_counters(path, run_id="run-1") == CounterState()
    state = CounterState(wall=dict.fromkeys(CounterState().wall, 2.5))
    write_counters(path, state, run_id="run-1")
    assert read_counters(path, run_id="run-1") == state
