"""In what precision the forward and backward pass run.

fp32; tf32, where matrix products on a GPU round their inputs to 10 bits of mantissa; bf16 by
autocast; bf16-params, which keeps the weights and the optimizer's state in bf16 too and so halves
their memory, at the price of updates smaller than 1/256 of a weight that are lost; fp16 by autocast
with loss scaling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

Admit = Callable[[Tensor], bool]
"""Asked with the gradient's norm whether the update counts."""


class Precision:
    """All but fp16: gradients are what backward gives."""

    left_out = False
    """Whether the update of the last step was, because it was not admitted."""
    stages: dist.ProcessGroup | None = None
    """The ranks that hold the other weights of the model, where it is cut in stages: norm and
    overflow are of all of them.
    """

    def __init__(self, name: str, device: torch.device, *, clip: float | None = None) -> None:
        self._dtype = {
            "bf16": torch.bfloat16,
            "bf16-params": torch.bfloat16,
            "fp16": torch.float16,
        }.get(name)
        self._params = torch.bfloat16 if name == "bf16-params" else None
        # Said for every precision: the process may have been told otherwise by the user's own
        # imports.
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = name == "tf32"
        self._device = device.type
        self._as_it_is = nullcontext()
        self._clip = clip

    def cast(self, model: nn.Module) -> nn.Module:
        """The model with its weights in the precision that they are kept in."""
        return model if self._params is None else model.to(self._params)

    def autocast(self) -> AbstractContextManager[Any]:
        """The block in which the model runs."""
        if self._dtype is None:
            return self._as_it_is
        return torch.autocast(self._device, dtype=self._dtype)

    def scaled(self, loss: Tensor) -> Tensor:
        """What a backward pass begins with."""
        return loss

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradients to the parameters'."""
        self.scaled(loss).backward()  # type: ignore[no-untyped-call]

    def update(self, optimizer: Optimizer, admit: Admit | None = None) -> Tensor | None:
        """Clip where asked, and step if `admit` lets the norm pass; returns the norm before
        clipping, None where nobody asked.
        """
        norm = self._clipped(optimizer, always=admit is not None)
        self.left_out = admit is not None and norm is not None and not admit(norm)
        if not self.left_out:
            optimizer.step()
        return norm

    def _clipped(self, optimizer: Optimizer, *, always: bool) -> Tensor | None:
        if self._clip is None and not always:
            return None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self.stages is not None:
            squares = norm.square()
            dist.all_reduce(squares, group=self.stages)
            norm = squares.sqrt()
        clip_grads_with_norm_(parameters, math.inf if self._clip is None else self._clip, norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold of it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""


class ScaledPrecision(Precision):
    """fp16: the loss is scaled up so that small gradients survive; a step whose gradients overflow
    is left out.
    """

    def __init__(self, name: str, device: torch.device, *, clip: float | None = None) -> None:
        super().__init__(name, device, clip=clip)
        self.scaler = torch.amp.GradScaler(device.type)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the scale."""
        return self.scaler.scale(loss)

    def update(self, optimizer: Optimizer, admit: Admit | None = None) -> Tensor | None:
        """Unscale before clipping; step only where every gradient is finite; adapt the scale."""
        norm = None
        if self._clip is not None or admit is not None or self.stages is not None:
            self.scaler.unscale_(optimizer)
            self._agree(optimizer)
            norm = self._clipped(optimizer, always=admit is not None)
        # A gradient that overflows is the scale's affair, which `step` looks after; nobody else is
        # asked.
        overflown = admit is not None and norm is not None and not bool(torch.isfinite(norm))
        self.left_out = overflown or (admit is not None and norm is not None and not admit(norm))
        if overflown or not self.left_out:
            self.scaler.step(optimizer)
        self.scaler.update()
        return norm

    def _agree(self, optimizer: Optimizer) -> None:
        """Let an overflow in one stage of a pipeline be one in all."""
        if self.stages is not None:
            for found in self.scaler._found_inf_per_device(optimizer).values():
                dist.all_reduce(found, dist.ReduceOp.MAX, group=self.stages)

    def state_dict(self) -> dict[str, Any]:
        """Scale and growth counter."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the scale and growth counter."""
        self.scaler.load_state_dict(state)


def build(name: str, device: torch.device, *, clip: float | None = None) -> Precision:
    """The precision named in job.yaml."""
    return (ScaledPrecision if name == "fp16" else Precision)(name, device, clip=clip)
