"""The gradients are cleared as torch's `zero_grad` does, and by an optimizer's own where it has
one.
"""

from __future__ import annotations

import torch
from torch import nn

from kdist_trainer.training.optimizer import clear_gradients


class Counting(torch.optim.SGD):
    """An optimizer whose gradients are cleared in its own way."""

    cleared = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.cleared += 1
        super().zero_grad(set_to_none)


def model_with_gradients() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model(torch.ones(4, 2)).sum().backward()
    return model


def test_no_parameter_of_any_group_keeps_a_gradient_also_after_a_restored_state() -> None:
    model = model_with_gradients()
    groups = [{"params": part.parameters()} for part in model.children()]
    optimizer = torch.optim.AdamW(groups)
    optimizer.load_state_dict(optimizer.state_dict())  # it has other groups from now on
    clear_gradients(optimizer)
    assert [parameter.grad for parameter in model.parameters()] == [None] * 4


def test_an_optimizer_that_clears_gradients_in_its_own_way_is_asked_to() -> None:
    model = model_with_gradients()
    optimizer = Counting(model.parameters())
    clear_gradients(optimizer)
    assert optimizer.cleared == 1
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_function_that_was_put_over_zero_grad_is_called() -> None:
    optimizer = torch.optim.SGD(model_with_gradients().parameters())
    called: list[str] = []
    vars(optimizer)["zero_grad"] = lambda: called.append("zero_grad")
    clear_gradients(optimizer)
    assert called == ["zero_grad"]
