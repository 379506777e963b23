"""Where equal bits are promised: resumes at the same world size, and all-reduces that are timed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kdist_trainer.checkpoint.export import prepare
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.training import trainer
from kdist_trainer.training.context import TrainContext
from tests.faults.code.stateful import Stateful
from tests.trainer.training.group import run_group
from tests.trainer.training.tasks import (
    WIDE,
    Adaptive,
    Whimsical,
    describe,
    done,
    losses,
    train,
    train_here,
)

pytestmark = pytest.mark.processes
STATEFUL = f"{Stateful.__module__}:Stateful"
PRECISIONS = ("fp32", "bf16", "fp16")
STEPS = 9
"""50 samples twice over in batches of 12."""


EVERY_STEP = {"every": {"steps": 1}, "mode": "blocking", "keep": 1000}


def resume_from(whole: Path, folder: Path, step: int) -> None:
    """Make a folder with only the checkpoint of `step`, as a crash after its commit leaves it."""
    name = f"step-{step:08d}-e1"
    shutil.copytree(whole / "checkpoints" / name, folder / "checkpoints" / name)


def assert_resumes_are_exact(tmp_path: Path, size: int, steps: list[int], **section: Any) -> None:
    document = describe(checkpoint=EVERY_STEP, **section)
    whole = tmp_path / "whole"
    train_here(document, whole, size)
    for step in steps:
        part = tmp_path / f"from-{step}"
        resume_from(whole, part, step)
        assert train_here(document, part, size, generation=2) == ["done"] * size
        uninterrupted = {number: loss for number, loss in losses(whole).items() if number > step}
        printed = f"differ after a resume from step {step}"
        assert losses(part, generation=2) == uninterrupted, f"losses {printed}"
        assert done(part)["weights"] == done(whole)["weights"], f"weights {printed}"


@pytest.mark.sampled
def test_a_single_rank_resumes_exactly_on_both_sides_of_an_epochs_end(tmp_path: Path) -> None:
    assert_resumes_are_exact(tmp_path, 1, [1, 4, 5, 8])


@pytest.mark.sampled
def test_two_ranks_with_four_shards_and_micro_batches_resume_exactly(tmp_path: Path) -> None:
    assert_resumes_are_exact(tmp_path, 2, [1, 4, 8], virtualShards=4, microBatch=2)


@pytest.mark.sampled
def test_three_ranks_with_several_buckets_resume_exactly(tmp_path: Path) -> None:
    assert_resumes_are_exact(tmp_path, 3, [1, 5, 8], options=WIDE)


def test_an_optimizer_without_a_state_of_its_own_resumes_exactly(tmp_path: Path) -> None:
    plain = {"name": "sgd", "learningRate": 0.1, "momentum": 0.0}
    assert_resumes_are_exact(tmp_path, 2, [3], optimizer=plain)


def test_draws_from_numpy_and_python_in_the_loss_are_repeated(tmp_path: Path) -> None:
    assert_resumes_are_exact(tmp_path, 1, [3], workload=f"{Whimsical.__module__}:Whimsical")


@pytest.mark.sampled
@pytest.mark.parametrize(("size", "strategy"), [(2, "ddp"), (3, "fsdp")])
def test_state_that_is_no_parameter_is_carried_over_and_the_same_on_all_ranks(
    tmp_path: Path, size: int, strategy: str
) -> None:
    section: dict[str, Any] = {"workload": STATEFUL, "strategy": strategy, "virtualShards": 3}
    section |= {"emaDecay": 0.9, "evaluateEverySteps": 4, "evaluate": "end"}
    assert_resumes_are_exact(tmp_path, size, [4], **section)
    before, after = (folder / "checkpoints" for folder in (tmp_path / "whole", tmp_path / "from-4"))
    assert metrics_of(before)[-2:] == metrics_of(after)
    frozen = prepare(after).fetch(["frozen.1.running_mean", "frozen.1.num_batches_tracked"])
    assert not any(one.any() for one in frozen.values()), "evaluations leave a frozen module frozen"


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.chaos), "fsdp"])
def test_an_optimizer_that_is_made_with_its_state_trains_and_resumes_exactly(
    tmp_path: Path, strategy: str
) -> None:
    adaptive = f"{Adaptive.__module__}:Adaptive"
    assert_resumes_are_exact(tmp_path, 2, [3], workload=adaptive, strategy=strategy)


@pytest.mark.sampled
@pytest.mark.chaos
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_wide_averages_of_narrow_weights_resume_exactly_and_are_exported_wide(
    tmp_path: Path, strategy: str
) -> None:
    narrow: dict[str, Any] = {"precision": "bf16-params", "emaDecay": 0.99}
    assert_resumes_are_exact(tmp_path, 2, [4], workload=STATEFUL, strategy=strategy, **narrow)
    both = [
        prepare(tmp_path / name / "checkpoints", average=True).fetch(["head.0.weight"])
        for name in ("whole", "from-4")
    ]
    assert both[0]["head.0.weight"].dtype is torch.float32
    assert torch.equal(*[one["head.0.weight"] for one in both])


def metrics_of(root: Path) -> list[Any]:
    """What each evaluation measured."""
    return [event["metrics"] for event in RunLedger(root).events() if event["event"] == "evaluated"]


CELLS = [
    (size, optimizer, precision)
    for precision in PRECISIONS
    for optimizer in ("adamw", "sgd")
    for size in (1, 2, 3)
]
TELLING = [(2, "adamw", "bf16"), (3, "sgd", "fp16")]
"""With the resumes of three ranks above, one cell of each row and column; the others are for a
developer's time.
"""


@pytest.mark.sampled
@pytest.mark.chaos
@pytest.mark.parametrize(
    ("size", "optimizer", "precision"),
    [
        pytest.param(*cell, marks=[] if cell in TELLING else [pytest.mark.wide])
        for cell in (*TELLING, *sorted({*CELLS} - {*TELLING}))
    ],
)
def test_any_group_resumes_exactly_from_any_step(
    tmp_path: Path, size: int, optimizer: str, precision: str
) -> None:
    settings = {"name": optimizer, "learningRate": 0.01}
    assert_resumes_are_exact(
        tmp_path, size, list(range(1, STEPS)), options=WIDE, optimizer=settings, precision=precision
    )


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.sampled
def test_the_timing_of_all_reduces_changes_no_bit(tmp_path: Path, size: int) -> None:
    for timing in ("on", "off"):
        train_here(describe(options=WIDE, collectiveTiming=timing), tmp_path / timing, size)
    assert losses(tmp_path / "on") == losses(tmp_path / "off")
    assert done(tmp_path / "on")["weights"] == done(tmp_path / "off")["weights"]


def train_cold(document: dict[str, Any], folder: Path) -> str:
    """Train without the two backward passes before the first step."""
    trainer.warm_up = leave_cold
    return train(document, folder)


def leave_cold(ctx: TrainContext) -> None:
    """Not what the loop does: to see that it must."""


@pytest.mark.sampled
def test_without_the_warm_up_three_ranks_would_not_resume_exactly(tmp_path: Path) -> None:
    document = describe(checkpoint=EVERY_STEP, options=WIDE)
    folders = [tmp_path / "whole", tmp_path / "part"]
    for generation, folder in enumerate(folders, start=1):
        folder.mkdir()
        if generation == 2:
            resume_from(folders[0], folder, 4)
        environment = {"KDIST_CHECKPOINTS": str(folder / "checkpoints")}
        environment["KDIST_GENERATION"] = str(generation)
        run_group(train_cold, 3, document, folder, environment=environment)
    first, second = (done(folder)["weights"] for folder in folders)
    assert first != second, "torch no longer needs it: delete the warm-up"
