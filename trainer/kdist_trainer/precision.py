"""In what precision the forward and backward pass run: fp32, bf16 by autocast, fp16 by autocast with loss scaling."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer


class Precision:
    """fp32 and bf16: gradients are what backward gives."""

    def __init__(self, name: str, device: torch.device, *, clip: float | None = None) -> None:
        self._dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
        self._device = device.type
        self._as_it_is = nullcontext()
        self._clip = clip

    def autocast(self) -> AbstractContextManager[Any]:
        """The block in which the model runs."""
        if self._dtype is None:
            return self._as_it_is
        return torch.autocast(self._device, dtype=self._dtype)

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradients to the parameters'."""
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self, optimizer: Optimizer) -> Tensor | None:
        """Clip where asked and step; the gradient's total norm before clipping, or None where nobody asked."""
        norm = self._clipped(optimizer)
        optimizer.step()
        return norm

    def _clipped(self, optimizer: Optimizer) -> Tensor | None:
        if self._clip is None:
            return None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return clip_grad_norm_(parameters, self._clip)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold of it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""


class ScaledPrecision(Precision):
    """fp16: the loss is scaled up so that small gradients survive; a step whose gradients overflow is left out."""

    def __init__(self, name: str, device: torch.device, *, clip: float | None = None) -> None:
        super().__init__(name, device, clip=clip)
        self.scaler = torch.amp.GradScaler(device.type)

    def backward(self, loss: Tensor) -> None:
        """Scale, then backward."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def update(self, optimizer: Optimizer) -> Tensor | None:
        """Unscale before clipping; step only where every gradient is finite; adapt the scale."""
        norm = None
        if self._clip is not None:
            self.scaler.unscale_(optimizer)
            norm = self._clipped(optimizer)
        self.scaler.step(optimizer)
        self.scaler.update()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Scale and growth counter."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the scale and growth counter."""
        self.scaler.load_state_dict(state)


def build(name: str, device: torch.device, *, clip: float | None = None) -> Precision:
    """The precision named in job.yaml."""
    return (ScaledPrecision if name == "fp16" else Precision)(name, device, clip=clip)
