"""What the ranks of a new group know of the former one's last steps, and who has its state."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kdist_trainer.checkpoint.ledger import read_lines
from kdist_trainer.config import Training
from kdist_trainer.errors import ConfigError
from kdist_trainer.formats import LEDGER, STEPS_FILE
from kdist_trainer.training import regroup
from kdist_trainer.training.context import FormerRank, UnrecordedStep
from kdist_trainer.training.step_log import StepLine, StepLog
from kdist_trainer.training.sync import StepRecord


def unrecorded(step: int, part: float, mean: float | None = None) -> UnrecordedStep:
    return UnrecordedStep(StepRecord(step, 8 * step - 8, 8 * step - 1, 0.5), part, mean)


def losses(lines: list[dict[str, Any]]) -> dict[int, float | None]:
    return {
        line["step"]: None if line["loss"] is None else float.fromhex(line["loss"])
        for line in lines
    }


def test_a_loss_is_known_from_all_parts_or_from_anyone_who_had_received_it() -> None:
    first = FormerRank(0, 2, 1, 6, [unrecorded(5, 1.0), unrecorded(6, 2.0)])
    second = FormerRank(1, 2, 1, 6, [unrecorded(5, 3.0), unrecorded(6, 4.0, 2.75)])
    assert losses(regroup.merge_losses([first, second])) == {5: 2.0, 6: 2.75}


def test_a_loss_whose_part_died_with_its_rank_is_null() -> None:
    survivor = FormerRank(1, 2, 1, 6, [unrecorded(5, 3.0, 2.0), unrecorded(6, 4.0)])
    assert losses(regroup.merge_losses([survivor])) == {5: 2.0, 6: None}


def test_the_lines_are_those_of_the_former_group() -> None:
    (line,) = regroup.merge_losses([FormerRank(1, 4, 7, 3, [unrecorded(3, 1.0)])])
    assert (line["generation"], line["world_size"], line["first"], line["last"]) == (7, 4, 16, 23)


def test_a_rank_that_has_missed_a_group_knows_only_steps_that_the_group_has_not_done() -> None:
    late = FormerRank(0, 2, 1, 6, [unrecorded(5, 1.0, 1.5), unrecorded(6, 2.0)])
    behind, ahead = FormerRank(0, 1, 2, 5, []), FormerRank(0, 1, 2, 6, [unrecorded(6, 4.0)])
    (line,) = regroup.merge_losses([late, behind])
    assert (line["generation"], line["step"]) == (1, 6)
    (line,) = regroup.merge_losses([late, ahead])
    assert (line["generation"], line["loss"]) == (2, (4.0).hex())


def test_the_lines_of_several_ranks_are_one_ledger_with_the_losses_that_any_of_them_knows() -> None:
    first = [{**line(4), "loss": None}, line(5)]
    merged = regroup.merge_lines([first, [line(3), line(4)], [line(6, generation=2)]])
    assert [(one["step"], one["generation"]) for one in merged] == [(3, 1), (4, 1), (5, 1), (6, 2)]
    assert all(one["loss"] is not None for one in merged)


def world(rank: int = 0, generation: int = 2) -> Any:
    return SimpleNamespace(rank=rank, size=2, generation=generation, is_rank_zero=rank == 0)


def line(step: int, *, generation: int = 1) -> dict[str, Any]:
    return StepLine(StepRecord(step, step, step, 0.1), 0.5, generation, 2).to_json()


def complete(root: Path, lines: list[dict[str, Any]], *, generation: int) -> None:
    """What rank 0 of a group does with the lines of the former one."""
    step_log = StepLog(root, world(generation=generation))
    step_log.complete(lines)
    step_log.close()


def test_the_new_rank_0_writes_the_lines_that_the_ledger_lacks_and_no_others(
    tmp_path: Path,
) -> None:
    former = StepLog(tmp_path, world(generation=1))
    former.add_steps([StepRecord(1, 1, 1, 0.1), StepRecord(2, 2, 2, 0.1)], [0.5, 0.5])
    former.close()
    complete(tmp_path, [line(1), line(2), line(3)], generation=2)
    assert [one["step"] for one in read_lines(tmp_path / LEDGER / STEPS_FILE)] == [1, 2, 3]


def test_a_step_that_another_generation_has_done_is_another_line(tmp_path: Path) -> None:
    complete(tmp_path, [line(1)], generation=1)
    complete(tmp_path, [line(1, generation=2)], generation=3)
    assert [one["generation"] for one in read_lines(tmp_path / LEDGER / STEPS_FILE)] == [1, 2]


def test_every_rank_keeps_the_lines_until_a_commit_covers_them(tmp_path: Path) -> None:
    other = StepLog(tmp_path, world(rank=1), keeps_lines=True)
    other.add_steps([StepRecord(step, step, step, 0.1) for step in (1, 2, 3)], [0.5] * 3)
    assert not read_lines(tmp_path / LEDGER / STEPS_FILE), "rank 0 writes them"
    other.forget(2)
    assert [one["step"] for one in other.uncommitted()] == [3]
    former = StepLog(tmp_path, world(rank=1), keeps_lines=True)
    former.complete(other.uncommitted())
    assert former.uncommitted() == other.uncommitted()


@pytest.mark.parametrize(
    ("strategy", "device", "problem"),
    [("ddp", "cpu", None), ("ddp", "cuda", "GPUs"), ("fsdp", "cpu", "fsdp")],
)
def test_recovery_in_place_is_for_ddp_on_cpus(
    strategy: Any, device: str, problem: str | None
) -> None:
    where: Any = SimpleNamespace(device=torch.device(device))
    train = Training(workload="digits", steps=1, strategy=strategy)
    assert regroup.is_possible(train, where) == (problem is None)
    if problem is not None:
        demanded = train.model_copy(update={"recovery": "inPlace"})
        with pytest.raises(ConfigError, match=problem):
            regroup.is_possible(demanded, where)


def test_a_job_may_have_its_ranks_restarted() -> None:
    where: Any = SimpleNamespace(device=torch.device("cpu"))
    assert not regroup.is_possible(Training(workload="digits", steps=1, recovery="restart"), where)
