"""`kdist run` from outside: real agents, real ranks, real signals."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kdist.commands.run import exit_code
from kdist.local import Ended
from kdist.local.kubelet import Kind, Outcome

PATIENCE = 180.0  # seconds; a condition on a loaded machine

Kdist = Callable[..., "Run"]


class Run:
    """One `kdist run` at work in the folder `home`."""

    def __init__(self, home: Path, *args: str, stderr: Any = None) -> None:
        self.home = home
        environment = {**os.environ, "KDIST_HOME": str(home / "runs"), "NO_COLOR": "1", "TERM": "xterm"}
        command = [sys.executable, "-m", "kdist", "run", *args]
        self._errors = (home / "stderr").open("w+")
        self.process = subprocess.Popen(
            command,
            cwd=home,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stderr or self._errors,
            text=True,
            start_new_session=True,
        )

    def wait(self, code: int) -> str:
        """What was printed to stdout, once it has ended with this code."""
        try:
            out, _ = self.process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            pytest.fail(f"did not end:\n{self.errors()}")
        assert self.process.returncode == code, self.errors()
        return out

    def errors(self) -> str:
        return (self.home / "stderr").read_text()

    def wait_until(self, condition: Callable[[], Any], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.errors()}"
            assert time.monotonic() < end, f"no {what}:\n{self.errors()}"
            time.sleep(0.05)

    def folder(self, name: str) -> Path:
        return self.home / "runs" / name

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._errors.close()


@pytest.fixture
def kdist(tmp_path: Path) -> Iterator[Kdist]:
    """Start `kdist run` with these arguments: `kdist("job.yaml", "--nodes", "2")`."""
    runs: list[Run] = []

    def start(*args: str, stderr: Any = None) -> Run:
        runs.append(Run(tmp_path, *args, stderr=stderr))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def write_job(home: Path, name: str = "digits", *, nodes: int = 2, steps: int = 24, checkpoint: int = 10, **spec: Any) -> str:
    train = {
        "workload": "digits",
        "steps": steps,
        "globalBatch": 32,
        "checkpoint": {"every": {"steps": checkpoint}},
        "syncEverySteps": 2,
    }
    document = {
        "apiVersion": "kdist.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {"nodes": nodes, "procsPerNode": 1, "train": train, **spec},
    }
    (home / "job.yaml").write_text(yaml.safe_dump(document))
    return "job.yaml"


def write_script(home: Path, text: str, name: str = "script.py") -> str:
    (home / name).write_text(text)
    return name


def read_ledger(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / "checkpoints" / "ledger" / f"{name}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def commits(folder: Path) -> list[int]:
    return [event["step"] for event in read_ledger(folder, "events") if event["event"] == "commit"]


def processes_of(folder: Path) -> list[str]:
    """Command lines of the live processes that were told of this run folder, by argument or by environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
                command = (entry / "cmdline").read_bytes()
                told = command + (entry / "environ").read_bytes()
            except OSError:
                continue
            if state not in "ZX" and f"{folder}/".encode() in told:
                found.append(f"{entry.name} {command.decode(errors='replace')}")
    return found


@pytest.mark.processes
def test_a_job_on_two_nodes_trains_to_its_end_and_reports(kdist: Kdist, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    run = kdist(job, "-o", "json")
    report = json.loads(run.wait(0))
    folder = run.folder("digits")
    assert report["outcome"] == "done"
    assert report["steps"] == {"reached": 24, "committed": 24, "lost": 0, "samples": 24 * 32}
    assert report["restarts"]["total"] == 0
    assert 0 < report["goodput"] <= 1
    assert 0 < report["metrics"]["accuracy"] <= 1
    assert report["loss"] == float.fromhex(read_ledger(folder, "steps")[-1]["loss"])
    assert json.loads((folder / "report.json").read_text()) == report
    lines = run.errors().splitlines()
    events = [found[1] for line in lines if (found := re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ \S+ ([a-z-]+) +\S", line))]
    assert [name for name in events if name in ("group-formed", "first-step", "done")] == ["group-formed", "first-step", "done"]
    assert events.count("agent-started") == 2
    assert "\x1b" not in run.errors()
    assert processes_of(folder) == []

    again = kdist(job)
    assert "done" in again.wait(0)
    assert "digits is done already" in again.errors()
    assert len(read_ledger(folder, "steps")) == 24


@pytest.mark.processes
def test_ctrl_c_saves_and_the_next_run_goes_on_at_the_following_step(kdist: Kdist, tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=100_000, checkpoint=100_000)
    run = kdist(job)
    folder = run.folder("digits")
    run.wait_until(lambda: len(read_ledger(folder, "steps")) > 5, "first steps")
    run.process.send_signal(signal.SIGINT)
    run.wait(130)
    saved = commits(folder)[-1]
    assert f"digits stopped; step {saved:,} is saved. Next: kdist run job.yaml   goes on from there" in run.errors()
    assert json.loads((folder / "report.json").read_text())["outcome"] == "stopped"

    kdist(job, "--set", f"spec.train.steps={saved + 5}", "-o", "json").wait(0)
    steps = read_ledger(folder, "steps")
    resumed = [line["step"] for line in steps if line["generation"] == steps[-1]["generation"]]
    assert resumed == list(range(saved + 1, saved + 6))


@pytest.mark.processes
def test_a_second_run_is_refused_and_the_death_of_the_first_ends_everything(kdist: Kdist, tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=100_000, checkpoint=100_000)
    run = kdist(job)
    folder = run.folder("digits")
    run.wait_until(lambda: len(read_ledger(folder, "steps")) > 0, "first step")
    second = subprocess.run(
        [sys.executable, "-m", "kdist", "run", job],
        cwd=tmp_path,
        env={**os.environ, "KDIST_HOME": str(tmp_path / "runs")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.returncode == 1
    assert f"another kdist run (pid {run.process.pid}) is at work in {folder}" in second.stderr

    assert len(processes_of(folder)) >= 4, "two agents and two ranks"
    run.process.kill()
    end = time.monotonic() + 2
    while processes_of(folder) and time.monotonic() < end:
        time.sleep(0.02)
    assert processes_of(folder) == []


HELLO = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK")
print("hello", json.dumps([sys.argv, os.getcwd(), [os.environ[name] for name in names]]), flush=True)
"""


@pytest.mark.processes
def test_a_script_runs_as_under_torchrun_with_its_arguments_untouched(kdist: Kdist, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    script = write_script(tmp_path, HELLO, "sub/my_script.py")
    run = kdist("--nodes", "2", "--procs-per-node", "2", script, "--lr", "0.1", "--nodes", "7", "-o", "json", "--", "-h")
    assert "done" in run.wait(0)
    hellos = re.findall(r"^\[(node-\d)\] hello (.*)$", run.errors(), re.MULTILINE)
    told = [json.loads(text) for _, text in hellos]
    assert [each[0] for each in told] == [[script, "--lr", "0.1", "--nodes", "7", "-o", "json", "--", "-h"]] * 4
    assert {each[1] for each in told} == {str(tmp_path)}
    assert sorted(each[2] for each in told) == [[str(rank), str(rank % 2), "4", str(rank // 2)] for rank in range(4)]
    assert re.search(r"kdist waiting +starting: \d of 2 agents load torch", run.errors()), "a quiet job says what it waits for"
    assert sorted(node for node, _ in hellos) == ["node-0", "node-0", "node-1", "node-1"]
    old = json.loads((run.folder("my-script") / "run.json").read_text())["run_id"]

    fresh = kdist("--fresh", script)
    fresh.wait(0)
    assert re.search(r"moved-aside +the old run is in .*/runs/my-script\.\d{8}-\d{6}", fresh.errors())
    (aside,) = (tmp_path / "runs").glob("my-script.*")
    assert json.loads((aside / "run.json").read_text())["run_id"] == old
    assert json.loads((run.folder("my-script") / "run.json").read_text())["run_id"] != old


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
def test_an_exception_of_the_users_fails_the_job_and_is_shown_with_its_place(kdist: Kdist, tmp_path: Path) -> None:
    script = write_script(tmp_path, BOOM)
    run = kdist("--nodes", "2", script)
    assert "failed" in run.wait(10)
    last = run.errors().splitlines()[-3:]
    assert last[0].startswith("Error: script failed (user_code), rank 1 on node-1: ValueError: boom [with brackets]")
    assert f'{script}", line 5, in explode' in last[1]
    assert last[2] == f"Next: kdist run {script}"
    assert "[node-1] ValueError: boom [with brackets]" in run.errors()
    failure = json.loads((run.folder("script") / "report.json").read_text())["failure"]
    assert (failure["cause"], failure["rank"], failure["node"]) == ("user_code", 1, "node-1")


DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf now", flush=True)
time.sleep(600)
"""


@pytest.mark.processes
def test_the_second_signal_ends_a_job_that_does_not_stop(kdist: Kdist, tmp_path: Path) -> None:
    run = kdist(write_script(tmp_path, DEAF))
    run.wait_until(lambda: "deaf now" in run.errors(), "script")
    run.process.send_signal(signal.SIGTERM)
    run.wait_until(lambda: "saves and stops (SIGTERM" in run.errors(), "word of the stop")
    run.process.send_signal(signal.SIGTERM)
    run.wait(11)
    assert "script was ended at once; nothing was saved yet" in run.errors()
    assert processes_of(run.folder("script")) == []


@pytest.mark.processes
def test_on_a_terminal_the_job_is_seen_live(kdist: Kdist, tmp_path: Path) -> None:
    job = write_job(tmp_path, nodes=1, steps=150)
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    run = kdist(job, stderr=slave)
    os.close(slave)
    seen = b""
    end = time.monotonic() + PATIENCE
    while run.process.poll() is None:
        assert time.monotonic() < end, seen.decode(errors="replace")
        if select.select([master], [], [], 0.2)[0]:
            try:
                seen += os.read(master, 1 << 16)
            except OSError:  # the other end is closed
                break
    assert run.process.wait(PATIENCE) == 0, seen.decode(errors="replace")
    os.close(master)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode(errors="replace"))
    for part in ("… starting: 1 of 1 agents", "━", "/150", "loss ", "learning rate", "NODE", "Ctrl-C saves and stops"):
        assert part in text, text
    assert "group-formed" not in text, "the live view tells sentences, not names of events"


@pytest.mark.processes
def test_an_agent_that_is_killed_is_started_again_and_the_training_ends_well(kdist: Kdist, tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=80, checkpoint=20)
    run = kdist(job, "-o", "json")
    folder = run.folder("digits")
    run.wait_until(lambda: len(commits(folder)) >= 1, "checkpoint")
    os.kill(json.loads((folder / "node-1" / "agent.json").read_text())["pid"], signal.SIGKILL)
    report = json.loads(run.wait(0))
    assert report["restarts"] == {"total": 1, "byCause": {"node_lost": 1}, "joins": 0, "generations": 2}
    assert len(report["recoverySeconds"]) == 1
    assert re.search(r"node-1 agent-restarting +agent ended by signal 9; starts again in 0.5 s", run.errors())
    effective = {line["step"]: line for line in read_ledger(folder, "steps")}
    assert sorted(effective) == list(range(1, 81))


@pytest.mark.processes
def test_a_training_does_not_end_because_nobody_reads_its_lines(kdist: Kdist, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    run = kdist(write_script(tmp_path, HELLO), stderr=writer)
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
def test_every_end_has_its_exit_code(kind: Kind, trainer: int, by: signal.Signals | None, code: int, propagated: int) -> None:
    ended = Ended(Outcome(kind, trainer, "node-0"), {}, by)
    assert exit_code(ended, propagate=False) == code
    assert exit_code(ended, propagate=True) == propagated


BAD = [
    (["missing.yaml"], "there is no file `missing.yaml`"),
    (["missing.py"], "there is no file `missing.py`"),
    (["job.yaml", "extra"], "a job takes no arguments of its own, found `extra`"),
    (["job.yaml", "--nodes", "many"], "--nodes takes a number or MIN:MAX, found `many`"),
    (["job.yaml", "--nodes", "3:2"], "min (3) is more than max (2)"),
    (["job.yaml", "--set", "spec.train.epoch=2"], "spec.train.epochs"),
    (["job.yaml", "--procs-per-node", "0"], "procsPerNode"),
    (["job.yaml", "--bogus"], "No such option"),
    ([], "Missing argument 'FILE'"),
]


@pytest.mark.parametrize(("args", "told"), BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_a_wrong_file_or_usage_is_told_before_anything_starts(kdist: Kdist, tmp_path: Path, args: list[str], told: str) -> None:
    write_job(tmp_path)
    run = kdist(*args)
    assert run.wait(2) == ""
    assert told in run.errors()
    assert "Traceback" not in run.errors()
    assert not (tmp_path / "runs").exists()


def test_a_job_with_problems_shows_them_all_with_their_places(kdist: Kdist, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "apiVersion: kdist.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: A}\nspec: {node: 2}\n"
    )
    run = kdist("job.yaml")
    run.wait(2)
    assert "job.yaml:3:" in run.errors()
    assert "job.yaml:4:" in run.errors()


def test_a_secret_that_is_not_in_the_environment_is_asked_for(kdist: Kdist, tmp_path: Path) -> None:
    job = write_job(tmp_path, env=[{"name": "API_KEY", "secret": {"name": "s", "key": "k"}}])
    run = kdist(job)
    run.wait(2)
    assert "API_KEY is a secret (key k of the Secret s on a cluster): set it in the environment of kdist run" in run.errors()
