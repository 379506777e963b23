"""The ledger as the loop writes it: nothing is lost to a disk that refuses for a while, and nothing
raises.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from kdist_trainer.checkpoint.ledger import RunLedger, StepLedger, read_lines
from kdist_trainer.checkpoint.storage import Operation, observed
from kdist_trainer.distributed.world import World
from kdist_trainer.formats import LEDGER, STEPS_FILE
from kdist_trainer.training import step_log as step_log_module
from kdist_trainer.training.step_log import StepLog
from kdist_trainer.training.sync import StepRecord
from tests.small_disk import fill, small_disk


def world_of(rank: int) -> World:
    return World(rank, 2, 0, 1, 4, torch.device("cpu"), "gloo", timedelta(seconds=1))


def record(step: int) -> StepRecord:
    return StepRecord(step, (step - 1) * 10, step * 10 - 1, 0.25)


def test_a_step_is_one_line_with_its_samples_and_the_bits_of_its_loss(tmp_path: Path) -> None:
    step_log = StepLog(tmp_path, world_of(0))
    step_log.add_steps([record(1)], [0.1])
    step_log.flush()
    line = {
        "step": 1,
        "generation": 4,
        "world_size": 2,
        "first": 0,
        "last": 9,
        "loss": (0.1).hex(),
        "seconds": 0.25,
    }
    assert read_lines(tmp_path / LEDGER / STEPS_FILE) == [line | {"wait_seconds": 0.0}]


def test_what_the_rank_waited_for_others_is_shared_out_among_the_steps_since(
    tmp_path: Path,
) -> None:
    sums = iter([0.3, 0.3, 1.3])
    step_log = StepLog(tmp_path, world_of(0), waited=lambda: next(sums))
    step_log.add_steps([record(1), record(2), record(3)], [1.0] * 3)
    step_log.add_steps([], [])
    step_log.add_steps([record(4)], [1.0])
    step_log.add_steps([record(5), record(6)], [1.0] * 2)
    step_log.close()
    expected = [0.1, 0.1, 0.1, 0.0, 0.5, 0.5]
    assert [line["wait_seconds"] for line in read_lines(tmp_path / LEDGER / STEPS_FILE)] == expected


@pytest.fixture(name="disk")
def make_disk(tmp_path: Path) -> Iterator[Path]:
    yield from small_disk(tmp_path / "disk", mib=1)


def test_lines_of_which_a_full_disk_takes_the_first_are_written_once(disk: Path) -> None:
    step_log = StepLog(disk, world_of(0))
    step_log.add_steps([record(1)], [1.0])
    step_log.flush()
    ballast = fill(disk)
    step_log.add_steps(map(record, range(2, 102)), [1.0] * 100)
    step_log.flush()
    path = disk / LEDGER / STEPS_FILE
    assert path.stat().st_size < 2048, "some more lines fit into its page, and are taken back"
    with pytest.raises(OSError, match="100 lines"):
        step_log.sync()
    ballast.unlink()
    step_log.sync()
    step_log.close()
    assert [line["step"] for line in read_lines(path)] == [*range(1, 102)]


def test_lines_that_a_disk_refuses_wait_and_hold_back_the_commit(tmp_path: Path) -> None:
    obstacle = tmp_path / "ledger/steps.jsonl"
    obstacle.mkdir(parents=True)
    step_log = StepLog(tmp_path, world_of(0))
    step_log.add_steps([record(1)], [1.0])
    step_log.add_steps([record(2)], [0.5])
    step_log.flush()
    with pytest.raises(OSError, match="2 lines"):
        step_log.sync()
    obstacle.rmdir()
    step_log.add_steps([record(3)], [0.25])
    step_log.flush()
    step_log.sync()
    assert [line["step"] for line in read_lines(tmp_path / LEDGER / STEPS_FILE)] == [1, 2, 3]


def test_an_event_that_cannot_be_written_is_let_go(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text("in the way")
    step_log = StepLog(tmp_path, world_of(0))
    step_log.add_event("first_step", step=1)
    step_log.flush()
    (tmp_path / "ledger").unlink()
    step_log.add_event("first_step", step=2)
    step_log.flush()
    assert [
        (event["event"], event["generation"], event["step"])
        for event in RunLedger(tmp_path).events()
    ] == [("first_step", 4, 2)]


def test_lines_of_later_steps_that_are_being_written_hold_back_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_log = StepLog(tmp_path, world_of(0))
    step_log.add_steps([record(1)], [1.0])
    step_log.flush()
    commits = []
    append = StepLedger.append

    def commit_meanwhile(ledger: StepLedger, lines: Iterable[dict[str, Any]]) -> None:
        step_log.sync()  # what the writer's thread may do at this moment
        commits.append(1)
        append(ledger, lines)

    monkeypatch.setattr(StepLedger, "append", commit_meanwhile)
    step_log.add_steps([record(2)], [0.5])
    step_log.flush()
    assert commits
    assert [line["step"] for line in read_lines(tmp_path / LEDGER / STEPS_FILE)] == [1, 2]


def test_a_disk_that_hangs_holds_no_step_and_gets_its_lines_once_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_log_module, "ANSWER_SECONDS", 0.05)
    answers = threading.Event()
    step_log = StepLog(tmp_path, world_of(0))

    def hold(_operation: Operation) -> None:
        answers.wait()

    with observed(hold):  # the folder of the ledger cannot be made yet
        step_log.add_steps([record(1)], [1.0])
        step_log.flush()
        step_log.add_steps([record(2)], [0.5])
        assert not read_lines(tmp_path / LEDGER / STEPS_FILE)
        answers.set()
        step_log.sync()
    assert [line["step"] for line in read_lines(tmp_path / LEDGER / STEPS_FILE)] == [1, 2]


@pytest.mark.parametrize(("rank", "folder"), [(1, True), (0, False)])
def test_other_ranks_and_runs_without_a_folder_keep_no_ledger(
    tmp_path: Path, rank: int, folder: bool
) -> None:
    step_log = StepLog(tmp_path if folder else None, world_of(rank))
    step_log.add_steps([record(1)], [1.0])
    step_log.add_event("first_step", step=1)
    step_log.sync()
    assert list(tmp_path.iterdir()) == []
