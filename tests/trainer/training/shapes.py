"""Workloads whose states have shapes that are easy to save and hard to load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiStepLR, OneCycleLR, StepLR

from kdist_trainer import config
from kdist_trainer.workload import Workload, WorkloadContext
from tests.trainer.training.tasks import FEATURES, Small


class CompiledWhole(Small):
    def model(self) -> nn.Module:
        return cast(nn.Module, torch.compile(super().model(), backend="eager"))


class CompiledInPart(Small):
    def model(self) -> nn.Module:
        model = super().model()
        assert isinstance(model, nn.Sequential)
        model[0] = cast(nn.Module, torch.compile(model[0], backend="eager"))
        return model


class StateForSome(Small):
    def optimizer(self, model: nn.Module, settings: config.Optimizer) -> Optimizer:  # noqa: ARG002
        first, *rest = model.parameters()
        groups: list[dict[str, Any]] = [{"params": [first], "momentum": 0.9}, {"params": rest}]
        return SGD(groups, lr=0.01)


class StateForNone(Small):
    def optimizer(self, model: nn.Module, settings: config.Optimizer) -> Optimizer:  # noqa: ARG002
        return SGD(model.parameters(), lr=0.01)


class Odd(SGD):
    """Keeps numbers of NumPy, keys that are no texts, tuples and a NumPy array in its state."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["ratio"] = np.float64(0.5)
            for parameter in group["params"]:
                self.state[parameter] |= {
                    "rounds": {1: (np.int64(2), "a"), 2: torch.ones(2)},
                    "history": np.arange(3),
                    "view": torch.ones(1).expand(3),
                }
        return super().step(closure)


class OddNumbers(Small):
    def optimizer(self, model: nn.Module, settings: config.Optimizer) -> Optimizer:  # noqa: ARG002
        return Odd(model.parameters(), lr=0.01)


class Scheduled(Small):
    """Makes a scheduler by `make`."""

    make: Callable[[Optimizer, int], LRScheduler]

    def scheduler(
        self,
        optimizer: Optimizer,
        settings: config.Schedule,  # noqa: ARG002 - the interface
        *,
        steps: int,  # noqa: ARG002 - the runs end at different steps
    ) -> LRScheduler:
        return type(self).make(optimizer, 20)


class OneCycle(Scheduled):
    make = staticmethod(lambda optimizer, steps: OneCycleLR(optimizer, 0.1, total_steps=steps))


class Milestones(Scheduled):
    make = staticmethod(lambda optimizer, steps: MultiStepLR(optimizer, np.arange(2, steps, 3)))


class NumpyRates(Scheduled):
    make = staticmethod(
        lambda optimizer, steps: LambdaLR(optimizer, lambda step: np.cos(step / steps))
    )


class Counter(nn.Linear):
    """Has extra state."""

    def __init__(self) -> None:
        super().__init__(FEATURES, 24)
        self.rounds: dict[int, Any] = {}

    def forward(self, inputs: Tensor) -> Tensor:
        self.rounds[len(self.rounds)] = (1, "pass")
        return super().forward(inputs)

    def get_extra_state(self) -> Any:
        return (dict(self.rounds),)

    def set_extra_state(self, state: Any) -> None:
        self.rounds = dict(state[0])


class Starting(Small):
    """Puts a layer of the class `layer` in the first place."""

    layer: type[nn.Module]

    def model(self) -> nn.Module:
        model = super().model()
        assert isinstance(model, nn.Sequential)
        model[0] = type(self).layer()
        return model


class ExtraState(Starting):
    layer = Counter


class LateLayer(nn.Linear):
    """Has a buffer that is None until its first pass."""

    peak: Tensor | None

    def __init__(self) -> None:
        super().__init__(FEATURES, 24)
        self.register_buffer("peak", None)

    def forward(self, inputs: Tensor) -> Tensor:
        self.peak = inputs.detach().amax(0)
        return super().forward(inputs)


class LateBuffer(Starting):
    layer = LateLayer


class ExpandedLayer(nn.Linear):
    """Has a buffer and a frozen parameter whose elements share memory."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__(FEATURES, 24)
        self.register_buffer("scale", torch.ones(1).expand(24))
        self.shift = nn.Parameter(torch.zeros(1).expand(24), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * self.scale + self.shift


class Expanded(Starting):
    layer = ExpandedLayer


class Caching(Small):
    """Keeps its model, and gives it to whoever asks."""

    kept: nn.Module | None = None

    def model(self) -> nn.Module:
        if Caching.kept is None:
            Caching.kept = super().model()
        return Caching.kept


class Unsafe(Counter):
    """Its extra state cannot be read safely."""

    def get_extra_state(self) -> Any:
        return (frozenset([1]),)

    def set_extra_state(self, state: Any) -> None:
        """Take anything."""


class UnsafeExtraState(Starting):
    layer = Unsafe


class Growing(Small):
    """Its model gets a new weight in some step."""

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self.losses = 0

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        self.losses += 1
        if self.losses == 6:
            inner: Any = getattr(model, "module", model)
            inner[0].register_parameter("gain", nn.Parameter(torch.ones(1), requires_grad=False))
        return super().loss(model, batch)


class Stubborn(StepLR):
    """Cannot load what it has saved."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: ARG002
        raise KeyError("rates")


class StubbornScheduler(Scheduled):
    make = staticmethod(lambda optimizer, steps: Stubborn(optimizer, steps))


class Forgetful(SGD):
    """Saves what it refuses to load."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: ARG002
        raise ValueError("no state is loaded here")


class ForgetfulOptimizer(Small):
    def optimizer(self, model: nn.Module, settings: config.Optimizer) -> Optimizer:  # noqa: ARG002
        return Forgetful(model.parameters(), lr=0.01, momentum=0.9)


LOADABLE: list[type[Workload]] = [
    Small,
    CompiledWhole,
    CompiledInPart,
    StateForSome,
    StateForNone,
    OddNumbers,
    OneCycle,
    Milestones,
    NumpyRates,
    ExtraState,
    LateBuffer,
    Expanded,
    Caching,
]
NOT_LOADABLE: dict[type[Workload], str] = {
    UnsafeExtraState: "frozenset, which a checkpoint cannot hold",
    Growing: "model.0.gain is not in the model",
    StubbornScheduler: "loading it raises KeyError: 'rates'",
    ForgetfulOptimizer: "loading it raises ValueError: no state is loaded here",
}
