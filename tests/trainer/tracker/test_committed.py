"""What a tracker is given of a ledger: each step once, rising, as it counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kdist_trainer.checkpoint.ledger import RunLedger, StepLedger
from kdist_trainer.tracker import committed
from kdist_trainer.tracker.committed import LOSS, CommittedSteps


class Run:
    """Writes a ledger as a training does."""

    def __init__(self, root: Path) -> None:
        self.root, self.generation = root, 0
        self.events = RunLedger(root)

    def begin(self, from_step: int) -> None:
        self.generation += 1
        self.events.append("generation", generation=self.generation, from_step=from_step)

    def train(self, first: int, last: int) -> None:
        ledger = StepLedger(self.root)
        ledger.append([self._line(step) for step in range(first, last + 1)])
        ledger.close()

    def _line(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "generation": self.generation,
            "world_size": 1,
            "first": 8 * (step - 1),
            "last": 8 * step - 1,
            "loss": float(self.generation).hex(),
            "seconds": 0.5,
            "wait_seconds": 0.0,
        }

    def commit(self, step: int) -> None:
        self.events.append("commit", step=step)


def take(steps: CommittedSteps, *, ended: bool = False) -> list[tuple[int, float]]:
    """Steps and losses of the next reading."""
    points = [point for piece in steps.read(ended=ended) for point in piece]
    return [(step, values[LOSS]) for step, values in points]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.mark.parametrize("piece", [1 << 20, 400])
def test_steps_that_were_lost_count_as_they_were_done_the_last_time(
    run: Run, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committed, "_PIECE_BYTES", piece)
    run.begin(0)
    run.train(1, 9)
    run.commit(5)
    run.begin(5)
    run.train(6, 7)
    run.begin(5)
    run.train(6, 12)
    run.commit(11)
    expected = [(step, 1.0 if step <= 5 else 3.0) for step in range(1, 12)]
    assert take(CommittedSteps(run.root, 0)) == expected
    assert take(CommittedSteps(run.root, 8)) == expected[8:]


def test_a_step_counts_when_a_checkpoint_holds_it_and_the_next_one_is_written(run: Run) -> None:
    steps = CommittedSteps(run.root, 0)
    assert take(steps) == []
    run.begin(0)
    run.train(1, 4)
    assert take(steps) == []
    run.commit(4)
    assert take(steps) == [(1, 1.0), (2, 1.0), (3, 1.0)]
    run.train(5, 6)
    assert take(steps) == [(4, 1.0)]
    run.commit(6)
    assert take(steps) == [(5, 1.0)]
    assert take(steps, ended=True) == [(6, 1.0)]
    assert take(steps, ended=True) == []


def test_steps_that_survivors_have_kept_in_memory_count(run: Run) -> None:
    run.begin(0)
    run.train(1, 6)
    run.commit(3)
    run.begin(6)
    run.train(7, 9)
    run.commit(9)
    kept = [(step, 1.0 if step <= 6 else 2.0) for step in range(1, 10)]
    assert take(CommittedSteps(run.root, 0), ended=True) == kept


def test_lines_of_another_shape_are_skipped(run: Run) -> None:
    run.begin(0)
    run.train(1, 2)
    ledger = StepLedger(run.root)
    ledger.append([{"step": "3"}, {"step": 3}, {**run._line(3), "loss": "much"}])
    ledger.close()
    run.events.append("commit", step="all")
    run.events.append("evaluated", step=2)
    run.events.append("generation", generation="second")
    run.commit(2)
    assert take(CommittedSteps(run.root, 0), ended=True) == [(1, 1.0), (2, 1.0)]


def test_a_commit_that_was_rolled_back_holds_no_later_step(run: Run) -> None:
    run.begin(0)
    run.train(1, 9)
    run.commit(3)
    run.commit(9)
    run.begin(3)  # the newest checkpoint could not be read
    run.train(4, 8)
    steps = CommittedSteps(run.root, 0)
    assert take(steps, ended=True) == [(step, 1.0) for step in range(1, 4)]
    run.commit(8)
    assert take(steps, ended=True) == [(step, 2.0) for step in range(4, 9)]


def test_a_point_has_the_evaluation_and_the_checkpoint_of_its_step(run: Run) -> None:
    run.begin(0)
    run.train(1, 2)
    run.events.append("evaluated", step=2, metrics={"accuracy": 0.5})
    run.commit(2)
    run.events.append("done", step=2, metrics={"accuracy": 0.75})
    steps = CommittedSteps(run.root, 0)
    last = [point for piece in steps.read(ended=True) for point in piece][-1]
    assert last[1] == {
        "train/loss": 1.0,
        "train/samples": 16,
        "throughput/samples_per_second": 16.0,
        "world_size": 1,
        "evaluation/accuracy": 0.5,
        "checkpoint/step": 2,
    }
    assert steps.done is not None
    assert steps.done["metrics"] == {"accuracy": 0.75}
