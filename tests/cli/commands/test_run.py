"""`kdist run` of scripts, and its usage: arguments, exit codes, and what is refused before anything
starts.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from kdist.commands.run import _job_of_script, exit_code, is_script
from kdist.job.local import RunEnded
from kdist.job.local.supervisor import Kind, Outcome
from kdist.spec import TrainingJob
from tests.cli.conftest import Kdist
from tests.cli.running import PATIENCE, Start, Terminal, processes_of, write_job, write_script
from tests.patience import soon

HELLO = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "KDIST_NODE")
print("hello", json.dumps([sys.argv, os.getcwd(), [os.environ[name] for name in names]]), \
flush=True)
"""


@pytest.mark.processes
@pytest.mark.sampled
def test_a_script_runs_as_under_torchrun_with_its_arguments_untouched(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "sub").mkdir()
    script = write_script(tmp_path, HELLO, "sub/my_script.py")
    run = start(
        "--nodes",
        "2",
        "--procs-per-node",
        "2",
        script,
        "--lr",
        "0.1",
        "--nodes",
        "7",
        "-o",
        "json",
        "--",
        "-h",
    )
    assert "done" in run.wait(0)
    hellos = re.findall(r"^\[(rank\d)\]: hello (.*)$", run.errors(), re.MULTILINE)
    reported = [json.loads(text) for _, text in hellos]
    assert [each[0] for each in reported] == [
        [script, "--lr", "0.1", "--nodes", "7", "-o", "json", "--", "-h"]
    ] * 4
    assert {each[1] for each in reported} == {str(tmp_path)}
    places = [
        [str(rank), str(rank % 2), "4", str(rank // 2), f"node-{rank // 2}"] for rank in range(4)
    ]
    assert sorted(each[2] for each in reported) == places, "ranks follow the nodes' numbers"
    assert [f"rank{each[2][0]}" for each in reported] == [rank for rank, _ in hellos], (
        "each line carries its rank"
    )
    old = json.loads((run.folder("sub-my-script") / "run.json").read_text())["run_id"]

    fresh = start("--fresh", script)
    fresh.wait(0)
    assert re.search(
        r"run-archived +the previous run is in .*/runs/sub-my-script\.\d{8}-\d{6}", fresh.errors()
    )
    (aside,) = (tmp_path / "runs").glob("sub-my-script.*")
    assert json.loads((aside / "run.json").read_text())["run_id"] == old
    assert json.loads((run.folder("sub-my-script") / "run.json").read_text())["run_id"] != old


BOOM = """
import os

def explode():
    raise ValueError("boom [with brackets]")

if os.environ["RANK"] == "1":
    explode()
import time
time.sleep(600)
"""


@pytest.mark.processes
@pytest.mark.sampled
def test_an_exception_of_the_users_fails_the_job_and_is_shown_with_its_place(
    start: Start, tmp_path: Path
) -> None:
    script = write_script(tmp_path, BOOM)
    run = start("--nodes", "2", script)
    assert "failed" in run.wait(10)
    failure = json.loads((run.folder("script") / "report.json").read_text())["failure"]
    assert (failure["cause"], failure["rank"]) == ("user_code", 1)
    last = run.errors().splitlines()[-3:]
    where = f"rank 1 on {failure['node']}"  # agents are ranked by their pids
    assert last[0].startswith(
        f"Error: script failed (user_code), {where}: ValueError: boom [with brackets]"
    )
    assert f'{script}", line 5, in explode' in last[1]
    place = f"{tmp_path / script}:5"
    assert last[2] == f"Next: fix {place}, then kdist run --nodes 2 {script}"
    assert "[rank1]: ValueError: boom [with brackets]" in run.errors()


BARS = """
import os, pathlib, sys, time
began = now = time.monotonic()
while not pathlib.Path("enough").exists():
    sys.stderr.write(f"\\r{now - began:6.1f} s |###  |")  # as tqdm does
    sys.stderr.flush()
    time.sleep(0.1)
    now = time.monotonic()
sys.stderr.write(f"\\r{now - began:6.1f} s |#####|")
sys.stderr.write("\\n")
"""


@pytest.mark.sampled
@pytest.mark.processes
def test_progress_bars_of_ranks_move_on_a_terminal_and_do_not_flood_a_log(
    start: Start, tmp_path: Path
) -> None:
    bars = [write_script(tmp_path, BARS, name) for name in ("seen.py", "logged.py")]
    logged = start("--nodes", "2", bars[1])
    with Terminal() as terminal:
        seen = start("--procs-per-node", "2", bars[0], stderr=terminal.theirs)
        terminal.close_theirs()
        states = re.compile(r"\[rank([01])\]: +[\d.]+ s \|###  \|")
        moving = r"\[rank1\]: +([\d.]+) s \|###  \|"
        assert soon(lambda: len(set(re.findall(moving, terminal.text()))) >= 3, PATIENCE), (
            terminal.text()
        )
        logged.wait_until(lambda: len(states.findall(logged.errors())) >= 2, "state of both ranks")
        (tmp_path / "enough").touch()
        assert soon(lambda: terminal.text() and seen.process.poll() is not None, PATIENCE)
        ends = set(re.findall(r"\[rank([01])\]: +[\d.]+ s \|#####\|", terminal.text()))
    seen.wait(0)
    logged.wait(0)
    assert ends == {"0", "1"}
    assert "step 0" not in terminal.text()
    for rank in ("0", "1"):
        (end,) = re.findall(
            rf"^\[rank{rank}\]: +([\d.]+) s \|#####\|$", logged.errors(), re.MULTILINE
        )
        shown = states.findall(logged.errors()).count(rank)
        assert 1 <= shown <= float(end) / 5 + 1, "one state in five seconds"


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize(("args", "world"), [((), "2"), (("--nodes", "1"), "1")])
def test_a_job_runs_on_as_many_nodes_as_it_has_for_now(
    start: Start, tmp_path: Path, args: tuple[str, ...], world: str
) -> None:
    write_script(tmp_path, HELLO, "hello.py")
    document = {
        "apiVersion": "kdist.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "hello"},
        "spec": {
            "nodes": {"min": 1, "max": 4},
            "replicas": 2,
            "restartedAt": "2026-05-01T12:00:00Z",
            "script": {"path": "hello.py"},
        },
    }
    (tmp_path / "job.yaml").write_text(json.dumps(document))
    run = start(*args, "job.yaml")
    run.wait(0)
    ranks = [
        json.loads(line.partition("hello ")[2])
        for line in run.errors().splitlines()
        if "hello [" in line
    ]
    assert {each[2][2] for each in ranks} == {world}


DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf now", flush=True)
time.sleep(600)
"""


@pytest.mark.processes
@pytest.mark.sampled
def test_the_second_signal_ends_a_job_that_does_not_stop(start: Start, tmp_path: Path) -> None:
    run = start(write_script(tmp_path, DEAF))
    run.wait_until(lambda: "deaf now" in run.errors(), "script")
    run.process.send_signal(signal.SIGTERM)
    run.wait_until(lambda: "stops (SIGTERM" in run.errors(), "word of the stop")

    def ask_again() -> bool:  # what comes within five seconds is the same request
        run.process.send_signal(signal.SIGTERM)
        return "force-stopping" in run.errors()

    run.wait_until(ask_again, "end")
    run.wait(11)
    assert "script was ended at once; nothing was saved yet" in run.errors()
    assert "saves and stops" not in run.errors(), "it cannot save"
    assert processes_of(run.folder("script")) == []


@pytest.mark.sampled
@pytest.mark.processes
def test_a_training_does_not_end_because_nobody_reads_its_lines(
    start: Start, tmp_path: Path
) -> None:
    reader, writer = os.pipe()
    run = start(write_script(tmp_path, HELLO), stderr=writer)
    os.close(writer)
    os.close(reader)
    assert "done" in run.wait(0)


@pytest.mark.parametrize(
    ("kind", "trainer", "by", "code", "propagated"),
    [
        ("done", 0, None, 0, 0),
        ("failed", 70, None, 10, 70),
        ("failed", 75, signal.SIGINT, 10, 75),
        ("failed", -9, None, 10, 137),
        ("stopped", 200, signal.SIGINT, 130, 200),
        ("stopped", 200, signal.SIGTERM, 11, 200),
        ("stopped", 200, signal.SIGHUP, 11, 200),
        ("stopped", 203, signal.SIGINT, 10, 203),
        ("killed", -9, signal.SIGINT, 130, 137),
        ("killed", -9, signal.SIGTERM, 11, 137),
    ],
)
def test_every_end_has_its_exit_code(
    kind: Kind, trainer: int, by: signal.Signals | None, code: int, propagated: int
) -> None:
    ended = RunEnded(Outcome(kind, trainer, "node-0"), {}, by)
    assert exit_code(ended, propagate=False) == code
    assert exit_code(ended, propagate=True) == propagated


BAD = [
    (["missing.yaml"], "there is no file `missing.yaml`"),
    (["missing.py"], "there is no file `missing.py`"),
    (["job.yaml", "extra"], "a job takes no arguments of its own, found `extra`"),
    (["torchrun", "--nproc-per-node", "2", "train.py", "--lr", "1"], "N train.py --lr 1"),
    (["accelerate", "launch", "train.py"], "remove the launcher `accelerate`"),
    (["job.yaml", "--nodes", "many"], "--nodes takes a number or MIN:MAX, found `many`"),
    (["job.yaml", "--nodes", "3:2"], "min (3) is more than max (2)"),
    (["job.yaml", "--set", "spec.train.epoch=2"], "spec.train.epochs"),
    (["job.yaml", "--procs-per-node", "0"], "procsPerNode"),
    (["job.yaml", "--bogus"], "No such option"),
    (["job.yaml", "--set", "spec.suspend=true"], "--set spec.suspend=false runs it here"),
    (["job.yaml", "--set", "spec.code={configMap: mine}"], "--set spec.code=FOLDER names the same"),
    ([], "Missing argument 'FILE'"),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a `kdist` in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KDIST_HOME", str(tmp_path / "runs"))
    return tmp_path


@pytest.mark.parametrize(
    ("args", "reported"), BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_wrong_file_or_usage_is_reported_before_anything_starts(
    kdist: Kdist, here: Path, args: list[str], reported: str
) -> None:
    write_job(here)
    result = kdist("run", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert reported in result.stderr
    assert not (here / "runs").exists()


def test_a_job_with_problems_shows_them_all_with_their_places(kdist: Kdist, here: Path) -> None:
    (here / "job.yaml").write_text(
        "apiVersion: kdist.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: A}\nspec: {node: 2}\n"
    )
    result = kdist("run", "job.yaml")
    assert result.exit_code == 2
    assert "job.yaml:3:" in result.stderr
    assert "job.yaml:4:" in result.stderr


def test_a_secret_that_is_not_in_the_environment_is_asked_for(kdist: Kdist, here: Path) -> None:
    write_job(here, env=[{"name": "API_KEY", "secret": {"name": "s", "key": "k"}}])
    result = kdist("run", "job.yaml")
    assert result.exit_code == 2
    assert (
        "API_KEY is a secret (key k of the Secret s on a cluster): set it in the "
        "environment of kdist run"
    ) in result.stderr


@pytest.mark.parametrize(
    ("name", "text", "script"),
    [
        ("train.py", "", True),
        ("train", "#!/usr/bin/env python3\n", True),
        ("train", "#!/bin/sh\n", False),
        ("train", "apiVersion: kdist.dev/v1alpha1\n", False),
        ("job.yaml", "#!/usr/bin/env python3\n", False),
        ("-", "", False),
    ],
)
def test_a_script_is_reported_from_a_job_by_its_name_or_its_first_line(
    here: Path, name: str, text: str, script: bool
) -> None:
    (here / name).write_text(text)
    assert is_script(name) is script


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("train.py", "train"),
        ("mnist/main.py", "mnist-main"),
        ("/srv/minGPT/main.py", "mingpt-main"),
        ("../3d/fit.py", "script-3d-fit"),
    ],
)
def test_a_script_alone_is_named_after_its_folder_and_itself(file: str, name: str) -> None:
    assert _job_of_script(file, ())["metadata"]["name"] == name


def test_a_script_in_a_folder_with_a_long_name_is_a_job() -> None:
    document = _job_of_script(f"{'folder-' * 9}a/{'main' * 5}.py", ())
    assert document["metadata"]["name"].endswith("a-mainmainmainmainmain")
    TrainingJob.model_validate(document)


def test_a_module_is_run_as_torchrun_runs_it() -> None:
    document = _job_of_script("trl.scripts.sft", ("--lr", "1"), module=True)
    assert document["metadata"]["name"] == "scripts-sft"
    assert document["spec"]["script"] == {"module": "trl.scripts.sft", "args": ["--lr", "1"]}
