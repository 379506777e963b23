"""One rank is asked to stop, a loss is not finite, a checkpoint is due: all ranks do the same at
the same step.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kdist_trainer.checkpoint.ledger import RunLedger, read_lines
from kdist_trainer.checkpoint.manifest import CheckpointDirectory
from kdist_trainer.config import Cause, Exit
from kdist_trainer.formats import LEDGER, STEPS_FILE
from kdist_trainer.ipc.failure import read
from kdist_trainer.training.sync import choose_sync_interval
from tests.faults.check_ledger import assert_every_sample_once
from tests.trainer.training.group import RankFailed
from tests.trainer.training.tasks import Interrupted, describe, done, losses, train_here

TASKS = Interrupted.__module__


@pytest.mark.processes
@pytest.mark.parametrize(("size", "stopped_after"), [(1, 10), (3, 14)])
def test_a_signal_on_one_rank_stops_all_at_one_step_and_nothing_is_lost(
    tmp_path: Path, size: int, stopped_after: int
) -> None:
    uninterrupted = describe(epochs=8)
    train_here(uninterrupted, tmp_path / "whole", size)
    interrupted = describe(
        epochs=8,
        workload=f"{TASKS}:Interrupted",
        options={"at_loss": 12, "on_rank": size - 1, "react_within": 1_000_000},
        syncEverySteps=4,
    )
    assert train_here(interrupted, tmp_path / "part", size) == ["stopped"] * size
    (checkpoint,) = CheckpointDirectory(tmp_path / "part/checkpoints").committed()
    # Two of the twelve losses were the warm-up's. One rank computes four a step, so that its signal
    # comes in step 3, the last one of three ranks one, in step 10. Exchanges follow steps 1, 2, 6,
    # 10 and 14: one tells of the signal, at the next one all ranks know of it.
    assert checkpoint.step == stopped_after
    assert train_here(uninterrupted, tmp_path / "part", size, generation=2) == ["done"] * size
    assert done(tmp_path / "part")["weights"] == done(tmp_path / "whole")["weights"]
    ledger = RunLedger(tmp_path / "part/checkpoints")
    lines = read_lines(tmp_path / "part/checkpoints" / LEDGER / STEPS_FILE)
    assert_every_sample_once(lines, total=8 * 50)
    assert min(losses(tmp_path / "part", generation=2)) == checkpoint.step + 1
    assert [event["step"] for event in ledger.events() if event["event"] == "stopped"] == [
        checkpoint.step
    ]


@pytest.mark.processes
def test_a_loss_that_is_not_finite_ends_the_job_and_leaves_the_last_good_checkpoint(
    tmp_path: Path,
) -> None:
    checkpoint = {"every": {"steps": 1}, "mode": "async", "keep": 1000}
    clean = describe(epochs=1, checkpoint=checkpoint)
    train_here(clean, tmp_path / "clean", 2)
    document = describe(
        workload=f"{TASKS}:Exploding", options={"at_sample": 11}, epochs=1, checkpoint=checkpoint
    )
    with pytest.raises(RankFailed, match="NonFiniteError"):
        train_here(document, tmp_path / "wild", 2)
    failure = read(tmp_path / "wild/scratch-0", 0)
    assert failure is not None
    assert (failure.cause, failure.code, failure.primary) == (Cause.NAN, Exit.NONFINITE, True)
    bad = int(failure.message.split("step ")[1].split()[0])
    kept = [one.step for one in CheckpointDirectory(tmp_path / "wild/checkpoints").committed()]
    assert all(step < bad for step in kept)
    assert losses(tmp_path / "wild")[bad] == "nan"
    before = {step: loss for step, loss in losses(tmp_path / "clean").items() if step < bad}
    assert {step: loss for step, loss in losses(tmp_path / "wild").items() if step < bad} == before


@pytest.mark.processes
def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    checkpoint = {"every": {"steps": 1}, "mode": "blocking", "keep": 1000}
    document = describe(
        workload=f"{TASKS}:Creeping", options={"at_sample": 11}, epochs=1, checkpoint=checkpoint
    )
    with pytest.raises(RankFailed, match="a weight is NaN or infinite after step"):
        train_here(document, tmp_path, 1)
    kept = [one.step for one in CheckpointDirectory(tmp_path / "checkpoints").committed()]
    assert max(losses(tmp_path)) == max(kept, default=0) + 1, (
        "the step whose gradient was NaN is in no checkpoint"
    )


@pytest.mark.sampled
@pytest.mark.processes
def test_slow_steps_are_stopped_before_their_interval_is_over(tmp_path: Path) -> None:
    options = {"at_loss": 8, "on_rank": 1, "pause": 0.3}
    document = describe(
        epochs=8,
        workload=f"{TASKS}:Interrupted",
        options=options,
        virtualShards=2,
        syncEverySteps=30,
    )
    assert train_here(document, tmp_path, 2) == ["stopped"] * 2
    (checkpoint,) = CheckpointDirectory(tmp_path / "checkpoints").committed()
    assert 6 < checkpoint.step <= 6 + 2 * 3, (
        "intervals of a second hold three steps; the eighth loss was that of step 6"
    )


@pytest.mark.processes
def test_a_loss_that_is_not_finite_may_be_ignored(tmp_path: Path) -> None:
    document = describe(
        workload=f"{TASKS}:Exploding",
        options={"at_sample": 11},
        epochs=1,
        onNonfinite="ignore",
        clipGradNorm=None,
    )
    assert train_here(document, tmp_path, 1) == ["done"]


@pytest.mark.processes
def test_checkpoints_by_number_come_at_multiples_whatever_the_interval(tmp_path: Path) -> None:
    document = describe(
        epochs=4,
        syncEverySteps=7,
        checkpoint={"every": {"steps": 5}, "mode": "async", "keep": 1000},
    )
    train_here(document, tmp_path, 2)
    steps = sorted(one.step for one in CheckpointDirectory(tmp_path / "checkpoints").committed())
    assert steps == [5, 10, 15, 17]  # 200 samples in batches of 12


@pytest.mark.sampled
@pytest.mark.processes
def test_checkpoints_by_the_clock_are_saved_by_all_ranks(tmp_path: Path) -> None:
    slow = describe(
        epochs=10,
        options={"pause": 0.1},
        checkpoint={"every": {"seconds": 1}, "mode": "async", "keep": 1000},
    )
    train_here(slow, tmp_path, 2)
    assert len(CheckpointDirectory(tmp_path / "checkpoints").committed()) >= 3


@pytest.mark.sampled
@pytest.mark.processes
def test_a_run_of_which_nothing_is_said_saves_by_itself_and_tells_how_often(tmp_path: Path) -> None:
    document = describe(
        workload=f"{TASKS}:OftenSaved",
        epochs=60,
        options={"pause": 0.01, "least": 0.2},
        checkpoint={"keep": 3},
    )
    train_here(document, tmp_path, 2)
    root = tmp_path / "checkpoints"
    events = RunLedger(root).events()
    first, *_ = [one for one in events if one["event"] == "save_interval"]
    assert first["cost_seconds"] > 0, "the greatest of all ranks"
    assert first["between_losses_seconds"] == pytest.approx(1800, rel=0.1)
    assert first["seconds"] >= 0.2
    assert len([one for one in events if one["event"] == "commit"]) >= 2
    steps = [one.step for one in CheckpointDirectory(root).committed()]
    assert len(steps) == 2, "the newest one, and one that may become five minutes old"


@pytest.mark.parametrize(
    ("step_seconds", "most", "expected"),
    [(0.0, 10, 1), (0.001, 10, 10), (0.3, 10, 3), (0.99, 10, 1), (60, 10, 1), (0.001, 1, 1)],
)
def test_slow_steps_shorten_the_interval(step_seconds: float, most: int, expected: int) -> None:
    assert choose_sync_interval(step_seconds, most) == expected


@pytest.mark.processes
def test_a_later_sigterm_ends_the_rank_at_once() -> None:
    program = """
import signal, sys
from kdist_trainer.processes import signals
from kdist_trainer.training.sync import StopFlag
signals.SAME_REQUEST_SECONDS = 0
flag = StopFlag()
flag.install()
print("ready", flush=True)
while not flag.requested:
    signal.pause()
print("asked", flush=True)
while True:
    signal.pause()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            os.kill(process.pid, signal.SIGTERM)
            assert process.stdout.readline() == "asked\n"
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()
