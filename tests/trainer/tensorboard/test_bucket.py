"""TensorBoard's event files in an object store: they grow there, and the viewer follows them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kdist_trainer.checkpoint.storage import open_location
from kdist_trainer.metrics.rank_metrics import StepStats
from kdist_trainer.object_store import files
from kdist_trainer.object_store.store import ObjectPath
from kdist_trainer.tensorboard import FOLDER, TensorBoardWriter, writer
from kdist_trainer.tensorboard.__main__ import copy_new, main
from tests.patience import soon
from tests.trainer.object_store.s3_server import ACCESS_KEY, BUCKET, SECRET, S3Server
from tests.trainer.tensorboard.drawn import steps
from tests.trainer.tensorboard.served import shown_steps


@pytest.fixture(name="server")
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with S3Server() as running:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("KDIST_CHECKPOINTS_ENDPOINT", running.endpoint)
        monkeypatch.setenv("KDIST_CHECKPOINTS_REGION", "us-east-1")
        yield running


@pytest.fixture(name="root")
def open_root(server: S3Server) -> ObjectPath:
    root = open_location(f"s3://{BUCKET}/run")
    assert isinstance(root, ObjectPath)
    return root


def draw(curves: TensorBoardWriter, first: int, last: int) -> None:
    for step in range(first, last + 1):
        curves.add_step(step, samples=8, seconds=1.0, loss=1 / step)


def drawn(root: ObjectPath, copy: Path) -> list[int]:
    copy.mkdir(exist_ok=True)
    copy_new(root / FOLDER, copy)
    return steps(copy)


def test_each_step_is_there_once_after_a_restart(root: ObjectPath, tmp_path: Path) -> None:
    for first, last in ((1, 9), (6, 12)):
        curves = TensorBoardWriter(root, StepStats())
        curves.begin(first - 1)
        draw(curves, first, last)
        curves.close()
    assert drawn(root, tmp_path / "copy") == list(range(1, 13))


def test_points_are_there_soon_and_large_files_end(
    root: ObjectPath, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FLUSH_SECONDS", 0.05)
    monkeypatch.setattr(writer, "_OBJECT_BYTES", 4000)
    curves = TensorBoardWriter(root, StepStats())
    curves.begin(0)
    draw(curves, 1, 40)
    assert soon(lambda: drawn(root, tmp_path / "copy") == list(range(1, 41)))
    draw(curves, 41, 50)
    assert soon(lambda: drawn(root, tmp_path / "copy") == list(range(1, 51)))
    curves.close()
    sizes = [len(one.data) for key, one in server.objects.items() if FOLDER in key]
    assert len(sizes) > 1
    assert max(sizes) < 6000


def test_a_store_that_fails_costs_points_only(
    root: ObjectPath, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_RETRY_SECONDS", 0.01)
    curves = TensorBoardWriter(root, StepStats())
    with server.failing(lambda _: "denied"):
        curves.begin(0)
        draw(curves, 1, 5)
        assert soon(lambda: len(server.requests) > 1)
    assert soon(lambda: bool(server.objects))
    curves.close()


def test_without_event_files_the_problem_is_said(
    server: S3Server, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([f"s3://{BUCKET}/run/{FOLDER}"]) == 1
    printed = json.loads(capfd.readouterr().out)
    assert printed["cause"] == "empty"
    assert f"no event files in s3://{BUCKET}/run/{FOLDER}" in printed["problem"]


@pytest.mark.sampled
@pytest.mark.processes
def test_the_viewer_follows_the_bucket_and_leaves_no_copy(root: ObjectPath, tmp_path: Path) -> None:
    curves = TensorBoardWriter(root, StepStats())
    curves.begin(0)
    draw(curves, 1, 9)
    curves.close()
    command = [sys.executable, "-m", "kdist_trainer.tensorboard", f"{root}/{FOLDER}"]
    viewer = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    try:
        assert viewer.stdout is not None
        port = json.loads(viewer.stdout.readline())["port"]
        assert soon(lambda: shown_steps(port) == list(range(1, 10)), seconds=30)
        curves.begin(9)
        draw(curves, 10, 12)
        curves.close()
        assert soon(lambda: shown_steps(port) == list(range(1, 13)), seconds=60)
        viewer.terminate()
        viewer.wait(60)
        assert not list(tmp_path.glob("kdist-tensorboard-*"))
    finally:
        viewer.kill()
        viewer.wait()
