"""The state of a replicated training, as a checkpoint holds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from kdist_trainer.distributed.world import World
from kdist_trainer.parallel.ddp import Buckets, Ddp
from kdist_trainer.state import parameter_names, read_module, read_optimizer
from tests.trainer.training.group import run_group


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


def frozen() -> nn.Sequential:
    model = plain()
    model[0].weight.requires_grad_(False)
    return model


def adamw_in_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = [one for one in model.parameters() if one.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [first]},
        {"params": others, "lr": 0.1, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, amsgrad=True)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [one for one in model.parameters() if one.requires_grad], lr=0.1, momentum=0.9
    )


def stateless(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)


def flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {
            key: one
            for name, inner in value.items()
            for key, one in flat(inner, f"{path}.{name}").items()
        }
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {
            key: one
            for index, inner in enumerate(value)
            for key, one in flat(inner, f"{path}.{index}").items()
        }
    return {path: value}


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("make_model", [plain, tied, frozen])
@pytest.mark.parametrize("make_optimizer", [adamw_in_groups, momentum, stateless])
def test_the_state_has_the_names_and_values_that_torch_gives(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    train(model, optimizer)
    expected_model, expected = get_state_dict(model, optimizer)
    ours, theirs = flat(read_optimizer(optimizer, parameter_names(model))), flat(expected)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert (
            torch.equal(ours[name], value) if isinstance(value, Tensor) else ours[name] == value
        ), name
    assert read_module(model).keys() == expected_model.keys()


class Crossed(nn.Module):
    """Two layers of a mebibyte each, used in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(520, 520)
        self.first = nn.Linear(520, 520)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.first(inputs).relu())  # type: ignore[no-any-return]


def average(passes: int, buckets: Buckets | None) -> tuple[Buckets | None, list[bytes]]:
    """The buckets after some backward passes, and the averaged gradients of the last one."""
    with World.from_environment(timeout_seconds=60) as world:
        torch.manual_seed(7)
        model = Crossed()
        strategy = Ddp(world, bucket_mib=1, is_abortable=True, buckets=buckets)
        wrapped = strategy.wrap(model, ())
        inputs = torch.randn(8 * world.size, 520)[world.rank :: world.size]
        for _ in range(passes):
            model.zero_grad()
            wrapped(inputs).square().mean().backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        return strategy.buckets, [each.numpy().tobytes() for each in gradients]


@pytest.mark.processes
@pytest.mark.sampled
def test_ranks_that_know_the_buckets_average_at_once_as_others_do_after_their_first_pass() -> None:
    (known, last), *others = run_group(average, 3, 3, None)
    assert known is not None
    assert [sorted(bucket) for bucket in known] == [[0, 1], [2, 3]], "in the order of use"
    assert [buckets for buckets, _ in others] == [known] * 2
    (early, first), *_ = run_group(average, 3, 1, None)
    assert early is None, "DDP lays its buckets again after the first pass"
    assert first != last, "the buckets make no difference here"
    for passes in (1, 2):
        assert run_group(average, 3, passes, known) == [(known, last)] * 3
