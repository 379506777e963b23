"""Checkpoints in a real S3 server, whose conditions are raced for by real processes, which are
killed at moments that nobody chooses.

KDIST_ROUNDS says how often (6).
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kdist_trainer.checkpoint.lock import LockLostError
from kdist_trainer.checkpoint.manifest import CheckpointDirectory
from kdist_trainer.checkpoint.storage import StoragePath, open_location
from tests.trainer.checkpoint.ranks import prepared_context
from tests.trainer.checkpoint.states import load, open_store, save
from tests.trainer.object_store.s3_server import ACCESS_KEY, BUCKET, SECRET
from tests.trainer.object_store.versitygw import versitygw

pytestmark = pytest.mark.e2e
ROUNDS = int(os.environ.get("KDIST_ROUNDS", "6"))
WRITERS = 3
LATEST_KILL_SECONDS = 0.6


@pytest.fixture(scope="module", name="endpoint")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("versitygw")
    with versitygw(folder, access_key=ACCESS_KEY, secret=SECRET, bucket=BUCKET) as endpoint:
        yield endpoint


@pytest.fixture(name="root")
def open_root(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StoragePath:
    for name, value in settings(endpoint).items():
        monkeypatch.setenv(name, value)
    return open_location(url_of(tmp_path))


def settings(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "KDIST_CHECKPOINTS_ENDPOINT": endpoint,
        "KDIST_CHECKPOINTS_REGION": "us-east-1",
    }


def url_of(folder: Path) -> str:
    return f"s3://{BUCKET}/{folder.name}"


@pytest.mark.sampled
def test_of_groups_that_lock_the_folder_at_once_one_does(root: StoragePath) -> None:
    for generation in range(1, ROUNDS + 1):
        outcomes: list[str] = []

        def lock(generation: int = generation, outcomes: list[str] = outcomes) -> None:
            try:
                open_store(root, generation=generation)
                outcomes.append("locked")
            except LockLostError:
                outcomes.append("lost")

        threads = [threading.Thread(target=lock) for _ in range(WRITERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == ["locked", *["lost"] * (WRITERS - 1)]


def save_until_killed(
    url: str, variables: dict[str, str], generation: int, answers: Connection
) -> None:
    """Resume, then save step after step, and tell what is acknowledged."""
    os.environ.update(variables)
    store = open_store(open_location(url), generation=generation)
    step = load(store) or 0
    answers.send(("resumed", step))
    while True:
        step += 1
        try:
            if save(store, step).ok:
                answers.send(("acknowledged", step))
        except LockLostError:
            answers.send(("lost", step))
            return


@pytest.mark.sampled
def test_writers_that_are_killed_or_paused_lose_nothing_that_they_have_acknowledged(
    root: StoragePath, endpoint: str, tmp_path: Path
) -> None:
    """Every third writer is only paused, and goes on when two later ones have taken over."""
    draw, context = random.Random(3), prepared_context()
    acknowledged = 0
    paused: list[tuple[int, Connection]] = []
    processes = []
    try:
        for generation in range(1, ROUNDS + 1):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=save_until_killed,
                args=(url_of(tmp_path), settings(endpoint), generation, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            processes.append(process)
            assert ours.poll(60), "the writer does not start"
            kind, step = ours.recv()
            assert kind == "resumed"
            assert step >= acknowledged, "an acknowledged save is never lost"
            time.sleep(draw.uniform(0, LATEST_KILL_SECONDS))  # the moment is what is drawn
            assert process.pid is not None
            if generation % 3 == 0:
                os.kill(process.pid, signal.SIGSTOP)
                paused.append((process.pid, ours))
            else:
                process.kill()
            acknowledged = max([acknowledged, *(found for _, found in drain(ours))])
            if len(paused) > 1 or (paused and generation % 3 == 2):
                pid, answers = paused.pop(0)
                os.kill(pid, signal.SIGCONT)
                told = list(drain(answers, until="lost"))
                assert told[-1][0] == "lost", "it must learn that it was given up"
    finally:
        for process in processes:
            process.kill()
            process.join()
    last = open_store(root, generation=ROUNDS + 1)
    assert (load(last) or 0) >= acknowledged
    assert save(last, 10**6).ok
    assert CheckpointDirectory(root).temporary() == [], "what the killed have left is swept"


def drain(answers: Connection, *, until: str = "") -> Iterator[tuple[str, int]]:
    """What a writer has told; waits for an answer of the kind `until`."""
    try:
        while answers.poll(30 if until else 0):
            found: tuple[str, int] = answers.recv()
            yield found
            if found[0] == until:
                return
    except EOFError:
        return
