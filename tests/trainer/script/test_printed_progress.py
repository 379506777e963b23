"""What is found in the lines of a script that reports nothing itself, and what no line can end."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from kdist_trainer.processes.liveness import Heartbeat, Phase
from kdist_trainer.script.printed_progress import PrintedProgress

PATTERN = r"step (?P<step>[^\s/]+)(/(?P<target>\S+))?( loss (?P<loss>\S+))?"


@pytest.fixture
def heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Heartbeat:
    monkeypatch.setenv("KDIST_METRICS_SOCKET", str(tmp_path / "metrics.sock"))
    monkeypatch.setenv("KDIST_SCRATCH", str(tmp_path))
    monkeypatch.setattr("kdist_trainer.metrics.transport._shared", [])  # as in a new process
    return Heartbeat.create(tmp_path / "rank-0.heartbeat")


def test_a_count_that_begins_again_is_a_sign_of_life_and_no_step(heartbeat: Heartbeat) -> None:
    progress = PrintedProgress(PATTERN)
    for step, loss in [(1, 3.0), (2, 2.0), (1, 1.5), (2, 1.0)]:
        before = heartbeat.read().count
        progress.feed(f"step {step} loss {loss}\n")
        beat = heartbeat.read()
        assert beat.count > before, "a healthy script is not ended as hung"
        assert (beat.phase, beat.step) == (Phase.STEP, min(2, beat.step))
        assert progress.stats.loss == loss
    assert (progress.stats.steps, progress.stats.last_step) == (2, 2)


def test_a_bar_that_is_drawn_before_its_first_step_has_done_none(
    heartbeat: Heartbeat, capfd: pytest.CaptureFixture[str]
) -> None:
    progress = PrintedProgress(PATTERN)
    progress.feed("step 0/2\r")
    assert progress.stats.steps == 0
    progress.feed("step 0/2\rstep 1/2\rstep 2/2\n")
    assert (progress.stats.steps, progress.stats.last_step) == (2, 2)
    assert heartbeat.read().step == 2
    first = json.loads(capfd.readouterr().err.splitlines()[0])
    assert (first["event"], first["step"]) == ("first-step", 1)


@pytest.mark.parametrize("step", ["many", "1e3", "9" * 30])
def test_a_line_whose_step_cannot_be_read_is_a_sign_of_life(
    heartbeat: Heartbeat, step: str, capfd: pytest.CaptureFixture[str]
) -> None:
    progress = PrintedProgress(PATTERN)
    progress.feed("step 1\n")
    before = heartbeat.read().count
    progress.feed(f"step {step} loss 2.5\nstep {step}\n")
    assert heartbeat.read().count > before
    assert (progress.stats.last_step, progress.stats.loss) == (1, 2.5)
    progress.feed("step 2\n")
    assert progress.stats.last_step == 2, "progress is still read"
    events = [json.loads(line)["event"] for line in capfd.readouterr().err.splitlines()]
    assert events.count("observer-failed") == 1


def test_a_loss_that_cannot_be_read_is_left_out_and_one_that_is_not_finite_is_not(
    heartbeat: Heartbeat, capfd: pytest.CaptureFixture[str]
) -> None:
    progress = PrintedProgress(PATTERN)
    progress.feed("step 1/9 loss 0.5\nstep 2/x loss 1.2.3\n")
    assert (progress.stats.last_step, progress.stats.loss) == (2, 0.5)
    assert progress.stats.target_steps == 9
    progress.feed("step 3 loss nan\n")
    assert math.isnan(progress.stats.loss or 0.0)
    progress.feed("step 4 loss inf\n")
    assert progress.stats.loss == math.inf
    assert heartbeat.read().step == 4
    assert "loss-not-finite" in capfd.readouterr().err


def test_a_pattern_that_takes_long_for_a_line_is_given_up_and_named(
    heartbeat: Heartbeat, capfd: pytest.CaptureFixture[str]
) -> None:
    progress = PrintedProgress(r"(a|aa)+(?P<step>\d)$")
    progress.feed("a1\n" + "a" * 60 + "!\na2\n")
    events = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    [event] = [each for each in events if each["event"] == "observer-failed"]
    assert "spec.script.progress.pattern takes too long for 'aaa" in event["message"]
    before = heartbeat.read()
    assert before.step == 1, "nothing is read any more"
    progress.feed("a3\n")
    assert heartbeat.read().count > before.count, "a script that prints is not ended as hung"


def test_colors_are_no_part_of_a_line(heartbeat: Heartbeat) -> None:
    progress = PrintedProgress(PATTERN)
    progress.feed("\x1b[32mstep \x1b[1m3\x1b[0m/20 loss \x1b[31m0.5\x1b[0m\n")
    assert (progress.stats.last_step, progress.stats.loss) == (3, 0.5)
    assert heartbeat.read().step == 3
