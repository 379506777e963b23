"""What a worker builds before it has a group is what it would have built in the group, also where
the user's code draws from the global generators.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from kdist_trainer import config
from kdist_trainer.config import TrainConfig
from kdist_trainer.distributed.world import World
from kdist_trainer.metrics.rank_metrics import StepStats
from kdist_trainer.metrics.transport import Reporter
from kdist_trainer.training import regroup
from kdist_trainer.training.builder import RankRuntime, assemble
from kdist_trainer.training.optimizer import Ema
from kdist_trainer.training.regroup import load_workload
from kdist_trainer.training.sync import StopFlag
from kdist_trainer.workload import Split
from tests.trainer.training.group import run_group
from tests.trainer.training.tasks import FEATURES, Small, describe


class Drawing(Small):
    """Draws its samples, its blocks and its optimizer's settings from the global generators."""

    def model(self) -> nn.Module:
        return nn.Sequential(super().model(), nn.BatchNorm1d(3))

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(model, nn.Sequential)
        return [model[0]]

    def dataset(self, split: Split) -> TensorDataset:  # noqa: ARG002 - the workload's signature
        labels = torch.tensor([random.randrange(3) for _ in range(50)])
        noise = torch.from_numpy(np.random.rand(50, FEATURES)).float()
        return TensorDataset(torch.randn(50, FEATURES) + noise, labels, torch.arange(50))

    def optimizer(self, model: nn.Module, settings: config.Optimizer) -> torch.optim.Optimizer:
        optimizer = super().optimizer(model, settings)
        optimizer.param_groups[0]["lr"] *= 1 + random.random() + torch.rand(()).item()
        return optimizer


def build(early: bool, section: dict[str, Any]) -> dict[str, Any]:
    """What a rank has built, and the next numbers that its generators give."""
    described = TrainConfig.model_validate(describe(**section), by_alias=True, strict=False)
    train = described.train
    assert train is not None
    built = None
    if early:
        regroup.warm_up_torch()
        built = regroup.prepare(train, torch.device("cpu"))
        torch.rand(3), np.random.rand(3), random.random()  # something else has drawn since
    with World.from_environment(
        timeout_seconds=described.collective_timeout_seconds,
        model_parallel=train.model_parallel or 1,
    ) as world:
        stats = StepStats(rank=world.rank, generation=1)
        runtime = RankRuntime(
            world=world, stop_flag=StopFlag(), stats=stats, reporter=Reporter(stats)
        )
        workload = load_workload(train, world.device) if built is None else built.workload
        ctx = assemble(described, train, workload, runtime, None, built)
        weights = {name: value.tolist() for name, value in ctx.module.state_dict().items()}
        return {
            "weights": weights,
            "averages": {name: value.tolist() for name, value in ctx.ema.tensors.items()}
            if isinstance(ctx.ema, Ema)
            else None,
            "rate": ctx.optimizer.param_groups[0]["lr"],
            "fingerprint": ctx.state.fingerprint,
            "batch": ctx.loader.first_micro_batch().batch[0].tolist(),
            "next": (torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()),
        }


@pytest.mark.processes
@pytest.mark.parametrize(
    "section",
    [{}, {"emaDecay": 0.5, "activationCheckpointing": "blocks", "precision": "bf16"}],
    ids=["plain", "all"],
)
def test_a_training_that_was_prepared_is_bitwise_the_one_that_was_not(
    section: dict[str, Any],
) -> None:
    described = {"workload": f"{__name__}:Drawing", **section}
    (early,) = run_group(build, 1, True, described)
    (late,) = run_group(build, 1, False, described)
    assert early == late


def test_the_warm_up_leaves_the_generators_as_they_were() -> None:
    torch.manual_seed(3)
    first = torch.rand(4)
    torch.manual_seed(3)
    regroup.warm_up_torch()
    assert torch.equal(torch.rand(4), first)
