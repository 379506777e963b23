"""Tensors whose elements share memory, such as expanded ones: nothing can be copied into them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kdist_trainer.state.names import buffer_slots
from kdist_trainer.torch_internals import own_buffers


def overlaps(tensor: Tensor) -> bool:
    """Whether elements of a tensor share memory."""
    return tensor.layout is torch.strided and any(
        step == 0 and length > 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True)
    )


@torch.no_grad()
def separate(module: nn.Module) -> None:
    """Give every element of a module's parameters and buffers memory of its own."""
    for parameter in module.parameters():
        if overlaps(parameter):
            parameter.data = parameter.data.clone()
    for slot in buffer_slots(module):
        if slot.tensor is not None and overlaps(slot.tensor):
            own_buffers(slot.owner)[slot.key] = slot.tensor.clone()
