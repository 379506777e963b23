"""How weights are updated: the optimizer with its learning rates, and the weights' moving average.

The default optimizer and schedule are in `kdist_trainer.workload`, clipping in
`kdist_trainer.numerics.precision`; `gradient_guard` decides which updates are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from kdist_trainer.config import Training
from kdist_trainer.distributed.world import to_local
from kdist_trainer.state import parameter_names
from kdist_trainer.training.workload_checks import find_optimizer_problem, refuse
from kdist_trainer.workload import Workload


def make_optimizer(train: Training, workload: Workload, module: nn.Module) -> Optimizer:
    """The workload's optimizer. Its parameter groups record their initial learning rate, since a
    schedule may be added or changed later. Raises `ConfigError` if the training loop cannot use it.
    """
    optimizer = workload.optimizer(module, train.optimizer)
    refuse(find_optimizer_problem(optimizer, module), workload)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return optimizer


def clear_gradients(optimizer: Optimizer) -> None:
    """Set the gradients to None, as `zero_grad` does.

    torch's own method also marks itself in profiles, which takes 20 us. An optimizer's own is
    called.
    """
    if getattr(optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


class Ema:
    """An exponential moving average of the weights that this rank holds; of none, so that the
    weights themselves are evaluated, without a decay.

    After every step, average = decay * average + (1 - decay) * weight. Averages are fp32 where
    weights have fewer bits: 1/1000 of a difference is too small to be added in bf16.
    """

    def __init__(self, module: nn.Module, decay: float | None) -> None:
        # Collected once: a sharded model replaces its parameters while it computes.
        names = {} if decay is None else parameter_names(module)
        self._weights: dict[str, Tensor] = {name: weight for weight, name in names.items()}
        decay = decay or 0.0
        self._step_weight = 1 - decay
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self.tensors = {name: _widen(weight) for name, weight in self._weights.items()}
        pairs = [(weight, self.tensors[name]) for name, weight in self._weights.items()]
        self._widened = [pair for pair in pairs if pair[0].dtype != pair[1].dtype]
        self._same_dtype = [pair for pair in pairs if pair[0].dtype == pair[1].dtype]

    @torch.no_grad()
    def update(self) -> None:
        if self._same_dtype:
            weights, averages = zip(
                *[(to_local(weight), to_local(average)) for weight, average in self._same_dtype],
                strict=True,
            )
            self._average(averages, weights, None)
        # one by one, so that at most one weight has an fp32 copy at a time
        for weight, average in self._widened:
            own = to_local(average)
            own.lerp_(to_local(weight).to(own.dtype), self._step_weight)

    @torch.no_grad()
    def reset(self) -> None:
        """Set the averages to the current weights."""
        for name, weight in self._weights.items():
            to_local(self.tensors[name]).copy_(to_local(weight))

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within the `with` block, the model's weights are the averages."""
        saved = [to_local(weight).clone() for weight, _ in self._widened]
        with torch.no_grad():
            for weight, average in self._widened:
                to_local(weight).copy_(to_local(average))
        self._swap()
        try:
            yield
        finally:
            self._swap()
            with torch.no_grad():
                for (weight, _), own in zip(self._widened, saved, strict=True):
                    to_local(weight).copy_(own)

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, average in self._same_dtype:
            own, other = to_local(weight), to_local(average)
            saved = own.clone()
            own.copy_(other)
            other.copy_(saved)


def _widen(weight: Tensor) -> Tensor:
    """A copy with at least 32 bits per element."""
    narrow = weight.is_floating_point() and weight.dtype.itemsize < torch.float32.itemsize
    return weight.detach().to(torch.float32) if narrow else weight.detach().clone()
