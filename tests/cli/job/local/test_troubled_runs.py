"""What `kdist run`, `why` and the end say of a script that hangs, a disk without room, and a run
that is ended at once: with real processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cli.running import (
    Run,
    Start,
    commits,
    processes_of,
    read_ledger,
    write_job,
    write_script,
)
from tests.small_disk import fill, small_disk

pytestmark = [
    pytest.mark.processes,
    pytest.mark.chaos,
    pytest.mark.sampled,
    pytest.mark.timeout(400),
]

HANGS = """
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    time.sleep(100_000)
dist.all_reduce(torch.ones(1))
"""
SAVES = """
import pathlib
import time

import torch
import torch.distributed as dist

from kdist_trainer import Checkpointer

dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Checkpointer(model=model, optimizer=optimizer, every_seconds=1000) as checkpointer:
    for step in range(checkpointer.resume() + 1, 100_000):
        time.sleep(0.01)
        checkpointer.maybe_save(step)
        if step == 20:
            pathlib.Path(__file__).with_name("trains").touch()
        if checkpointer.stop_requested:
            break
"""


@pytest.fixture(name="disk")
def make_disk(tmp_path: Path) -> Iterator[Path]:
    yield from small_disk(tmp_path / "disk", mib=12)


def ask_until(run: Run, pattern: str, *words: str) -> re.Match[str]:
    """What `kdist` answers once it matches."""
    answers: list[re.Match[str]] = []

    def is_said() -> bool:
        found = re.search(pattern, " ".join(run.ask(*words).split()))
        answers.extend([found] if found else [])
        return found is not None

    run.wait_until(is_said, f"{pattern} in the answer to {words}")
    return answers[0]


def rank_pids(folder: Path) -> list[int]:
    lines = [line for log in folder.glob("node-*/log") for line in log.read_text().splitlines()]
    return [json.loads(line)["pid"] for line in lines if '"event":"worker-started"' in line]


def test_of_a_script_that_hangs_it_is_said_who_waits_in_what_and_at_which_line_the_other_stands(
    start: Start, tmp_path: Path
) -> None:
    run = start("--nodes", "2", write_script(tmp_path, HANGS, "hangs.py"))
    run.wait_until(lambda: "rendezvous-completed" in run.errors(), "the ranks")
    line = 1 + HANGS[: HANGS.index("time.sleep")].count("\n")
    told = ask_until(
        run, r"rank 0 has been at .* while rank 1 has waited in \S+ #1", "why", "hangs"
    )
    assert f"hangs.py:{line} in <module>" in told[0]
    assert "all_reduce(float32[1])" in told[0]
    run.process.send_signal(signal.SIGINT)
    run.wait(130)


def test_a_training_that_starts_again_on_a_full_disk_waits_for_room_and_is_not_repeated(
    start: Start, disk: Path, tmp_path: Path
) -> None:
    kept = disk / "checkpoints"
    job = write_job(
        tmp_path, nodes=1, steps=100_000, checkpoint=10, checkpoints={"path": str(kept)}
    )
    document = yaml.safe_load((tmp_path / job).read_text())
    document["spec"]["train"] |= {"recovery": "restart"}
    document["spec"]["train"]["checkpoint"]["keep"] = 1
    (tmp_path / job).write_text(yaml.safe_dump(document))
    run = start(job)
    run.wait_until(lambda: (kept / "LATEST").exists(), "a checkpoint")
    ballast = fill(disk)
    told = ask_until(run, r"storage: (\S+) \(checkpoints\) has (\S+ \w+) free of", "why", "digits")
    assert told[1] == str(kept)
    saved = commits(disk)
    os.kill(rank_pids(run.folder("digits"))[-1], signal.SIGKILL)
    run.wait_until(lambda: "storage-unavailable" in run.errors(), "the pause")
    told = ask_until(run, r"waits for room, retrying in (\d+) s", "why", "digits")
    assert int(told[1]) >= 60
    groups = run.errors().count("rendezvous-completed")
    ballast.unlink()
    run.wait_until(lambda: commits(disk) > saved, "another checkpoint")
    assert groups <= 2, "it was not repeated meanwhile"
    assert run.errors().count("rendezvous-completed") <= groups + 1
    run.process.send_signal(signal.SIGINT)
    run.wait(130)


@pytest.mark.parametrize("kind", ["train", "script"])
def test_a_run_of_which_every_process_is_asked_to_end_saves_its_step(
    kind: str, start: Start, tmp_path: Path
) -> None:
    """As a machine does that shuts down."""
    job = write_job(tmp_path, steps=100_000, checkpoint=100_000)
    document = yaml.safe_load((tmp_path / job).read_text())
    if kind == "script":
        write_script(tmp_path, SAVES)
        document["spec"].pop("train")
        document["spec"]["script"] = {"path": "script.py", "preload": "torch"}
    else:
        # the ranks agree on the stop after more steps than are loaded ahead
        document["spec"]["train"] |= {"loader": {"workers": 1}, "syncEverySteps": 100}
    (tmp_path / job).write_text(yaml.safe_dump(document))
    run = start(job)
    folder = run.folder("digits")
    run.wait_until(lambda: "first-step" in run.errors() or (tmp_path / "trains").exists(), "steps")
    for pid in {run.process.pid, *(int(one.split()[0]) for one in processes_of(folder))}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    run.wait(11)
    assert commits(folder), run.errors()
    assert "worker-failed" not in run.errors()
    assert not json.loads((folder / "report.json").read_text())["notSaved"]
    assert processes_of(folder) == []


def test_a_run_that_is_ended_at_once_says_how_many_steps_are_not_saved(
    start: Start, tmp_path: Path
) -> None:
    run = start(write_job(tmp_path, steps=100_000, checkpoint=30))
    folder = run.folder("digits")

    def has_unsaved_steps() -> bool:
        steps = read_ledger(folder, "steps")
        return bool(commits(folder)) and steps[-1]["step"] > commits(folder)[-1] + 1

    run.wait_until(has_unsaved_steps, "steps after a checkpoint")
    for pid in rank_pids(folder):
        os.kill(pid, signal.SIGSTOP)  # so that none can save
    run.process.send_signal(signal.SIGINT)
    run.wait_until(lambda: "saves and stops" in run.errors(), "word of the stop")

    def is_ended_at_once() -> bool:
        run.process.send_signal(signal.SIGINT)
        return "exits now" in run.errors()

    run.wait_until(is_ended_at_once, "word of the end")
    run.wait(130)
    saved = commits(folder)[-1]
    lost = json.loads((folder / "report.json").read_text())["notSaved"]
    assert lost > 0
    words = f"step {saved:,} is saved, the {lost:,} steps after it are not"
    assert f"digits was ended at once; {words}" in run.errors()
    assert words in " ".join(run.ask("why", "digits").split())
    assert processes_of(folder) == []


def test_what_a_stop_could_not_save_is_lost_once_when_a_later_start_begins_below_it(
    start: Start, disk: Path, tmp_path: Path
) -> None:
    folder = {"path": str(disk / "checkpoints")}
    job = write_job(tmp_path, nodes=1, steps=100_000, checkpoint=30, checkpoints=folder)
    first = start(job)
    first.wait_until(lambda: commits(disk), "a checkpoint")
    ballast = fill(disk)
    os.truncate(ballast, ballast.stat().st_size - (1 << 15))  # room for lines of the ledger
    saved = commits(disk)[-1]
    first.wait_until(lambda: last_step(disk, 1) > saved + 31, "a checkpoint that cannot be saved")
    first.process.send_signal(signal.SIGINT)
    first.wait(10)
    assert "its state could not be saved" in first.errors()
    saved = commits(disk)[-1]
    unsaved = json.loads((first.folder("digits") / "report.json").read_text())["notSaved"]
    assert unsaved > 30
    shown = json.loads(first.ask("report", "digits", "-o", "json"))
    assert (shown["notSaved"], shown["steps"]["lost"]) == (unsaved, 0)
    assert [each["unsavedSteps"] for each in shown["attempts"]][-1] == unsaved
    ballast.unlink()

    second = start("--set", "spec.train.checkpoint.every.steps=1000000", job)
    second.wait_until(lambda: last_step(disk, 2) > saved + 5, "steps of the second start")
    now = json.loads(second.ask("status", "digits", "-o", "json"))
    assert (now["lastCheckpointStep"], now["lostSteps"]) == (saved, unsaved)
    assert now["lastCheckpointTime"] is not None
    second.process.send_signal(signal.SIGINT)
    second.wait(130)
    shown = json.loads(second.ask("report", "digits", "-o", "json"))
    assert (shown["notSaved"], shown["steps"]["lost"]) == (0, unsaved)
    assert sum(each["lostSteps"] for each in shown["attempts"]) == unsaved
    assert sum(shown["secondsByCategory"].values()) <= shown["elapsedSeconds"] + 0.1


def last_step(folder: Path, generation: int) -> int:
    """The last step of a group that the ledger has."""
    lines = read_ledger(folder, "steps")
    return max((line["step"] for line in lines if line["generation"] == generation), default=0)
