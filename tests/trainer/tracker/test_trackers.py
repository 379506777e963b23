"""What trackers are given: once, under names that they take, and of one run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest

from kdist_trainer.tracker.trackers import Mlflow, Wandb

RUN = "digits-1"
POPEN = subprocess.Popen


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """MLflow on a database of its own."""
    for name in ("TRACKING_URI", "RUN_ID", "EXPERIMENT_ID", "EXPERIMENT_NAME"):
        monkeypatch.setenv(f"MLFLOW_{name}", "")  # MLflow sets some, which must not stay
        monkeypatch.delenv(f"MLFLOW_{name}")
    former = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    yield mlflow.MlflowClient()
    mlflow.end_run()
    mlflow.set_tracking_uri(former)


@pytest.mark.processes
def test_a_search_that_fails_begins_no_second_run_of_mlflow(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Mlflow("digits", RUN, {}).finish({}, done=False)
    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, "search_runs", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Mlflow("digits", RUN, {})
    Mlflow("digits", RUN, {}).finish({}, done=True)
    experiment = client.get_experiment_by_name("digits").experiment_id
    assert [run.info.status for run in client.search_runs([experiment])] == ["FINISHED"]


@pytest.mark.processes
def test_mlflow_is_given_what_it_lacks_in_pieces_and_names_that_it_takes(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    log_batch = mlflow.MlflowClient.log_batch

    def count(self: Any, run_id: str, metrics: Any = (), params: Any = (), **named: Any) -> None:
        sent.append((len(metrics), len(params)))
        log_batch(self, run_id, metrics=metrics, params=params, **named)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", count)
    options = {f"option{number}": number for number in range(150)}
    Mlflow("digits", RUN, {"steps": 3, "options": options}).finish({}, done=False)
    assert sent == [(0, 100), (0, 51)]
    sent.clear()
    tracker = Mlflow("digits", RUN, {"steps": 4, "seed": 1, "options": options})
    assert sent == [(0, 1)]
    assert tracker.last_step == 0
    sent.clear()
    values = {"world_size": 1, "evaluation/top@5": 0.5, "loss": 0.1}
    tracker.send([(step, values) for step in range(1, 401)])
    assert sent == [(1000, 0), (200, 0)]
    tracker.finish({"top@1": 1.0}, done=False)
    tracker = Mlflow("digits", RUN, {})
    assert tracker.last_step == 400
    experiment = client.get_experiment_by_name("digits").experiment_id
    (run,) = client.search_runs([experiment])
    assert run.data.metrics == {"world_size": 1, "evaluation/top_5": 0.5, "loss": 0.1, "top_1": 1.0}
    assert (run.data.params["steps"], run.data.params["seed"]) == ("3", "1")


def find_last(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> int:
    """The last step of the files of an offline run, of which W&B's reader is this code."""

    def popen(command: list[str], **named: Any) -> Any:
        assert command[1] == "-P", "a folder `wandb` is no package"
        return POPEN([sys.executable, "-c", code, command[-1]], **named)

    monkeypatch.setattr(subprocess, "Popen", popen)
    tracker: Any = object.__new__(Wandb)
    tracker._run = SimpleNamespace(id=RUN, dir=str(folder / "offline-run-3-x" / "files"))
    return int(tracker._find_last())


PRINT = """
import sys
for step in open(sys.argv[1]):
    print('{"type":"history","history":{"step":{"num":%s}}}' % step.strip())
"""


def test_the_last_step_offline_is_that_of_all_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_last(tmp_path, monkeypatch, "1 / 0") == 0
    for number, text in enumerate(("1\n20\n", "3\n", "")):
        file = tmp_path / f"offline-run-{number}-{RUN}" / f"run-{RUN}.wandb"
        file.parent.mkdir()
        file.write_text(text)
    assert find_last(tmp_path, monkeypatch, PRINT) == 20
    with pytest.raises(RuntimeError, match="W&B's reader fails with 5"):
        find_last(tmp_path, monkeypatch, "raise SystemExit(5)")
