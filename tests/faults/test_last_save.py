"""A disk that is full when a training has finished: its ranks hold what they have computed until
there is room, and nothing is computed again.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.small_disk import fill, small_disk

from .check_ledger import assert_every_sample_once
from .test_storage_in_place import logged, tell
from .training_run import TrainingRun, describe_job, kill

pytestmark = [pytest.mark.processes, pytest.mark.chaos, pytest.mark.sampled]
EPOCHS, SAMPLES = 3, 1437
CODE = Path(__file__).parent / "code"


@pytest.fixture(name="disk")
def make_disk(tmp_path: Path) -> Iterator[Path]:
    yield from small_disk(tmp_path / "disk", mib=12)


def describe(disk: Path, workload: str = "digits", **spec: Any) -> dict[str, Any]:
    train = {
        "workload": workload,
        "epochs": EPOCHS,
        "globalBatch": 64,
        "checkpoint": {"every": {"steps": 1_000_000}},
    }
    place = {"path": str(disk / "checkpoints")}
    group: dict[str, Any] = {"nodes": 1, "procsPerNode": 2, "checkpoints": place, **spec}
    return describe_job("last", train=train, **group)


def wait_for_full_disk(run: TrainingRun, disk: Path) -> Path:
    """Fill the disk as soon as it trains, and wait until the last save was tried twice; what takes
    the room.
    """
    run.checkpoints = disk / "checkpoints"
    run.wait_until(lambda: logged(run, "first-step"), "a step", every=0.002)
    ballast = fill(disk)
    run.wait_until(lambda: logged(run, "save-waits"), "a finished training that waits")
    assert len(logged(run, "checkpoint-failed")) == 2
    return ballast


def test_the_last_save_waits_for_room_and_nothing_is_computed_again(
    disk: Path, tmp_path: Path
) -> None:
    with TrainingRun(tmp_path / "run", describe(disk)) as run:
        ballast = wait_for_full_disk(run, disk)
        (said,) = logged(run, "save-waits")
        assert f"storage: {run.checkpoints}: the finished training" in said["message"]
        assert "waits to be saved" in said["message"]
        where = f"storage: {run.checkpoints} (checkpoints) has"
        run.wait_until(lambda: where in tell(run, "why"), "that it is told", every=0.2)
        assert "the finished training at step" in tell(run, "why")
        assert "the finished training waits to be saved" in tell(run, "status")
        ballast.unlink()
        assert run.wait() == 0, run.output()
    assert [one["generation"] for one in run.events("generation")] == [1]
    steps = [line["step"] for line in run.steps()]
    assert steps == list(range(1, run.done()["step"] + 1))
    assert_every_sample_once(run.steps(), total=EPOCHS * SAMPLES)


def test_a_rank_that_is_lost_while_the_last_save_waits_is_replaced_in_place(
    disk: Path, tmp_path: Path
) -> None:
    with TrainingRun(tmp_path / "run", describe(disk)) as run:
        ballast = wait_for_full_disk(run, disk)
        kill(run.ranks()[0].pid)
        run.wait_until(lambda: len(logged(run, "save-waits")) == 2, "the others to wait again")
        assert logged(run, "continued")
        ballast.unlink()
        assert run.wait() == 0, run.output()
    assert [line["step"] for line in run.steps()] == list(range(1, run.done()["step"] + 1))


def test_a_script_that_finishes_on_a_full_disk_waits_for_room_too(
    disk: Path, tmp_path: Path
) -> None:
    ready = tmp_path / "signals" / "ready"
    ready.parent.mkdir()
    job = describe(disk, code=str(CODE))
    del job["spec"]["train"]
    job["spec"]["script"] = {"path": "finishing.py", "args": [str(ready)]}
    with TrainingRun(tmp_path / "run", job) as run:
        run.checkpoints = disk / "checkpoints"
        done = [ready.with_name(f"steps-{rank}") for rank in range(2)]
        run.wait_until(lambda: all(read(one)[-1:] == ["20"] for one in done), "its last step")
        ballast = fill(disk)
        ready.touch()
        run.wait_until(lambda: logged(run, "save-waits"), "a finished training that waits")
        assert "the finished training" in logged(run, "save-waits")[0]["message"]
        ballast.unlink()
        assert run.wait() == 0, run.output()
        assert all(read(one) == [str(step) for step in range(1, 21)] for one in done)
        assert run.done()["step"] == 20


def read(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def test_a_stop_while_the_last_save_waits_is_none_that_has_saved(
    disk: Path, tmp_path: Path
) -> None:
    with TrainingRun(tmp_path / "run", describe(disk)) as run:
        ballast = wait_for_full_disk(run, disk)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 10, run.output()
        assert len(logged(run, "checkpoint-failed")) == 3, "it has tried once more"
        assert not (run.checkpoints / "DONE").exists()
        assert "it was stopped and could not save; nothing was saved" in tell(run, "status")
        ballast.unlink()
        run.start()
        assert run.wait() == 0, run.output()


def test_a_last_save_that_is_given_up_ends_the_run_by_name(disk: Path, tmp_path: Path) -> None:
    job = describe(disk, "impatient:Impatient", code=str(CODE), maxRestarts=0)
    with TrainingRun(tmp_path / "run", job) as run:
        wait_for_full_disk(run, disk)
        run.process.wait(120)
        ends = logged(run, "worker-failed")
        assert {(one["cause"], one["code"]) for one in ends if one["primary"]} == {("storage", 203)}
        assert "could not be saved" in ends[0]["message"]
        told = tell(run, "why")
        assert "No space left on device" in told, told
