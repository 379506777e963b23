"""A script has one curve in W&B and MLflow however often it is started, although it names none."""

from __future__ import annotations

import json
import sqlite3
from functools import partial
from pathlib import Path

import pytest

from kdist_trainer.script.tracker_identity import identify
from tests.examples.test_frameworks import has_saved
from tests.faults.training_run import TrainingRun, describe_job, kill
from tests.trainer.agent.test_script_runner import run_script

RUN = "ml/digits?1"


def begin(folder: Path, code: str, **environment: str) -> str:
    """Run a script as an agent does; returns what it has printed."""
    around = {
        "KDIST_GENERATION": "1",
        "KDIST_RUN_ID": RUN,
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        **environment,
    }
    ended = run_script(folder / "script.py", code=code, **around)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_an_id_has_no_character_that_a_tracker_refuses() -> None:
    assert identify(RUN, 0) == "ml-digits-1"
    assert identify(r"a/b\c#d?e%f:g", 3) == "a-b-c-d-e-f-g-3"


WANDB = """
def init(entity=None, project=None, dir=None, id=None, **named):
    print(id, named.get("resume"))
"""


@pytest.mark.parametrize(
    ("call", "environment", "expected"),
    [
        ("project='digits', name='a'", {}, "ml-digits-1 allow"),
        ("id=None, resume='allow'", {}, "ml-digits-1 allow"),  # as Lightning's logger
        ("", {"RANK": "2"}, "ml-digits-1-2 allow"),
        ("id='mine'", {}, "mine None"),
        ("None, None, None, 'mine'", {}, "mine None"),
        ("fork_from='mine?_step=1'", {}, "None None"),
        ("resume_from='mine?_step=1'", {}, "None None"),
        ("resume='must'", {}, "None must"),
        ("settings={'run_id': 'mine'}", {}, "None None"),
        ("", {"WANDB_RUN_ID": "mine"}, "None None"),
        ("", {"WANDB_RESUME": "must"}, "None None"),
        ("", {"KDIST_TRACKER_IDENTITY": "off"}, "None None"),
    ],
)
def test_wandb_is_told_the_run_unless_the_user_says_otherwise(
    tmp_path: Path, call: str, environment: dict[str, str], expected: str
) -> None:
    (tmp_path / "wandb.py").write_text(WANDB)
    code = f"import wandb\nwandb.init({call})\nwandb.init(project='other')"
    first, second = begin(tmp_path, code, **environment).splitlines()
    assert first == expected
    assert second == "None None"


def test_children_of_a_script_and_a_folder_of_files_have_no_run(tmp_path: Path) -> None:
    code = """
        import os, wandb
        print([name for name in os.environ if name.startswith("WANDB_")], flush=True)
        if os.fork() == 0:
            wandb.init()
            os._exit(0)
        os.wait()
    """
    (tmp_path / "wandb.py").write_text(WANDB)
    assert begin(tmp_path, code).splitlines() == ["[]", "None None"]


@pytest.mark.processes
@pytest.mark.sampled
def test_wandb_itself_takes_the_run_and_one_that_is_resumed_another_config(
    tmp_path: Path,
) -> None:
    code = """
        import wandb
        wandb.Run.resumed = True
        with wandb.init(project="digits", config={"lr": 1}) as run:
            wandb.config.update({"lr": 2})
            assert dict(run.config) == {"lr": 2}
            print(run.id)
        with wandb.init(settings=wandb.Settings(silent=True)) as run:
            print(run.id)
    """
    variables = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    first, second = begin(tmp_path, code, **variables).split()
    assert first == "ml-digits-1"
    assert second != first


MLFLOW = """
    import mlflow
    mlflow.set_experiment("digits")
    with mlflow.start_run() as run:
        print(run.info.run_id)
    with mlflow.start_run() as run:
        print(run.info.run_id)
"""


@pytest.mark.sampled
@pytest.mark.processes
def test_the_first_run_of_mlflow_is_continued_in_the_experiment_that_the_script_sets(
    tmp_path: Path,
) -> None:
    first, second = begin(tmp_path, MLFLOW).split()
    again, other = begin(tmp_path, MLFLOW).split()
    assert again == first
    assert len({first, second, other}) == 3
    (fresh, _) = begin(tmp_path, MLFLOW, KDIST_RUN_ID="new").split()
    assert fresh != first
    named = begin(tmp_path, MLFLOW, MLFLOW_RUN_ID=second, KDIST_RUN_ID="other").split()[0]
    assert named == second


@pytest.mark.sampled
@pytest.mark.processes
def test_a_search_that_fails_begins_a_curve_with_a_warning(tmp_path: Path) -> None:
    code = """
        import mlflow
        mlflow.MlflowClient.search_runs = lambda *_, **__: 1 / 0
        with mlflow.start_run() as run:
            print(run.info.status)
    """
    assert begin(tmp_path, code).split()[-1] == "RUNNING"


PARAMS = """
    import mlflow
    with mlflow.start_run() as run:
        print(run.info.run_id)
        mlflow.log_params({"workers": WORKERS, "lr": 1, "of": WORKERS})
        mlflow.log_param("workers", WORKERS)
"""


@pytest.mark.sampled
@pytest.mark.processes
def test_params_that_have_changed_stay_with_one_warning(tmp_path: Path) -> None:
    first = begin(tmp_path, PARAMS.replace("WORKERS", "2")).split()
    around = {
        "KDIST_GENERATION": "2",
        "KDIST_RUN_ID": RUN,
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
    }
    code = PARAMS.replace("WORKERS", "20")
    ended = run_script(tmp_path / "script.py", code=code, **around)
    assert (ended.returncode, ended.stdout.split()) == (0, first)
    assert ended.stderr.count("tracker-params-kept") == 1


@pytest.mark.sampled
@pytest.mark.processes
def test_a_run_that_cannot_be_continued_begins_a_curve_and_names_no_password(
    tmp_path: Path,
) -> None:
    begin(tmp_path, MLFLOW)
    code = """
        import mlflow, mlflow.tracking.fluent as fluent
        def get_run(*_):
            raise ValueError("https://me:secret@tracker is full")
        mlflow.set_experiment("digits")
        fluent.MlflowClient.get_run = get_run
        with mlflow.start_run() as run:
            print(run.info.status)
    """
    around = {
        "KDIST_GENERATION": "2",
        "KDIST_RUN_ID": RUN,
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
    }
    ended = run_script(tmp_path / "script.py", code=code, **around)
    assert ended.stdout.split()[-1] == "RUNNING", ended.stderr
    assert "ValueError: https://tracker is full" in ended.stderr
    assert "secret" not in ended.stderr


SCRIPT = """
import time
import mlflow, torch, wandb
from kdist_trainer import Checkpointer

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters())
with (
    wandb.init(project="digits") as run,
    mlflow.start_run(),
    Checkpointer(model=model, optimizer=optimizer, every_steps=5) as checkpointer,
):
    for step in range(checkpointer.resume() + 1, 81):
        run.log({"loss": 1 / step}, step=step)
        mlflow.log_metric("loss", 1 / step, step=step)
        time.sleep(0.05)
        checkpointer.maybe_save(step)
    checkpointer.finish(80)
"""
KILLS = 10


@pytest.mark.chaos
@pytest.mark.wide
@pytest.mark.processes
def test_a_script_has_one_run_through_ten_kills(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(SCRIPT)
    env = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
    }
    job = describe_job(
        "curve",
        nodes=1,
        train={},
        script={"path": "train.py"},
        code=str(tmp_path / "code"),
        env=[{"name": name, "value": value} for name, value in env.items()],
    )
    del job["spec"]["train"]
    run = TrainingRun(tmp_path / "kdist", job)
    with run:
        for number in range(1, KILLS + 1):
            run.wait_until(partial(has_saved, run, number), f"a save of generation {number}")
            kill(run.ranks()[0].pid)
        assert run.wait() == 0, run.output()
    assert len(run.events("generation")) == KILLS + 1
    folders = [path.name for path in tmp_path.glob("wandb/offline-run-*")]
    assert len(folders) == KILLS + 1
    identity = json.loads((run.folder / "run.json").read_text())["run_id"]
    assert {name.split("-")[-1] for name in folders} == {identity}
    with sqlite3.connect(tmp_path / "mlflow.db") as store:
        assert store.execute("select count(*) from runs").fetchone() == (1,)
        steps = store.execute("select distinct step from metrics where key = 'loss'").fetchall()
    assert {step for (step,) in steps} == {*range(1, 81)}
