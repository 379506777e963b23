"""What elements share memory in is loaded, into memory of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kdist_trainer.checkpoint.writer import fill
from kdist_trainer.state import describe, load_state, read_state, template


class Views(nn.Module):
    """Has a buffer and a frozen parameter that are expanded."""

    scale: Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.register_buffer("scale", torch.full((1,), value).expand(3))
        self.shift = nn.Parameter(torch.full((1, 2), value).expand(4, 2), requires_grad=False)


def test_an_expanded_tensor_is_filled_and_loaded() -> None:
    saved, fresh = Views(2.0), Views(1.0)
    state = read_state(saved, torch.optim.SGD(saved.fc.parameters()))
    optimizer = torch.optim.SGD(fresh.fc.parameters())
    asked = template(fresh, optimizer, describe(state))
    assert fill(asked, state) == []
    load_state(fresh, optimizer, asked)
    assert torch.equal(fresh.scale, torch.full((3,), 2.0))
    assert torch.equal(fresh.shift, torch.full((4, 2), 2.0))
