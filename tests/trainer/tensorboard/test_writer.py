"""TensorBoard's event files have every step of a run once; writing them never blocks training."""

from __future__ import annotations

import math
import sys
import threading
import time
from pathlib import Path

import pytest

from kdist_trainer.config import Training
from kdist_trainer.metrics.rank_metrics import StepPhase, StepStats
from kdist_trainer.tensorboard import FOLDER, TensorBoardWriter, writer
from tests.house.tree import ROOT
from tests.patience import soon
from tests.trainer.tensorboard.drawn import LOSS, read, steps

SAID = {
    LOSS: "loss",
    "train/learning_rate": "learning rate",
    "train/grad_norm": "gradient norm",
    "throughput": "throughput",
    "step_seconds": "step times",
    "evaluation": "evaluations",
}
"""By the name of a curve, or of a group of curves, what texts call it."""


def draw(
    curves: TensorBoardWriter, first: int, last: int, *, loss: float = 1.0, seconds: float = 1.0
) -> None:
    for step in range(first, last + 1):
        curves.add_step(step, samples=8, seconds=seconds, loss=loss)


def test_repeated_steps_appear_once(tmp_path: Path) -> None:
    # two groups are lost on the way
    for first, last, loss in ((1, 20, 1.0), (11, 14, 2.0), (13, 30, 3.0)):
        curves = TensorBoardWriter(tmp_path, StepStats())
        curves.begin(first - 1)
        draw(curves, first, last, loss=loss)
        curves.close()
    expected = [(step, 1.0 if step < 11 else 2.0 if step < 13 else 3.0) for step in range(1, 31)]
    assert read(tmp_path / FOLDER)[LOSS] == expected


def test_after_a_rollback_the_repeated_steps_replace_the_earlier_ones(tmp_path: Path) -> None:
    curves = TensorBoardWriter(tmp_path, StepStats())
    curves.begin(0)
    draw(curves, 1, 9)
    curves.begin(5)
    draw(curves, 6, 7, loss=2.0)
    curves.close()
    assert read(tmp_path / FOLDER)[LOSS] == [
        (step, 1.0 if step < 6 else 2.0) for step in range(1, 8)
    ]


def test_a_process_writes_one_file_and_begins_another_one_if_it_is_not_the_newest(
    tmp_path: Path,
) -> None:
    curves, folder = TensorBoardWriter(tmp_path, StepStats()), tmp_path / FOLDER
    for first in (1, 5, 9):
        curves.begin(first - 1)
        draw(curves, first, first + 3)
        curves.close()
    (own,) = folder.iterdir()
    writer._ended.clear()  # as in another process
    other = TensorBoardWriter(tmp_path, StepStats())
    other.begin(12)
    draw(other, 13, 16)
    other.close()
    (other_file,) = set(folder.iterdir()) - {own}
    writer._ended[folder] = own
    curves.begin(14)
    draw(curves, 15, 18, loss=2.0)
    curves.close()
    assert len({*folder.iterdir()} - {own, other_file}) == 1, "another one has written since"
    assert read(folder)[LOSS] == [(step, 1.0 if step < 15 else 2.0) for step in range(1, 19)]


def test_files_of_a_machine_whose_clock_is_ahead_are_read_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    for skew, first in ((3600, 1), (0, 5)):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda skew=skew: now + skew)
            curves = TensorBoardWriter(tmp_path, StepStats())
            curves.begin(first - 1)
            draw(curves, first, first + 5)
            curves.close()
            writer._ended.clear()  # the next one is another process
    assert steps(tmp_path / FOLDER) == list(range(1, 11))


def test_a_point_has_loss_throughput_and_step_times(tmp_path: Path) -> None:
    stats = StepStats()
    curves = TensorBoardWriter(tmp_path, stats)
    curves.begin(0)
    stats.learning_rate, stats.grad_norm, stats.steps = 0.01, 2.5, 2
    stats.phase[StepPhase.FORWARD], stats.phase[StepPhase.DATA_WAIT] = 3.0, 1.0
    curves.add_step(1, samples=8, seconds=2.0, loss=math.nan)
    curves.add_metrics(1, {"accuracy": 0.75})
    curves.close()
    drawn = {tag: values[-1] for tag, values in read(tmp_path / FOLDER).items()}
    assert math.isnan(drawn.pop(LOSS)[1])
    assert drawn["train/learning_rate"][1] == pytest.approx(0.01)
    assert drawn["train/grad_norm"] == (1, 2.5)
    assert drawn["throughput/samples_per_second"][1] == pytest.approx(8 / 2.1)
    assert drawn["evaluation/accuracy"] == (1, 0.75)
    parts = {
        tag.removeprefix("step_seconds/"): value
        for tag, (_, value) in drawn.items()
        if tag.startswith("step_seconds/")
    }
    assert (parts["forward"], parts["data_wait"], parts["total"]) == (1.5, 0.5, 2.0)
    assert set(parts) == {phase.name.lower() for phase in StepPhase} | {"total"}
    drawn[LOSS] = (1, math.nan)
    assert {tag if tag in SAID else tag.partition("/")[0] for tag in drawn} == SAID.keys()


def test_texts_name_every_kind_of_curve() -> None:
    said = ", ".join(SAID.values())
    page = (ROOT / "docs/how-to/training.md").read_text()
    assert f"to `tensorboard/` next to the checkpoints: {said}." in page
    assert f"next to the checkpoints ({said})." in str(Training.model_fields[FOLDER].description)


def test_fast_steps_are_downsampled_and_the_first_is_kept(tmp_path: Path) -> None:
    curves = TensorBoardWriter(tmp_path, StepStats())
    curves.begin(0)
    draw(curves, 1, 1001, seconds=0.02)
    curves.close()
    drawn = steps(tmp_path / FOLDER)
    assert drawn[0] == 1
    assert 160 <= len(drawn) <= 201


def test_a_long_run_has_few_points(tmp_path: Path) -> None:
    curves = TensorBoardWriter(tmp_path, StepStats())
    curves.begin(0)
    draw(curves, 1, 20_000, seconds=60.0)  # two weeks
    curves.close()
    assert len(steps(tmp_path / FOLDER)) < 4500


def test_without_a_folder_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    curves = TensorBoardWriter(None, StepStats())
    curves.begin(0)
    draw(curves, 1, 3)
    curves.add_metrics(3, {"accuracy": 1.0})
    curves.close()
    assert list(tmp_path.iterdir()) == []


def test_a_failing_disk_is_reported_once_and_only_costs_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(writer, "_RETRY_SECONDS", 0.05)
    (tmp_path / FOLDER).write_text("in the way")
    curves = TensorBoardWriter(tmp_path, StepStats())
    curves.begin(0)
    printed: list[str] = []

    def refused() -> bool:
        draw(curves, 1, 1)
        printed.append(capfd.readouterr().err)
        return "tensorboard-not-written" in "".join(printed)

    assert soon(refused)
    (tmp_path / FOLDER).unlink()
    assert soon((tmp_path / FOLDER).is_dir)
    draw(curves, 2, 5)
    curves.close()
    assert ("".join(printed) + capfd.readouterr().err).count("tensorboard-not-written") == 1
    assert steps(tmp_path / FOLDER)[-4:] == [2, 3, 4, 5]


def test_without_tensorboard_the_training_continues_and_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    curves = TensorBoardWriter(tmp_path, StepStats())
    curves.begin(0)
    draw(curves, 1, 5000)
    curves.close()
    assert capfd.readouterr().err.count("tensorboard-missing") == 1


def test_storage_that_hangs_blocks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    opening = writer.open_file

    def hang(folder: Path) -> object:
        released.wait()
        return opening(folder)

    monkeypatch.setattr(writer, "open_file", hang)
    monkeypatch.setattr("kdist_trainer.tensorboard.writer._CLOSE_SECONDS", 0.01)
    begun = time.monotonic()
    curves = TensorBoardWriter(tmp_path, StepStats())
    curves.begin(0)
    draw(curves, 1, 10_000)
    curves.close()
    spent = time.monotonic() - begun
    released.set()
    assert spent < 5
