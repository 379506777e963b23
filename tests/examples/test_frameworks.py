"""The example scripts of training frameworks: killed twice they end with the weights that torchrun
gives them uninterrupted, and what /metrics shows on the way is what the framework has logged.

The weights are compared bitwise: on two CPU ranks each of the three is exact, its loader included.
"""

from __future__ import annotations

import csv
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.draw import read_commit
from tests.faults.training_run import TrainingRun, describe_job, kill
from tests.house.tree import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.chaos, pytest.mark.timeout(900)]

FOLDER = ROOT / "examples" / "script"
SCRIPTS = ("accelerate_digits.py", "fsdp_kdist.py", "lightning_digits.py", "trainer.py")
DRAWN = random.Random(os.environ.get("KDIST_SEED") or read_commit(ROOT)).choice(SCRIPTS)

each_framework = pytest.mark.parametrize(
    "script",
    [one if one == DRAWN else pytest.param(one, marks=pytest.mark.wide) for one in SCRIPTS],
)
"""Each framework; CI goes through one, drawn by the commit or by KDIST_SEED."""

Curve = dict[int, float]


def arguments_of(script: str, home: Path) -> list[str]:
    return [] if script.startswith(("accelerate", "fsdp")) else ["--output", str(home / "results")]


def make_run(script: str, home: Path) -> TrainingRun:
    section = {"path": script, "args": arguments_of(script, home)}
    job = describe_job("framework", nodes=2, train={}, script=section, code=str(FOLDER))
    del job["spec"]["train"]
    return TrainingRun(home, job)


def train_by_torchrun(script: str, home: Path) -> str:
    """The digest of the weights of two ranks that nothing interrupts, and kdist does not see."""
    home.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(FOLDER / script), *arguments_of(script, home)],
        cwd=home,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    # gloo's destructors may abort a rank whose work is done, which torchrun reports as a failure
    assert "weights" in done.stdout, done.stderr[-4000:]
    return read_weights(done.stdout)


def read_weights(output: str) -> str:
    digest: str = re.findall(r"weights ([0-9a-f]{64})", output)[-1]
    return digest


def read_logged(script: str, home: Path) -> Curve:
    """The training loss by step that the framework has logged itself."""
    if script.startswith("trainer"):
        state = json.loads((home / "results" / "trainer_state.json").read_text())
        return {one["step"]: one["loss"] for one in state["log_history"] if "loss" in one}
    if script.startswith("lightning"):
        found: Curve = {}
        for path in sorted((home / "results").rglob("metrics.csv")):
            for row in csv.DictReader(path.read_text().splitlines()):
                if row.get("train_loss"):
                    found[int(row["step"]) + 1] = float(row["train_loss"])
        return found
    printed = re.findall(r"rank0\]: step (\d+): loss ([0-9.e-]+)", (home / "output").read_text())
    return {int(step): float(loss) for step, loss in printed}


def has_saved(run: TrainingRun, generation: int) -> bool:
    """Whether the newest group of ranks is of this generation and has committed a checkpoint."""
    events = run.events()
    numbers = [one["generation"] for one in events if one["event"] == "generation"]
    return numbers[-1:] == [generation] and events[-1]["event"] == "commit"


@contextmanager
def watching(run: TrainingRun) -> Iterator[set[tuple[int, float]]]:
    """Scrape the agent of rank 0 all the time; yields the pairs of last step and loss."""
    found: set[tuple[int, float]] = set()
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(0.02):
            for note in run.folder.glob("node-*/agent.json"):
                try:
                    port = json.loads(note.read_text())["port"]
                    url = f"http://127.0.0.1:{port}/metrics"
                    with urllib.request.urlopen(url, timeout=5) as answer:
                        text = answer.read().decode()
                except (OSError, ValueError, KeyError):
                    continue
                step = re.search(r"^kdist_last_step\{.*\} (\S+)$", text, re.MULTILINE)
                loss = re.search(r"^kdist_loss\{.*\} (\S+)$", text, re.MULTILINE)
                if step and loss:
                    found.add((int(float(step[1])), float(loss[1])))

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def assert_is_logged(seen: set[tuple[int, float]], logged: Curve) -> None:
    """Each loss that was scraped is the logged one of the step that was scraped with it."""
    assert len(seen) >= 5, "scrapes"
    for step, loss in seen:
        assert logged[step] == loss, f"step {step}"


@pytest.mark.sampled
@each_framework
def test_a_frameworks_script_that_is_killed_twice_ends_as_one_that_nothing_interrupts(
    script: str, tmp_path: Path
) -> None:
    expected = train_by_torchrun(script, tmp_path / "torchrun")
    run = make_run(script, tmp_path / "kdist")
    with run, watching(run) as seen:
        for number in (1, 2):
            run.wait_until(
                partial(has_saved, run, number), f"a checkpoint of generation {number}", every=0.002
            )
            kill(run.ranks()[-number].pid)
        assert run.wait() == 0, run.output()
    generations = run.events("generation")
    assert [event["reason"] for event in generations] == ["start", "failure", "failure"]
    assert 0 < generations[1]["from_step"] < generations[2]["from_step"]
    assert not run.events("separate-ranks")
    assert read_weights(run.output()) == expected
    assert_is_logged(seen, read_logged(script, run.home))


@each_framework
@pytest.mark.wide
def test_a_frameworks_script_that_is_asked_to_stop_has_saved_and_goes_on(
    script: str, tmp_path: Path
) -> None:
    expected = train_by_torchrun(script, tmp_path / "torchrun")
    run = make_run(script, tmp_path / "kdist")
    with run:
        run.wait_until(lambda: run.events("commit"), "the first checkpoint", every=0.002)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output()
    saved = run.events("commit")[-1]["step"]
    with run:
        assert run.wait() == 0, run.output()
    assert run.events("generation")[-1]["from_step"] == saved
    assert read_weights(run.output()) == expected
