"""Numerical precision of the forward and backward passes and of the weights.

`fp32`; `tf32`, where matrix products on a GPU round their inputs to 10 bits of mantissa; `bf16` by
autocast; `bf16-params`, which also keeps the weights and the optimizer's state in bf16: half the
memory, but updates smaller than 1/256 of a weight are lost; `fp16` by autocast with loss scaling.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from kdist_trainer.torch_internals import found_overflows


class UpdateCheck(Protocol):
    """Decides by the norm of the gradient whether an update is applied."""

    needs_norm: bool
    """Whether the norm must be computed even if gradients are not clipped."""

    def skip_reason(self, step: int, norm: Tensor) -> str:
        """Why the update of `step` must be skipped; empty if it is applied."""
        ...


class UpdateResult(NamedTuple):
    """What `Precision.update` did."""

    grad_norm: Tensor | None
    """Norm of the gradient before clipping (a scalar); None if nothing needed it."""
    skipped: bool
    """Whether the optimizer's step was skipped by the check, or because fp16 gradients overflowed
    while there is a check.
    """
    skip_reason: str
    """Why the check skipped it; empty if it did not."""


_UNCHECKED: Final = UpdateResult(None, skipped=False, skip_reason="")


class Precision:
    """Every precision but fp16: gradients are used as the backward pass leaves them."""

    stages: dist.ProcessGroup | None = None
    """The ranks that hold the other weights of the model, where it is split into pipeline stages:
    norm and overflow are those of all stages together.
    """

    def __init__(self, name: str, device: torch.device, *, clip: float | None = None) -> None:
        self._dtype = {
            "bf16": torch.bfloat16,
            "bf16-params": torch.bfloat16,
            "fp16": torch.float16,
        }.get(name)
        self._params = torch.bfloat16 if name == "bf16-params" else None
        # Set for every precision, since the user's imports may have changed it.
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = name == "tf32"
        self._device = device.type
        self._no_autocast = nullcontext()
        self._clip = clip

    def cast(self, model: nn.Module) -> nn.Module:
        """The model with its weights in the precision that they are stored in."""
        return model if self._params is None else model.to(self._params)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which the model's forward pass runs."""
        if self._dtype is None:
            return self._no_autocast
        return torch.autocast(self._device, dtype=self._dtype)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss, a scalar, as the backward pass starts with it."""
        return loss

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, a scalar, to those of the parameters."""
        self.scale(loss).backward()  # type: ignore[no-untyped-call]

    def update(self, optimizer: Optimizer, check: UpdateCheck, step: int) -> UpdateResult:
        """Clip the gradients if the job asks for it, and step the optimizer if `check` agrees,
        which decides by the gradient's norm. Steps count from 1.
        """
        norm = self._clip_gradients(optimizer, needs_norm=check.needs_norm)
        if norm is None:
            optimizer.step()
            return _UNCHECKED
        reason = check.skip_reason(step, norm)
        if not reason:
            optimizer.step()
        return UpdateResult(norm, bool(reason), reason)

    def _clip_gradients(self, optimizer: Optimizer, *, needs_norm: bool) -> Tensor | None:
        if self._clip is None and not needs_norm:
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
        """The state for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`."""


class ScaledPrecision(Precision):
    """fp16: the loss is scaled up so that small gradients survive; a step whose gradients overflow
    is skipped.
    """

    def __init__(self, name: str, device: torch.device, *, clip: float | None = None) -> None:
        super().__init__(name, device, clip=clip)
        self.scaler = torch.amp.GradScaler(device.type)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss, a scalar, times the scaler's scale."""
        return self.scaler.scale(loss)

    def update(self, optimizer: Optimizer, check: UpdateCheck, step: int) -> UpdateResult:
        """Unscale before clipping, step only if every gradient is finite, and adapt the scale.

        `GradScaler.step` skips an update that overflowed; `check` is not asked about it.
        """
        norm = None
        if self._clip is not None or check.needs_norm or self.stages is not None:
            self.scaler.unscale_(optimizer)
            if self.stages is not None:  # an overflow in one stage of a pipeline is one in all
                for found in found_overflows(self.scaler, optimizer):
                    dist.all_reduce(found, dist.ReduceOp.MAX, group=self.stages)
            norm = self._clip_gradients(optimizer, needs_norm=check.needs_norm)
        overflown, reason = False, ""
        if norm is not None and check.needs_norm:
            overflown = not bool(torch.isfinite(norm))
            reason = "" if overflown else check.skip_reason(step, norm)
        if not reason:
            self.scaler.step(optimizer)
        self.scaler.update()
        return UpdateResult(norm, overflown or bool(reason), reason)

    def state_dict(self) -> dict[str, Any]:
        """Scale and growth counter."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scale and the growth counter."""
        self.scaler.load_state_dict(state)


def build(name: str, device: torch.device, *, clip: float | None = None) -> Precision:
    """Build the precision that job.yaml names for the rank's device. `clip` is
    `train.clipGradNorm`, the largest norm of the gradient; None to clip nothing.
    """
    return (ScaledPrecision if name == "fp16" else Precision)(name, device, clip=clip)
