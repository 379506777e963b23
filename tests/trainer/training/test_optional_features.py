"""What the loop does besides stepping: evaluations on the way, early ends, averages, refused
updates, memory saved.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.lock import Lock
from kdist_trainer.training.optimizer import Ema
from tests.trainer.training.cells import document, layout
from tests.trainer.training.group import RankFailed
from tests.trainer.training.tasks import Wild, describe, done, losses, train_here

TASKS = Wild.__module__
STILL: dict[str, Any] = {
    "optimizer": {"name": "sgd", "learningRate": 1e-9},
    "earlyStop": {"patience": 2, "minDelta": 0.1},
}
"""A training that gets no better, and ends when that is seen."""
LONG: dict[str, Any] = {"epochs": 8, "evaluateEverySteps": 3}


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    """What the ledger says happened, of one kind."""
    return [event for event in RunLedger(folder / "checkpoints").events() if event["event"] == name]


@pytest.mark.processes
def test_a_job_that_gets_no_better_ends_early_with_the_state_of_that_step(tmp_path: Path) -> None:
    section = {**LONG, "evaluate": "end"}
    train_here(describe(**section, **STILL), tmp_path, 1)
    assert done(tmp_path)["step"] == 9, "the first evaluation is the best; two more are waited for"
    assert [event["step"] for event in events(tmp_path, "evaluated")] == [3, 6, 9, 9]
    assert [event["step"] for event in events(tmp_path, "early_stop")] == [9]


@pytest.mark.processes
def test_the_checkpoint_of_the_best_evaluation_is_kept(tmp_path: Path) -> None:
    keep = {"last": 1, "best": {}}
    every = {"checkpoint": {"every": {"steps": 2}, "mode": "blocking", "keep": keep}}
    train_here(describe(epochs=3, evaluateEverySteps=3, **every), tmp_path, 1)
    evaluated = events(tmp_path, "evaluated")
    best = min(evaluated, key=lambda each: float(each["metrics"]["loss"]))["step"]
    kept = [one.step for one in Lock(tmp_path / "checkpoints").find_valid()]
    assert sorted(kept) == sorted({best, done(tmp_path)["step"]})


@pytest.mark.processes
def test_a_best_by_a_metric_that_nobody_measures_is_refused_with_the_steps_saved(
    tmp_path: Path,
) -> None:
    keep = {"best": {"metric": "other"}}
    with pytest.raises(RankFailed, match=r"checkpoint.keep.best.metric: .* no `other`; it has"):
        train_here(describe(**LONG, checkpoint={"keep": keep}), tmp_path, 1)
    assert [one.step for one in Lock(tmp_path / "checkpoints").find_valid()] == [3]


@pytest.mark.processes
@pytest.mark.parametrize("size", [1, 2])
def test_a_stop_at_the_step_of_an_evaluation_puts_it_off_to_the_resume(
    tmp_path: Path, size: int
) -> None:
    section = {**LONG, "syncEverySteps": 1, "workload": f"{TASKS}:Interrupted"}
    section |= {"virtualShards": size, **STILL}
    losses = 2 + 3 + 2  # of the warm-up, of three steps, and of the two that follow the evaluation
    reported = {"at_loss": losses, "on_rank": 0}
    ended = train_here(describe(**section, options=reported), tmp_path, size)
    assert ended == ["stopped"] * size
    assert [event["step"] for event in events(tmp_path, "stopped")] == [6]
    assert [event["step"] for event in events(tmp_path, "evaluated")] == [3]
    calm = describe(**section, options={**reported, "at_loss": 0})
    train_here(calm, tmp_path, size, generation=2)
    assert [event["step"] for event in events(tmp_path, "evaluated")] == [3, 6, 9]
    assert done(tmp_path)["step"] == 9


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.chaos
def test_evaluations_on_the_way_change_no_bit(tmp_path: Path) -> None:
    train_here(describe(), tmp_path / "plain", 2)
    train_here(describe(evaluateEverySteps=2), tmp_path / "watched", 2)
    assert done(tmp_path / "watched")["weights"] == done(tmp_path / "plain")["weights"]


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize(
    ("strategy", "size"),
    [("ddp", 2), *[pytest.param(one, 2, marks=pytest.mark.chaos) for one in ("fsdp", "pipeline")]],
)
def test_a_wild_step_is_left_out_by_all_ranks_with_its_statistics_and_reported_with_its_samples(
    tmp_path: Path, strategy: str, size: int
) -> None:
    section = {"workload": f"{TASKS}:Poisoned", "options": {"at_sample": 11}, "epochs": 1}
    section |= {"onNonfinite": "skip", "strategy": strategy, "evaluate": "end"}
    train_here(describe(**section, **layout(strategy, size)), tmp_path, size)
    (skipped,) = events(tmp_path, "skipped")
    assert losses(tmp_path)[skipped["step"]] == "nan"
    assert skipped["last"] - skipped["first"] < 12
    assert all(loss != "nan" for step, loss in losses(tmp_path).items() if step != skipped["step"])
    assert math.isfinite(done(tmp_path)["metrics"]["loss"]), (
        "a batch norm's running mean is of all its past"
    )


@pytest.mark.processes
def test_a_training_goes_back_and_leaves_the_wild_step_out_the_second_time(tmp_path: Path) -> None:
    every = {"checkpoint": {"every": {"steps": 2}, "mode": "async", "keep": 1000}}
    section = {"workload": f"{TASKS}:Wild", "options": {"at_sample": 11}, "epochs": 3}
    train_here(describe(**section, **every, onNonfinite="rollback"), tmp_path / "back", 2)
    train_here(describe(**section, **every, onNonfinite="skip"), tmp_path / "skip", 2)
    gone = events(tmp_path / "back", "rolled_back")
    skipped = events(tmp_path / "skip", "skipped")
    left_out = [event["step"] for event in skipped if event["step"] > 2]
    assert [event["refused"] for event in gone] == left_out
    assert all(event["step"] % 2 == 0 and event["step"] < event["refused"] for event in gone)
    assert done(tmp_path / "back")["weights"] == done(tmp_path / "skip")["weights"], (
        "nothing else differs"
    )


def test_an_average_follows_the_weights_by_its_share() -> None:
    module = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(1.0)
    averages = Ema(module, 0.75)
    with torch.no_grad():
        module.weight.fill_(2.0)
    averages.update()
    assert averages.tensors["weight"].item() == 1.25
    with averages.swapped_in():
        assert module.weight.item() == 1.25
    assert (module.weight.item(), averages.tensors["weight"].item()) == (2.0, 1.25)


def test_averages_of_narrow_weights_are_wide() -> None:
    module = torch.nn.Linear(1, 1).to(torch.bfloat16)
    with torch.no_grad():
        module.weight.fill_(0.0)
    averages = Ema(module, 0.999)
    with torch.no_grad():
        module.weight.fill_(1.0)
    for _ in range(57):
        averages.update()
    assert averages.tensors["weight"].item() == pytest.approx(1 - 0.999**57, rel=1e-5)
    kept = averages.tensors["weight"].clone()
    with averages.swapped_in():
        assert module.weight.item() == pytest.approx(1 - 0.999**57, rel=1e-2)
    assert module.weight.item() == 1.0
    assert torch.equal(averages.tensors["weight"], kept)


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        pytest.param("ddp", 2, marks=pytest.mark.chaos),
        ("fsdp", 2),
        pytest.param("tensor", 4, marks=[pytest.mark.chaos, pytest.mark.wide]),
    ],
)
def test_averages_are_evaluated_kept_and_taken_up_again(
    tmp_path: Path, strategy: str, size: int
) -> None:
    plain: dict[str, Any] = {"steps": 8, "evaluate": "end", "strategy": strategy}
    plain |= layout(strategy, size)
    section = {**plain, "emaDecay": 0.5}
    every: dict[str, Any] = {
        "checkpoint": {"every": {"steps": 4}, "mode": "blocking", "keep": 1000}
    }
    train_here(document("gpt", precision="fp32", **plain), tmp_path / "plain", size)
    train_here(document("gpt", precision="fp32", **section, **every), tmp_path / "whole", size)
    assert done(tmp_path / "whole")["metrics"] != done(tmp_path / "plain")["metrics"], (
        "the average is what is measured"
    )
    assert done(tmp_path / "whole")["weights"] == done(tmp_path / "plain")["weights"], (
        "training does not notice it"
    )
    part = tmp_path / "part"
    (part / "checkpoints").mkdir(parents=True)
    (tmp_path / "whole/checkpoints/step-00000004-e1").rename(part / "checkpoints/step-00000004-e1")
    train_here(document("gpt", precision="fp32", **section, **every), part, size, generation=2)
    assert done(part)["metrics"] == done(tmp_path / "whole")["metrics"]


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ddp", marks=pytest.mark.chaos),
        "fsdp",
        pytest.param("tensor", marks=[pytest.mark.chaos, pytest.mark.wide]),
    ],
)
def test_computing_blocks_twice_changes_no_bit(tmp_path: Path, strategy: str) -> None:
    for name, kind in (("once", "none"), ("twice", "blocks")):
        section: dict[str, Any] = {"steps": 4, "activationCheckpointing": kind}
        section |= {"strategy": strategy, **layout(strategy, 2)}
        train_here(document("gpt", precision="fp32", **section), tmp_path / name, 2)
    assert done(tmp_path / "twice")["weights"] == done(tmp_path / "once")["weights"]


@pytest.mark.processes
def test_a_workload_without_blocks_cannot_compute_them_twice(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"Small.blocks names no parts"):
        train_here(describe(activationCheckpointing="blocks"), tmp_path, 1)


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.chaos
@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp", pytest.param("tensor", marks=pytest.mark.wide)]
)
def test_a_compiled_model_learns_the_same_and_its_checkpoint_serves_the_plain_one(
    tmp_path: Path, strategy: str
) -> None:
    section: dict[str, Any] = {"steps": 6, "strategy": strategy, **layout(strategy, 2)}
    for name, how in (("compiled", "aot_eager"), ("plain", "off")):
        train_here(document("gpt", precision="fp32", **section, compile=how), tmp_path / name, 2)
    for step, loss in losses(tmp_path / "plain").items():
        compiled = float.fromhex(losses(tmp_path / "compiled")[step])
        assert compiled == pytest.approx(float.fromhex(loss), rel=1e-5)
    names = [set(model_names(tmp_path / name)) for name in ("compiled", "plain")]
    assert names[0] == names[1]


def model_names(folder: Path) -> list[str]:
    """Names of the weights in the newest checkpoint."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    newest = Lock(folder / "checkpoints").find_newest()
    assert newest is not None
    assert isinstance(newest.path, Path)
    saved = FileSystemReader(newest.path).read_metadata().state_dict_metadata
    return [name for name in saved if name.startswith("model.")]
