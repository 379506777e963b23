"""Storage that is full, does not answer or is away while a rank is lost: the survivors go on in
place without it, say so, and save as soon as it is well again.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kdist.job.local.agents import fetch_samples
from tests.small_disk import HangingDisk, fill, hanging_disk, small_disk
from tests.trainer.object_store.s3_server import ACCESS_KEY, SECRET, S3Server, always

from .check_ledger import assert_every_sample_once
from .test_bucket import committed as committed_in
from .test_bucket import in_bucket
from .test_in_place import assert_nothing_was_repeated
from .test_paused_storage import Storage
from .test_paused_storage import describe as describe_paused
from .training_run import Rank, TrainingRun, describe_job, kill, wait_for_step

pytestmark = [pytest.mark.processes, pytest.mark.chaos, pytest.mark.sampled]
EPOCHS, SAMPLES = 25, 1437
STEPS_ON = 25  # without the storage


@pytest.fixture(name="disk")
def make_disk(tmp_path: Path) -> Iterator[Path]:
    yield from small_disk(tmp_path / "disk", mib=12)


@pytest.fixture(name="hanging")
def make_hanging(tmp_path: Path) -> Iterator[HangingDisk]:
    yield from hanging_disk(tmp_path / "hanging")


@pytest.fixture(name="server")
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with S3Server() as server:
        yield server


def describe(name: str, checkpoints: dict[str, str] | None = None) -> dict[str, Any]:
    train = {
        "workload": "digits",
        "epochs": EPOCHS,
        "globalBatch": 64,
        "syncEverySteps": 5,
        "checkpoint": {"every": {"steps": 20}, "keep": 1},
    }
    place = {} if checkpoints is None else {"checkpoints": checkpoints}
    return describe_job(name, nodes=1, procsPerNode=2, train=train, maxRestarts=1, **place)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights' hash of the same run without faults."""
    with TrainingRun(tmp_path_factory.mktemp("uninterrupted"), describe("calm")) as run:
        assert run.wait() == 0, run.output()
    weights: str = run.done()["weights"]
    return weights


def logged(run: TrainingRun, name: str) -> list[dict[str, Any]]:
    return [event for event in run.log("node-0") if event["event"] == name]


def tell(run: TrainingRun, command: str) -> str:
    """What `kdist` says of the run."""
    words = [sys.executable, "-m", "kdist", command, run.name]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=run.home)
    return done.stdout + done.stderr


def lose(run: TrainingRun, number: int) -> Rank:
    """Kill a rank, and wait until the other one has gone on in place; returns that one."""
    before = {rank.number: rank for rank in run.ranks()}
    times = len(logged(run, "continued"))
    kill(before[number].pid)
    run.wait_until(lambda: len(logged(run, "continued")) > times, "ranks that go on in place")
    return before[1 - number]


def go_on(run: TrainingRun) -> None:
    """Wait for steps of both ranks."""
    step = max(rank.beat.step for rank in run.ranks())
    wait_for_step(run, step + STEPS_ON, ranks=2)


@pytest.mark.parametrize("number", [0, 1])
def test_on_a_full_disk_a_lost_rank_is_replaced_in_place_and_what_is_next_saved_counts(
    number: int, uninterrupted: str, disk: Path, tmp_path: Path
) -> None:
    job = describe("full", {"path": str(disk / "checkpoints")})
    with TrainingRun(tmp_path / "run", job) as run:
        run.checkpoints = disk / "checkpoints"
        run.wait_until(lambda: len(run.events("commit")) >= 2, "two checkpoints")
        ballast = fill(disk)
        run.wait_until(lambda: logged(run, "checkpoint-failed"), "a save to fail")
        fill(disk)  # a save that was committed meanwhile has removed an older one
        step = run.events("commit")[-1]["step"]
        survivor = lose(run, number)
        go_on(run)
        lose(run, 1 - number)  # more often than the job may restart
        go_on(run)
        assert not {survivor.pid} & {rank.pid for rank in run.ranks()}
        assert run.events("commit")[-1]["step"] == step
        (said,) = logged(run, "storage-unavailable")[:1]
        assert str(run.checkpoints) in said["message"]
        assert "No space left on device" in said["message"]
        assert f"storage: {run.checkpoints} (checkpoints) has" in tell(run, "why")
        assert f"failed: {run.checkpoints} (checkpoints) has" in tell(run, "status")
        ballast.unlink()
        run.wait_until(lambda: run.events("commit")[-1]["step"] > step, "the next checkpoint")
        assert run.wait() == 0, run.output()
    assert_nothing_was_repeated(run)
    assert_every_sample_once(run.steps(), total=EPOCHS * SAMPLES)
    assert run.done()["weights"] == uninterrupted
    assert [one["generation"] for one in run.events("generation")] == [1, 2, 3], "told late"


@pytest.mark.parametrize("number", [0, 1])
def test_ranks_that_continue_in_place_do_not_wait_for_a_lock_that_the_storage_keeps(
    number: int, tmp_path: Path
) -> None:
    storage = Storage(tmp_path / "storage")
    with TrainingRun(tmp_path, describe_paused(storage, "lock")) as run:
        run.wait_until(lambda: run.events("commit"), "a checkpoint")
        storage.hold()
        lose(run, number)
        go_on(run)
        lose(run, 1 - number)
        go_on(run)
        step = run.events("commit")[-1]["step"]
        (said,) = logged(run, "storage-unavailable")[:1]
        assert "does not answer" in said["message"]
        run.wait_until(partial(fails_to_save, run), "that it is seen")
        storage.release()
        run.wait_until(lambda: run.events("commit")[-1]["step"] > step, "the next checkpoint")
        newest = run.events("commit")[-1]["step"]
        assert [*run.checkpoints.glob(f"step-{newest:08}-e3")], "under the lock of the last group"
        steps = [line["step"] for line in run.steps()]
        assert steps == list(range(1, steps[-1] + 1)), "none was done twice"


def test_a_training_whose_disk_hangs_goes_on_and_saves_once_that_answers(
    uninterrupted: str, hanging: HangingDisk, tmp_path: Path
) -> None:
    job = describe("hangs", {"path": str(hanging.folder / "checkpoints")})
    # after so many steps a save would wait for the one before
    job["spec"]["train"]["checkpoint"] = {"every": {"seconds": 1}, "keep": 1}
    with TrainingRun(tmp_path / "run", job) as run:
        run.checkpoints = hanging.folder / "checkpoints"
        run.wait_until(lambda: run.events("commit"), "a checkpoint")
        hanging.freeze()  # no rank can be killed meanwhile: the kernel waits too
        try:
            for _ in range(3):
                go_on(run)
            step = run.events("commit")[-1]["step"]
        finally:
            hanging.thaw()
        run.wait_until(lambda: run.events("commit")[-1]["step"] > step, "the next checkpoint")
        assert run.wait() == 0, run.output()
    assert_nothing_was_repeated(run)
    assert_every_sample_once(run.steps(), total=EPOCHS * SAMPLES)
    assert run.done()["weights"] == uninterrupted


def fails_to_save(run: TrainingRun) -> bool:
    return any(one.status.get("failed_saves") for one in fetch_samples(run.folder).values())


def test_ranks_that_continue_in_place_do_not_wait_for_a_bucket_that_is_away(
    uninterrupted: str, server: S3Server, tmp_path: Path
) -> None:
    with TrainingRun(tmp_path, describe("away", in_bucket(server))) as run:
        run.wait_until(lambda: committed_in(server) >= 40, "checkpoints")
        with server.failing(always("503")):
            lose(run, 0)
            go_on(run)
            lose(run, 1)
            go_on(run)
            step = committed_in(server)
            assert logged(run, "storage-unavailable")
        run.wait_until(lambda: committed_in(server) > step, "the next checkpoint")
        assert run.process.wait(180) == 0, run.output()
    steps = [line["step"] for line in run.steps()]
    assert sorted(steps) == list(range(1, len(steps) + 1)), "none was done twice"
    assert run.done()["weights"] == uninterrupted
