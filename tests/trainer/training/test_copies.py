"""Ranks that share a copy of the model: they read the same samples, which count once, and only
whole copies train.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

from kdist.spec import validators
from kdist_trainer import workloads
from kdist_trainer.config import TrainConfig
from kdist_trainer.distributed.world import World
from kdist_trainer.errors import ConfigError
from kdist_trainer.metrics.rank_metrics import StepStats
from kdist_trainer.metrics.transport import Reporter
from kdist_trainer.training import trainer
from kdist_trainer.training.builder import RankRuntime, assemble
from kdist_trainer.training.regroup import load_workload
from kdist_trainer.training.sync import StopFlag
from kdist_trainer.workload import Workload
from tests.trainer.training.cells import document
from tests.trainer.training.group import RankFailed, run_group
from tests.trainer.training.tasks import Small, describe, train_here


@pytest.mark.parametrize(("rank", "expected"), [(0, (0, 0)), (1, (0, 1)), (4, (2, 0)), (5, (2, 1))])
def test_neighbours_share_a_copy(rank: int, expected: tuple[int, int]) -> None:
    world = World(
        rank, 6, 0, 2, 1, torch.device("cpu"), "gloo", timedelta(seconds=1), model_parallel=2
    )
    assert (world.data_rank, world.model_rank) == expected
    assert world.data_size == 3


def test_a_group_that_is_no_whole_number_of_copies_is_refused_before_it_forms() -> None:
    with pytest.raises(
        ConfigError,
        match="2 ranks share one copy of the model, and 3 ranks are no multiple of that",
    ):
        World.from_environment(
            timeout_seconds=1, model_parallel=2, environment={"RANK": "0", "WORLD_SIZE": "3"}
        )


def count(described: dict[str, Any], folder: Path) -> int:
    """Samples that this rank has counted after a training."""
    config = TrainConfig.model_validate(described, by_alias=True, strict=False)
    assert config.train is not None
    with World.from_environment(
        timeout_seconds=config.collective_timeout_seconds,
        model_parallel=config.train.model_parallel or 1,
    ) as world:
        stats = StepStats(rank=world.rank, generation=1)
        runtime = RankRuntime(
            world=world, stop_flag=StopFlag(), stats=stats, reporter=Reporter(stats)
        )
        trainer.train(
            assemble(config, config.train, load_workload(config.train, world.device), runtime)
        )
        return int(stats.samples)


@pytest.mark.processes
@pytest.mark.sampled
def test_a_sample_that_two_ranks_compute_together_counts_once(tmp_path: Path) -> None:
    described = document("gpt", "tensor", "fp32", modelParallel=2, steps=2)
    assert run_group(count, 2, described, tmp_path) == [16, 0]


def test_the_command_line_knows_which_workloads_have_a_plan() -> None:
    able = [
        name
        for name in workloads.shipped()
        if workloads.load(name).tensor_plan is not Workload.tensor_plan
    ]
    assert tuple(able) == validators.TENSOR_WORKLOADS


class Misspelt(Small):
    def tensor_plan(self, model: nn.Module, ranks: int) -> dict[str, ParallelStyle]:  # noqa: ARG002 - any number will do
        return {"layers.0": ColwiseParallel()}


@pytest.mark.processes
def test_a_plan_that_names_what_the_model_has_not_is_refused(tmp_path: Path) -> None:
    section = {"workload": f"{__name__}:Misspelt", "strategy": "tensor", "modelParallel": 1}
    with pytest.raises(
        RankFailed, match=r"Misspelt.tensor_plan names layers.0, and the model has no such part"
    ):
        train_here(describe(**section), tmp_path, 1)
