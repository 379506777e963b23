"""The state of a replicated training, as a checkpoint holds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from kdist_trainer.parallel.ddp import named_state


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


@pytest.mark.parametrize("make_model", [plain, tied, frozen])
@pytest.mark.parametrize("make_optimizer", [adamw_in_groups, momentum, stateless])
def test_the_fast_way_to_the_state_gives_what_torch_gives(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    expected_model, expected = get_state_dict(model, optimizer)
    ours, theirs = flat(named_state(model, optimizer)), flat(expected)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert (
            torch.equal(ours[name], value) if isinstance(value, Tensor) else ours[name] == value
        ), name
    assert model.state_dict().keys() == expected_model.keys()
