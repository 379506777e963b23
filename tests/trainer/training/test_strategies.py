"""Checkpoints move between strategies and sizes, and each strategy keeps what it promises
besides.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from kdist_trainer import parallel
from kdist_trainer.config import Training
from kdist_trainer.data.step_plan import ShardAssignment
from kdist_trainer.distributed.world import World, to_local
from kdist_trainer.training.gradient_guard import GradientGuard
from kdist_trainer.workload import WorkloadContext
from tests.trainer.training.cells import (
    STRATEGIES,
    TOLERANCE,
    distance,
    document,
    layout,
    learn,
    losses,
)
from tests.trainer.training.group import run_group
from tests.trainer.training.tasks import Small, done, train_here

pytestmark = pytest.mark.processes
SPREAD = [strategy for strategy in STRATEGIES if strategy != "data_parallel"]
CUT = 10
RARE = [pytest.mark.chaos, pytest.mark.wide]
GPT: dict[str, Any] = {"steps": 2 * CUT, "evaluate": "never"}
"""A training whose second half goes on under another strategy."""


def interrupted(folder: Path, strategy: str, size: int) -> None:
    """A training of `gpt` that ends after half of its steps, with the state of a run that would go
    on.
    """
    section = {
        "checkpoint": {"every": {"steps": CUT}, "mode": "blocking", "keep": 1000},
        **layout(strategy, size),
    }
    train_here(document("gpt", strategy, "fp32", **GPT, **section), folder, size)
    for path in (folder / "checkpoints").iterdir():
        if path.name == "DONE" or path.name.startswith(f"step-{2 * CUT:08}"):
            path.rename(folder / path.name)


def go_on(folder: Path, strategy: str, size: int) -> list[float]:
    """Go on in `folder` with another strategy; the losses of the second half."""
    section = document("gpt", strategy, "fp32", **GPT, **layout(strategy, size))
    train_here(section, folder, size, generation=2)
    return losses(folder, generation=2)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("first", "then", "sizes"),
    [
        pytest.param("fsdp", "ddp", (2, 1)),
        pytest.param("tensor", "fsdp", (2, 1)),
        *(
            pytest.param(first, then, (2, 1 if then == "data_parallel" else 4), marks=RARE)
            for first in SPREAD
            for then in STRATEGIES
        ),
    ],
)
def test_a_checkpoint_goes_on_under_another_strategy_and_size(
    first: str, then: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    whole = learn(tmp_path / "whole", 1, "gpt", "ddp", "fp32", **GPT)
    interrupted(tmp_path / "run", first, sizes[0])
    found = go_on(tmp_path / "run", then, sizes[1])
    assert distance(found, whole[CUT:]) <= TOLERANCE["fp32"]


class Twin(Small):
    """Two blocks, each of which two ranks can split."""

    def tensor_plan(self, model: nn.Module, ranks: int) -> dict[str, ParallelStyle]:  # noqa: ARG002 - any number will do
        return {"*.0": ColwiseParallel(), "*.1": RowwiseParallel()}


def build(strategy: str, world: World) -> parallel.Strategy:
    """A strategy for `Twin`'s blocks."""
    train = Training.model_validate({"workload": "twin", "steps": 1, "strategy": strategy})
    return parallel.build(train, Twin(WorkloadContext()), world)


def hold(strategy: str, folder: Path) -> tuple[list[bool], int, int]:
    """Whether each weight is sharded, and how many numbers this rank holds of how many."""
    parts = 2 if strategy == "tensor" else 1
    with World.from_environment(timeout_seconds=60, model_parallel=parts) as world:
        blocks = [nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16)) for _ in range(2)]
        model = build(strategy, world).wrap(nn.Sequential(*blocks), blocks)
        weights = list(model.parameters())
        held = sum(w.to_local().numel() if isinstance(w, DTensor) else w.numel() for w in weights)
        sharded = [isinstance(weight, DTensor) for weight in weights]
        return sharded, held, sum(weight.numel() for weight in weights)


def test_each_rank_of_fsdp_holds_its_part_only(tmp_path: Path) -> None:
    for sharded, held, whole in run_group(hold, 4, "fsdp", tmp_path):
        assert all(sharded)
        assert held == whole // 4


def test_each_rank_of_tensor_holds_its_part_of_every_weight(tmp_path: Path) -> None:
    for sharded, held, whole in run_group(hold, 4, "tensor", tmp_path):
        assert all(sharded)
        assert held <= whole // 4 + 16 // 2 * 2, (
            "the biases of row-wise parts are whole in each copy"
        )


def test_hsdp_shards_within_a_node_and_replicates_across_nodes(tmp_path: Path) -> None:
    two_nodes = {"LOCAL_WORLD_SIZE": "2"}
    for _, held, whole in run_group(hold, 4, "hsdp", tmp_path, environment=two_nodes):
        assert held == whole // 2


@pytest.mark.sampled
@pytest.mark.chaos
@pytest.mark.parametrize(
    ("strategy", "size", "shards"),
    [("fsdp", 3, 4), pytest.param("tensor", 4, 3, marks=pytest.mark.wide)],
)
def test_a_sharded_model_of_uneven_shares_ends_with_the_weights_of_one_rank(
    strategy: str, size: int, shards: int, tmp_path: Path
) -> None:
    section: dict[str, Any] = {"virtualShards": shards, "microBatch": 1, "evaluate": "end"}
    section["steps"] = 8
    train_here(document("gpt", "ddp", "fp32", **section), tmp_path / "one", 1)
    spread = document("gpt", strategy, "fp32", **section, **layout(strategy, size))
    train_here(spread, tmp_path / "several", size)
    assert distance(losses(tmp_path / "several"), losses(tmp_path / "one")) <= TOLERANCE["fp32"]
    one, several = done(tmp_path / "one")["metrics"], done(tmp_path / "several")["metrics"]
    assert several["loss"] == pytest.approx(one["loss"], rel=1e-5)


@pytest.mark.chaos
@pytest.mark.wide
def test_weights_that_three_ranks_cannot_share_evenly_are_split_and_saved_all_the_same(
    tmp_path: Path,
) -> None:
    """256 scores over 3 ranks and 2 copies."""
    options = {"width": 24, "heads": 3, "block": 16, "corpusBytes": 65536}
    section: dict[str, Any] = {"options": options, "steps": 8, "virtualShards": 2}
    whole = learn(tmp_path / "one", 1, "gpt", "ddp", "fp32", **section)
    every = {"checkpoint": {"every": {"steps": 4}, "mode": "blocking", "keep": 1000}}
    split = {**section, **every, "modelParallel": 3}
    assert distance(learn(tmp_path / "six", 6, "gpt", "tensor", "fp32", **split), whole) <= 1e-5
    (tmp_path / "again" / "checkpoints").mkdir(parents=True)
    saved = "checkpoints/step-00000004-e1"
    (tmp_path / "six" / saved).rename(tmp_path / "again" / saved)
    train_here(document("gpt", "ddp", "fp32", **section), tmp_path / "again", 1, generation=2)
    assert distance(losses(tmp_path / "again", generation=2), whole[4:]) <= 1e-5


@pytest.mark.chaos
@pytest.mark.wide
@pytest.mark.parametrize(("strategy", "size"), [("fsdp", 2), ("tensor", 2), ("tensor", 4)])
def test_a_gradient_that_is_always_too_long_is_clipped_as_on_one_rank(
    strategy: str, size: int, tmp_path: Path
) -> None:
    section: dict[str, Any] = {"clipGradNorm": 0.05, "steps": 12}
    section["optimizer"] = {"name": "sgd", "learningRate": 1.0}
    train_here(document("gpt", "ddp", "fp32", **section), tmp_path / "one", 1)
    spread = document("gpt", strategy, "fp32", **section, **layout(strategy, size))
    train_here(spread, tmp_path / "several", size)
    assert distance(losses(tmp_path / "several"), losses(tmp_path / "one")) <= TOLERANCE["fp32"]


def overflow(strategy: str, folder: Path) -> tuple[bool, float]:
    """Whether a weight moved, and the loss's scale, after a step in which one rank's part of one
    gradient overflowed.
    """
    from kdist_trainer.numerics import precision as precisions

    parts = 2 if strategy == "tensor" else 1
    with World.from_environment(timeout_seconds=60, model_parallel=parts) as world:
        blocks = [nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16)) for _ in range(2)]
        model = build(strategy, world).wrap(nn.Sequential(*blocks), blocks)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        chosen = precisions.build("fp16", torch.device("cpu"))
        assert isinstance(chosen, precisions.ScaledPrecision)
        before = [to_local(weight).clone() for weight in model.parameters()]
        scale = chosen.scaler.get_scale()
        chosen.backward(model(torch.ones(2, 16)).sum())
        if world.rank == 1:
            gradient = next(model.parameters()).grad
            assert gradient is not None
            to_local(gradient).fill_(torch.inf)
        chosen.update(
            optimizer, GradientGuard(Training.model_validate({"workload": "digits", "steps": 1})), 1
        )
        moved = any(
            not torch.equal(to_local(weight), old)
            for weight, old in zip(model.parameters(), before, strict=True)
        )
        return moved, chosen.scaler.get_scale() / scale


@pytest.mark.parametrize("strategy", ["fsdp", "tensor"])
def test_what_overflows_on_one_rank_is_left_out_by_all(strategy: str, tmp_path: Path) -> None:
    assert run_group(overflow, 2, strategy, tmp_path) == [(False, 0.5)] * 2


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_an_even_deal_gives_every_rank_as_many_parts_and_every_sample_once(ranks: int) -> None:
    for samples in range(1, 13):
        deals = [
            ShardAssignment(12, 4, rank, ranks, micro_batch=2, even=True).chunks(samples)
            for rank in range(ranks)
        ]
        assert len({len(parts) for parts in deals}) == 1
        seen = [
            index
            for parts in deals
            for part in parts
            if part.samples
            for index in range(part.first, part.last)
        ]
        assert sorted(seen) == list(range(samples))


def arithmetic(precision: str, folder: Path) -> tuple[str, str]:
    """What matrix products are told, and in what the weights are kept, while a training in
    `precision` is put together.
    """
    from kdist_trainer.numerics import precision as precisions

    chosen = precisions.build(precision, torch.device("cpu"))
    model = chosen.cast(nn.Linear(2, 2))
    return torch.get_float32_matmul_precision(), str(model.weight.dtype)


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("fp32", ("highest", "torch.float32")),
        ("tf32", ("high", "torch.float32")),
        ("bf16", ("highest", "torch.float32")),
        ("bf16-params", ("highest", "torch.bfloat16")),
    ],
)
def test_a_precision_sets_products_and_weights(
    precision: str, expected: tuple[str, str], tmp_path: Path
) -> None:
    assert run_group(arithmetic, 1, precision, tmp_path, environment=dict(os.environ)) == [expected]
