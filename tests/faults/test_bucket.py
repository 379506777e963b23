"""A training whose checkpoints are in an object store, and none of whose folders is kept: ranks and
agents are killed, the store fails now and then, and it ends with the weights of a training on a
disk that nothing has happened to.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.object_store.s3_server import ACCESS_KEY, BUCKET, SECRET, S3Server, drawn
from tests.trainer.tensorboard.served import shown_steps

from .training_run import TrainingRun, describe_job, kill

pytestmark = pytest.mark.processes
EPOCHS = 40


@pytest.fixture(name="server")
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with S3Server() as server:
        yield server


def describe(checkpoints: dict[str, str] | None, *, epochs: int) -> dict[str, Any]:
    train = {
        "workload": "digits",
        "epochs": epochs,
        "globalBatch": 128,
        "checkpoint": {"every": {"steps": 25}},
    }
    storage = {} if checkpoints is None else {"checkpoints": checkpoints}
    return describe_job("digits", nodes=2, train=train, **storage)


def in_bucket(server: S3Server) -> dict[str, str]:
    return {"url": f"s3://{BUCKET}/team", "endpoint": server.endpoint, "region": "us-east-1"}


def committed(server: S3Server) -> int:
    """The newest step that is committed in the bucket."""
    manifests = [key for key in list(server.objects) if key.endswith("/manifest.json")]
    return max((int(key.split("/step-")[1].split("-")[0]) for key in manifests), default=0)


def ended(run: TrainingRun) -> int:
    """Exit code of a run whose checkpoints are not in its folder."""
    return run.process.wait(180)


@pytest.mark.sampled
def test_a_training_in_a_bucket_survives_kills_faults_of_the_store_and_the_loss_of_all_folders(
    tmp_path: Path, server: S3Server
) -> None:
    with TrainingRun(tmp_path / "disk", describe(None, epochs=EPOCHS)) as plain:
        assert plain.wait() == 0, plain.output()
    expected = plain.done()
    job = describe(in_bucket(server), epochs=EPOCHS)
    with server.failing(drawn(7, 0.05)):
        with TrainingRun(tmp_path / "first", job) as run:
            run.wait_until(lambda: committed(server) >= 50, "a checkpoint")
            kill(next(rank.pid for rank in run.ranks() if rank.node == "node-1"))
            newest = committed(server)
            run.wait_until(lambda: committed(server) > newest, "the next one")
            run.process.send_signal(2)
            assert ended(run) == 130, run.output()
        stopped_at = committed(server)
        shutil.rmtree(run.folder)
        with TrainingRun(tmp_path / "second", job) as run:
            run.wait_until(lambda: committed(server) > stopped_at, "the run to go on")
            kill(run.agents()["node-0"])
            assert ended(run) == 0, run.output()
    resumed = next(line for line in run.log("node-0") if line["event"] == "resumed")
    assert resumed["step"] == stopped_at
    assert {name: run.done()[name] for name in ("step", "samples_seen", "weights", "metrics")} == {
        name: expected[name] for name in ("step", "samples_seen", "weights", "metrics")
    }
    seen = [line["step"] for line in run.steps()]
    assert sorted(set(seen)) == list(range(1, expected["step"] + 1)), "also those of the first run"
    with TrainingRun(tmp_path / "second", job) as again:
        assert ended(again) == 0
        assert "digits is done already" in again.output()
    everything = b"".join(
        path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file() and not path.is_symlink()
    )
    assert SECRET.encode() not in everything
    assert not [key for key, entry in server.objects.items() if SECRET.encode() in entry.data]


@pytest.mark.sampled
def test_the_command_line_reads_checkpoints_and_logs_from_the_bucket(
    tmp_path: Path, server: S3Server
) -> None:
    job = describe(in_bucket(server), epochs=5)
    with TrainingRun(tmp_path, job, "--set", "spec.logs.keep=1Mi") as run:
        assert ended(run) == 0, run.output()
    steps = run.done()["step"]

    def kdist(*arguments: str) -> str:
        command = [sys.executable, "-m", "kdist", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert f"step-{steps:08d}-e1" in kdist("checkpoints", "verify", "digits")
    assert f"done after step {steps}" in kdist("logs", "digits", "--generation", "1")
    assert f"{steps} steps, 0 lost" in kdist("report", "digits")
    exported = kdist("checkpoints", "export", "digits", "--out", "weights.safetensors")
    assert f"step-{steps:08d}-e1" in exported
    with TrainingRun(tmp_path, job, "--fresh") as fresh:
        assert ended(fresh) == 0, fresh.output()
    folders = {key.split("/")[1] for key in server.objects}
    assert len(folders) == 2, "the first run's is renamed"
    assert "digits" in folders


@pytest.mark.sampled
def test_a_training_in_a_bucket_is_profiled_and_shown_by_tensorboard(
    tmp_path: Path, server: S3Server
) -> None:
    environment = os.environ | {"KDIST_HOME": str(tmp_path / ".kdist")}
    kdist = [sys.executable, "-m", "kdist"]
    with TrainingRun(tmp_path, describe(in_bucket(server), epochs=10_000)) as run:
        run.wait_until(lambda: committed(server) >= 25, "a checkpoint")
        profile = [*kdist, "profile", "digits", "--steps", "3", "--out", "traces"]
        subprocess.run(profile, cwd=tmp_path, env=environment, check=True)
        assert len(list((tmp_path / "traces").iterdir())) == 2
        with subprocess.Popen(
            [*kdist, "port-forward", "digits", ":tensorboard"],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as forwarding:
            assert forwarding.stdout is not None
            printed = re.search(r"http://127\.0\.0\.1:(\d+)/", forwarding.stdout.readline())
            assert printed
            run.wait_until(lambda: shown_steps(printed[1]), "the loss to be drawn", every=0.5)
            forwarding.terminate()
        run.process.send_signal(2)
        assert ended(run) == 130, run.output()


def test_a_run_without_a_credential_ends_at_once_with_what_to_set(
    tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ANOTHERKEY")
    with TrainingRun(tmp_path, describe(in_bucket(server), epochs=1)) as run:
        assert ended(run) != 0
    assert f"s3://{BUCKET}/team/digits" in run.output()
    assert "AWS_ACCESS_KEY_ID" in run.output()
    assert SECRET not in run.output()
