"""TensorBoard is served on loopback, takes no memory from a training, and exits with its client."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kdist_trainer.metrics.rank_metrics import StepStats
from kdist_trainer.tensorboard import FOLDER, TensorBoardWriter
from kdist_trainer.tensorboard.__main__ import NEEDED_BYTES, free_bytes, main
from tests.patience import soon
from tests.trainer.tensorboard.served import shown_steps


def start(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "kdist_trainer.tensorboard", str(folder)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.processes
@pytest.mark.sampled
def test_it_shows_the_run_and_exits_when_the_client_disconnects(tmp_path: Path) -> None:
    curves = TensorBoardWriter(tmp_path, StepStats())
    for first, last in ((1, 9), (6, 12)):
        curves.begin(first - 1)
        for step in range(first, last + 1):
            curves.add_step(step, samples=8, seconds=1.0, loss=1 / step)
        curves.close()
    viewer = start(tmp_path / FOLDER)
    try:
        assert viewer.stdin is not None
        assert viewer.stdout is not None
        port = json.loads(viewer.stdout.readline())["port"]
        assert soon(lambda: shown_steps(port) == list(range(1, 13)), seconds=30)
        viewer.stdin.close()
        assert viewer.wait(60) == 0
        assert not listens(port)
    finally:
        viewer.kill()
        viewer.wait()


def test_without_event_files_it_reports_a_problem(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / FOLDER)]) == 1
    printed = json.loads(capfd.readouterr().out)
    assert printed["cause"] == "empty"
    assert "no event files" in printed["problem"]


def test_it_does_not_start_without_enough_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kdist_trainer.tensorboard.__main__.free_bytes", lambda: NEEDED_BYTES - 1)
    assert main([str(tmp_path)]) == 1
    assert json.loads(capfd.readouterr().out)["cause"] == "memory"


def test_cached_files_count_as_free_memory_and_no_limit_as_unknown(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 300\n")
    assert free_bytes(tmp_path) == 400
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(tmp_path) is None
    assert free_bytes(tmp_path / "elsewhere") is None
