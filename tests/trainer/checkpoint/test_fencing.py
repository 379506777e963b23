"""A writer that was paused, and taken over from, wakes up at the worst moment: there is one winner,
and it is not the sleeper.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kdist_trainer.checkpoint import commit, storage
from kdist_trainer.checkpoint.lock import LockLostError
from kdist_trainer.checkpoint.manifest import CheckpointDirectory
from kdist_trainer.checkpoint.storage import Operation
from tests.trainer.checkpoint.ranks import prepared_context
from tests.trainer.checkpoint.states import load, open_store, resumable_step, save

pytestmark = pytest.mark.processes

OLD, SLEEPERS, WINNERS = 10, 100, 20
SLEEPERS_NAME = f"step-{SLEEPERS:08d}-e2"


def before_writing(one: Operation) -> bool:
    return one.name == "make_folder"


def before_the_manifest(one: Operation) -> bool:
    return one.name == "create" and one.path.name == "manifest.json"


def after_the_look_at_the_lock(one: Operation) -> bool:
    return one.name == "rename" and one.target is not None and one.target.name == SLEEPERS_NAME


def after_the_rename(one: Operation) -> bool:
    return one.name == "fsync_folder" and (one.path / SLEEPERS_NAME).is_dir()


def with_latest_in_hand(one: Operation) -> bool:
    return one.name == "replace" and one.target is not None and one.target.name == "LATEST"


POINTS: list[Callable[[Operation], bool]] = [
    before_writing,
    before_the_manifest,
    after_the_look_at_the_lock,
    after_the_rename,
    with_latest_in_hand,
]


def fall_asleep_while_saving(root: Path, point: int, answers: Connection) -> None:
    """Save as the group of generation 2, stopping this process at the given operation, and tell
    what became of it.
    """
    slept = False

    def observe(operation: Operation) -> None:
        nonlocal slept
        if not slept and POINTS[point](operation):
            slept = True
            answers.send("asleep")
            # this very thread stops here, and all others with it
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    store = open_store(root, generation=2)
    assert load(store) == OLD
    outcomes = []
    with storage.observed(observe):
        for step in (SLEEPERS, SLEEPERS + 1):
            try:
                result = save(store, step)
                outcomes.append("saved" if result.ok else result.cause)
            except LockLostError:
                outcomes.append("superseded")
    store.close()
    answers.send(outcomes)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("point", range(len(POINTS)), ids=[point.__name__ for point in POINTS])
@pytest.mark.sampled
def test_a_writer_that_wakes_up_after_a_take_over_never_wins(tmp_path: Path, point: int) -> None:
    root = tmp_path / "checkpoints"
    first = open_store(root)
    load(first)
    assert save(first, OLD).ok
    context = prepared_context()
    ours, theirs = context.Pipe()
    sleeper = context.Process(
        target=fall_asleep_while_saving, args=(root, point, theirs), daemon=True
    )
    sleeper.start()
    try:
        assert ours.poll(120), "the writer does not reach its point"
        assert ours.recv() == "asleep"
        pid = sleeper.pid
        assert pid is not None
        deadline = time.monotonic() + 60
        while not is_stopped(pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        winner = open_store(root, generation=3)
        started_from = load(winner)
        assert started_from == (
            SLEEPERS if POINTS[point] in (after_the_rename, with_latest_in_hand) else OLD
        )
        # lower than the sleeper's steps where it can be: its own are refused below what it loaded
        step = WINNERS + (SLEEPERS if started_from == SLEEPERS else 0)
        assert save(winner, step).ok
        os.kill(pid, signal.SIGCONT)
        assert ours.poll(120), "the writer does not come to an end"
        outcomes = ours.recv()
        assert outcomes[1] == "superseded", "it must learn that it was given up"
        assert outcomes[0] == ("saved" if POINTS[point] is with_latest_in_hand else "superseded")
    finally:
        sleeper.kill()
        sleeper.join()
    assert save(winner, step + 1).ok, "the winner goes on uninterrupted"
    assert CheckpointDirectory(root).named() == f"step-{step + 1:08d}-e3"
    assert resumable_step(root) == step + 1


def test_what_a_sleeper_brings_in_before_the_winner_has_committed_anything_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whoever takes over clears the sleeper's files away. Here they escape, as they may where
    # folders are cached.
    monkeypatch.setattr(commit, "clean_stale", lambda *_, **__: None)
    root = tmp_path / "checkpoints"
    first = open_store(root)
    load(first)
    assert save(first, OLD).ok
    sleeper = open_store(root, generation=2)
    assert load(sleeper) == OLD
    operations: list[Operation] = []

    def take_over(one: Operation) -> None:
        if after_the_look_at_the_lock(one) and not operations:
            operations.append(one)
            assert load(open_store(root, generation=3)) == OLD

    with storage.observed(take_over), pytest.raises(LockLostError):
        save(sleeper, SLEEPERS)
    assert operations
    assert (root / SLEEPERS_NAME).is_dir(), (
        "the sleeper was caught between its look at the lock and its rename"
    )
    assert resumable_step(root) == OLD, (
        "the third group died without a commit; the fourth starts where the third did"
    )
    last = open_store(root, generation=9)
    assert load(last) == OLD
    assert save(last, WINNERS).ok
    assert not (root / SLEEPERS_NAME).exists(), "and the next commit clears it away"
