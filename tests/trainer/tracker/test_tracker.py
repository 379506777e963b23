"""A managed training gives its tracker each step once, whoever is killed meanwhile."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kdist_trainer.agent import tracker_process
from kdist_trainer.agent.tracker_process import TrackerProcess
from kdist_trainer.config import TrainConfig
from kdist_trainer.errors import ConfigError
from tests.faults.training_run import TrainingRun, describe_job, is_alive, kill
from tests.trainer.agent.test_settings import make_settings

pytestmark = pytest.mark.processes

Curve = list[tuple[int, float]]


def read_wandb(run: TrainingRun) -> Curve:
    """All rows of the offline files of the run, in the order in which they were written."""
    found = []
    folder = run.checkpoints / "wandb"
    identity = json.loads((run.folder / "run.json").read_text())["run_id"]
    files = sorted(folder.glob("offline-run-*/*.wandb"))
    assert {file.name for file in files} == {f"run-{identity}.wandb"}
    for file in files:
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows = [json.loads(line) for line in printed.splitlines() if '"type":"history"' in line]
        items = [(row["history"]["step"]["num"], row["history"]["item"]) for row in rows]
        found += [(step, item["train/loss"]) for step, item in items]
    return found


def read_mlflow(run: TrainingRun) -> Curve:
    """The points of the loss of all runs, in the order in which they were written."""
    with sqlite3.connect(run.home / "mlflow.db") as store:
        assert store.execute("select count(*) from runs").fetchone() == (1,)
        query = "select step, value from metrics where key = 'train/loss' order by rowid"
        return store.execute(query).fetchall()


each_tracker = pytest.mark.parametrize(
    ("tracker", "read"), [("wandb", read_wandb), ("mlflow", read_mlflow)]
)
KILLS = 10


def make_run(home: Path, tracker: str, steps: int, every: int = 5) -> TrainingRun:
    train = {
        "workload": "digits",
        "steps": steps,
        "tracker": tracker,
        "checkpoint": {"every": {"steps": every}},
        "syncEverySteps": 5,
    }
    store = f"sqlite:///{home}/mlflow.db"
    if tracker == "mlflow":  # as a server is there before; cut off as it makes tables, it fails
        make = f"import mlflow\nmlflow.MlflowClient({store!r}).search_experiments()"
        subprocess.run([sys.executable, "-c", make], check=True, cwd=home)
    env = {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": store}
    variables = [{"name": name, "value": value} for name, value in env.items()]
    return TrainingRun(home, describe_job("curve", nodes=1, train=train, env=variables))


def find_lines(run: TrainingRun) -> Curve:
    """The line of each step that was written last, as the report reads them."""
    lines = {line["step"]: float.fromhex(line["loss"]) for line in run.steps()}
    return sorted(lines.items())


@pytest.mark.sampled
@each_tracker
def test_a_tracker_has_each_step_of_a_run(
    tmp_path: Path, tracker: str, read: Callable[[TrainingRun], Curve]
) -> None:
    with make_run(tmp_path, tracker, 23) as run:
        assert run.wait() == 0, run.output()
    assert read(run) == find_lines(run)
    assert [step for step, _ in read(run)] == [*range(1, 24)]


@pytest.mark.chaos
@pytest.mark.wide
@each_tracker
def test_ten_kills_of_ranks_agents_and_the_tracker_leave_each_step_once(
    tmp_path: Path, tracker: str, read: Callable[[TrainingRun], Curve]
) -> None:
    steps = 400
    run = make_run(tmp_path, tracker, steps, every=20)
    with run:
        for number in range(1, KILLS + 1):
            run.wait_until(partial(has_done, run, number * 35), f"step {number * 35}")
            victims = [
                [rank.pid for rank in run.ranks()],
                [*run.agents().values()],
                find_trackers(run),
            ]
            for pid in victims[number % 3]:
                kill(pid)
        assert run.wait() == 0, run.output()
    assert len(run.events("generation")) > KILLS // 2
    assert len(run.steps()) > steps, "some were lost and done again"
    curve = read(run)
    assert [step for step, _ in curve] == [*range(1, steps + 1)]
    assert curve == find_lines(run)
    assert curve[-1][1] == run.report()["loss"]


@pytest.mark.sampled
def test_the_process_ends_with_its_group(tmp_path: Path) -> None:
    with make_run(tmp_path, "wandb", 4000) as run:
        run.wait_until(lambda: has_done(run, 5) and find_trackers(run), "a step and a tracker")
        former = find_trackers(run)
        kill(run.ranks()[0].pid)
        run.wait_until(lambda: len(run.events("generation")) == 2, "another group")
        assert not any(is_alive(pid) for pid in former)


def has_done(run: TrainingRun, step: int) -> bool:
    return any(line["step"] >= step for line in run.steps())


def find_trackers(run: TrainingRun) -> list[int]:
    """The processes of the tracker, and W&B's own."""
    found = []
    for pid in run.processes():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"kdist_trainer.tracker" in command or b"wandb-core" in command:
            found.append(pid)
    return found


@pytest.mark.parametrize("name", tracker_process.PACKAGES)
def test_a_tracker_that_is_not_installed_is_refused_by_name(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_process, "find_spec", lambda _: None)
    train = {"workload": "digits", "steps": 1, "tracker": name}
    document = {"name": "job", "nodes": {"min": 1, "max": 1}, "train": train}
    settings = replace(make_settings(tmp_path), config=TrainConfig.model_validate(document))
    with pytest.raises(ConfigError, match=f"needs the package {name}: pip install '{name}"):
        TrackerProcess(settings, print)
