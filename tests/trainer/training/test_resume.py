"""A training that goes on under other circumstances than it was saved in."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kdist_trainer.checkpoint.ledger import RunLedger, read_lines
from kdist_trainer.checkpoint.manifest import CheckpointDirectory
from kdist_trainer.formats import LEDGER, STEPS_FILE
from kdist_trainer.training.training_state import TrainState
from tests.faults.check_ledger import assert_every_sample_once
from tests.trainer.training.group import RankFailed, run_group
from tests.trainer.training.tasks import (
    Interrupted,
    describe,
    done,
    losses,
    train,
    train_here,
    train_watched,
)

pytestmark = pytest.mark.processes


def interrupt(folder: Path, size: int, **section: Any) -> None:
    """Leave a training in `folder` that was stopped on the way."""
    reported: dict[str, Any] = {
        "workload": f"{Interrupted.__module__}:Interrupted",
        "virtualShards": 4,
    }
    document = describe(**reported, options={"at_loss": 6, "on_rank": 0}, **section)
    assert train_here(document, folder, size) == ["stopped"] * size


@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 3), (2, 1)])
def test_another_number_of_ranks_uses_every_sample_once(
    tmp_path: Path, before: int, after: int
) -> None:
    interrupt(tmp_path, before, epochs=6)
    ended = train_here(describe(virtualShards=4, epochs=6), tmp_path, after, generation=2)
    assert ended == ["done"] * after
    lines = read_lines(tmp_path / "checkpoints" / LEDGER / STEPS_FILE)
    assert_every_sample_once(lines, total=6 * 50)
    assert {line["world_size"] for line in lines} == {before, after}


def test_another_number_of_ranks_learns_the_same(tmp_path: Path) -> None:
    """Shards draw their own randomness, dropout included: only the order of sums differs."""
    document = describe(virtualShards=4, epochs=4)
    train_here(document, tmp_path / "two", 2)
    train_here(document, tmp_path / "three", 3)
    two, three = (
        [float.fromhex(loss) for loss in losses(tmp_path / name).values()]
        for name in ("two", "three")
    )
    assert two == pytest.approx(three, rel=1e-4)


def train_and_listen(document: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Train, and return what the rank logged."""
    path = folder / f"log-{os.environ['RANK']}"
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    train(document, folder)
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"time"')]


@pytest.mark.parametrize(("size", "printed"), [(2, False), (1, True)])
def test_a_resume_that_is_not_equal_to_the_bit_says_so(
    tmp_path: Path, size: int, printed: bool
) -> None:
    interrupt(tmp_path, 2, epochs=6)
    environment = {"KDIST_CHECKPOINTS": str(tmp_path / "checkpoints"), "KDIST_GENERATION": "2"}
    section = describe(virtualShards=4, epochs=6)
    heard, *others = run_group(train_and_listen, size, section, tmp_path, environment=environment)
    found = [event for event in heard if event["event"] == "not-reproducible"]
    assert len(found) == printed
    assert all(
        "saved by 2 ranks" in event["why"] and "resumed by 1 rank," in event["why"]
        for event in found
    )
    assert not [
        event for events in others for event in events if event["event"] == "not-reproducible"
    ], "rank 0 speaks for all"


def test_a_resume_under_another_strategy_says_so(tmp_path: Path) -> None:
    interrupt(tmp_path, 1, epochs=6)
    environment = {"KDIST_CHECKPOINTS": str(tmp_path / "checkpoints"), "KDIST_GENERATION": "2"}
    section = describe(epochs=6, strategy="fsdp")
    (heard,) = run_group(train_and_listen, 1, section, tmp_path, environment=environment)
    (found,) = [event for event in heard if event["event"] == "not-reproducible"]
    assert "resumed by 1 rank, fsdp, torch" in found["why"]


def test_other_data_is_refused(tmp_path: Path) -> None:
    interrupt(tmp_path, 1, epochs=6)
    other = describe(virtualShards=4, epochs=6, options={"length": 51})
    with pytest.raises(RankFailed, match="Mismatch"):
        train_here(other, tmp_path, 1, generation=2)


def test_a_run_that_was_stopped_after_its_last_step_only_ends(tmp_path: Path) -> None:
    document = describe(epochs=1)
    train_here(document, tmp_path, 1)
    weights = done(tmp_path)["weights"]
    (tmp_path / "checkpoints/DONE").unlink()
    assert train_here(document, tmp_path, 1, generation=2) == ["done"]
    assert done(tmp_path)["weights"] == weights
    assert losses(tmp_path, generation=2) == {}


def test_a_state_of_a_newer_version_is_read_as_far_as_it_is_known() -> None:
    state = TrainState(
        seed=1, fingerprint="f", world_size=2, environment="e", step=7, samples_seen=84
    )
    assert TrainState.from_json({**state.to_json(), "invented_later": 1}) == state


ENDS = [({"epochs": 1}, "50 samples (1 epochs)"), ({"epochs": None, "steps": 5}, "5 steps")]


@pytest.mark.parametrize(("end", "asked"), [*ENDS, ({"epochs": 6}, "")])
def test_a_run_that_is_past_the_end_it_is_asked_for_by_now_says_so_and_only_ends(
    tmp_path: Path, end: dict[str, Any], asked: str
) -> None:
    interrupt(tmp_path, 2, epochs=6)
    before = len(losses(tmp_path))
    environment = {"KDIST_CHECKPOINTS": str(tmp_path / "checkpoints"), "KDIST_GENERATION": "2"}
    section = describe(virtualShards=4, **end)
    heard = run_group(train_and_listen, 2, section, tmp_path, environment=environment)
    reported = [event["message"] for own in heard for event in own if event["event"] == "past-end"]
    if not asked:
        assert not reported
        return
    (message,) = reported
    assert (
        f"is of step {before}, after {before * 12} samples, and the job asks for {asked}: "
        "the run ends at this step"
    ) in message
    assert done(tmp_path)["step"] == before > 5
    assert losses(tmp_path, generation=2) == {}


def count_fallbacks(document: dict[str, Any], folder: Path) -> float:
    return sum(train_watched(document, folder).stats.checkpoint_fallbacks)


def test_a_checkpoint_that_was_passed_over_is_counted_once_however_often_the_training_goes_back(
    tmp_path: Path,
) -> None:
    every = {"every": {"steps": 2}, "mode": "blocking", "keep": 1000}
    section: dict[str, Any] = {"workload": f"{Interrupted.__module__}:Wild", "checkpoint": every}
    section["options"] = {"at_sample": 7}
    train_here(describe(**section, epochs=None, steps=4, onNonfinite="skip"), tmp_path, 1)
    newest, *_ = CheckpointDirectory(tmp_path / "checkpoints").committed()
    (tmp_path / "checkpoints" / newest.name / "manifest.json").write_text("{}")
    environment = {"KDIST_CHECKPOINTS": str(tmp_path / "checkpoints"), "KDIST_GENERATION": "2"}
    document = describe(**section, epochs=None, steps=16, onNonfinite="rollback")
    (counted,) = run_group(count_fallbacks, 1, document, tmp_path, environment=environment)
    assert counted == 1
    events = RunLedger(tmp_path / "checkpoints").events()
    assert "rolled_back" in [event["event"] for event in events]
