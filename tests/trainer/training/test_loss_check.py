"""What a loss must return is checked before the first step: a mean is told from a sum, and nothing
else is taken for one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional

from kdist_trainer.errors import ConfigError
from kdist_trainer.training.workload_checks import reject_mean, split
from kdist_trainer.workload import Workload, WorkloadContext
from tests.trainer.training.cells import OFFLOADED, STRATEGIES, layout
from tests.trainer.training.group import RankFailed
from tests.trainer.training.tasks import (
    Exploding,
    Padded,
    Small,
    Whimsical,
    describe,
    losses,
    train_here,
)


class Mean(Small):
    """The mistake that most examples on the web lead to."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        inputs, labels, _ = batch
        return functional.cross_entropy(model(inputs), labels), len(labels)

    def tensor_plan(self, model: nn.Module, ranks: int) -> dict[str, ParallelStyle]:  # noqa: ARG002 - any number will do
        return {"0": ColwiseParallel(), "3.0": RowwiseParallel()}


class Ragged(Mean):
    """The batch of one rank cannot be taken apart by samples."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return super().loss(model, batch[:3])

    def collate(self, samples: Any) -> Any:
        return [
            *super().collate(samples),
            *([torch.zeros(())] if os.environ["RANK"] == "1" else []),
        ]


class Regularised(Small):
    """A sum with a large term that no sample changes."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        loss, count = super().loss(model, batch)
        return loss + 1000 * sum(weight.square().sum() for weight in model.parameters()), count


class Silent(Small):
    """Nothing to learn from the first samples."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        loss, count = super().loss(model, batch)
        return loss * 0, count


class Bare(Small):
    """Returns the loss alone."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch)[0]


class Normalised(Small):
    """Its normalisation is frozen in one part and learns in another."""

    def model(self) -> nn.Module:
        module = nn.Sequential(
            nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3), nn.BatchNorm1d(3)
        )
        module[1].eval()
        return module


def judge(kind: type[Workload], batch: Any = None) -> nn.Module:
    torch.manual_seed(1)
    workload = kind(WorkloadContext())
    module = workload.model()
    dataset: Any = workload.dataset("train")
    reject_mean(workload, module, dataset[:12] if batch is None else batch, 12)
    return module


def test_a_mean_is_refused_with_what_to_return() -> None:
    with pytest.raises(
        ConfigError,
        match=r"Mean\.loss seems to return a mean.*for 4 terms.*return the loss summed over",
    ):
        judge(Mean)


@pytest.mark.parametrize("kind", [Small, Padded, Whimsical, Regularised, Silent, Normalised])
def test_a_sum_is_not_taken_for_a_mean(kind: type[Workload]) -> None:
    assert judge(kind).training


@pytest.mark.parametrize(
    "batch", [["a"] * 12, (torch.zeros(12, 16), torch.zeros(3)), {"text": "whole"}]
)
def test_a_batch_that_cannot_be_doubled_is_not_judged(batch: Any) -> None:
    assert judge(Mean, batch).training


def test_a_loss_that_fails_where_nothing_is_learned_is_not_judged() -> None:
    assert judge(Exploding).training, "its option is missing"


def test_the_check_leaves_modes_and_statistics_as_they_were() -> None:
    module = judge(Normalised)
    assert [part.training for part in module] == [True, False, True, True, True]  # type: ignore[attr-defined]
    assert torch.equal(module.get_buffer("4.running_mean"), torch.zeros(3))


@pytest.mark.parametrize(
    ("returned", "reported"),
    [(torch.zeros(()), "a Tensor"), ((torch.zeros(()), 1.5), "(Tensor, float)")],
)
def test_what_is_no_pair_of_sum_and_count_is_refused(returned: Any, reported: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split(Small(WorkloadContext()), returned)
    assert (
        f"Small.loss must return (Tensor, int), and returned {reported}: return the loss summed"
        in str(caught.value)
    )


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "strategy", "reported"),
    [
        ("Bare", "ddp", r"returned a Tensor"),
        *[
            ("Mean", strategy, "seems to return a mean")
            for strategy in STRATEGIES
            if strategy != "data_parallel"
        ],
    ],
)
def test_a_training_with_such_a_loss_ends_before_its_first_step(
    tmp_path: Path, kind: str, strategy: str, reported: str
) -> None:
    section = {
        "strategy": strategy.split()[0],
        "offload": "cpu" if strategy == OFFLOADED else "none",
        **layout(strategy, 2),
    }
    with pytest.raises(
        RankFailed,
        match=f"ConfigError.*{kind}.loss.*{reported}.*return the loss summed over the batch",
    ):
        train_here(describe(workload=f"{__name__}:{kind}", **section), tmp_path, 2)
    assert not losses(tmp_path)


@pytest.mark.processes
def test_a_sharded_model_is_not_asked_where_the_batch_of_one_rank_cannot_be_doubled(
    tmp_path: Path,
) -> None:
    assert (
        train_here(describe(workload=f"{__name__}:Ragged", strategy="fsdp"), tmp_path, 2)
        == ["done"] * 2
    )
