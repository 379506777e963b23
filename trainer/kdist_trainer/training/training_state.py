"""What a training is at a step: `TrainState`, its position, and `TrainingState`, all that a
checkpoint of it holds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from kdist_trainer.parallel.base import Strategy
from kdist_trainer.state import ValueKind
from kdist_trainer.training.ema import Ema, NullEma
from kdist_trainer.training.loading_check import LoadingCheck
from kdist_trainer.training.supported import check_saved_scheduler, describe_scheduler
from kdist_trainer.world import World, to_local


@dataclass
class TrainState:
    """The position of a training; `samples_seen` and `seed` determine the next samples."""

    seed: int
    fingerprint: str
    """Identity of the data set."""
    world_size: int
    environment: str
    """What must be the same, besides the world size, for bitwise identical results: versions,
    threads, device.
    """
    step: int = 0
    samples_seen: int = 0
    evaluated: int = 0
    """The step of the last evaluation during training."""
    extras: dict[str, Any] = field(default_factory=dict)
    """States of scheduler and loss scaler; JSON-able."""

    def to_json(self) -> dict[str, Any]:
        """The state as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> TrainState:
        """The state from the values of `to_json`; fields of newer versions are ignored."""
        known = {one.name for one in fields(cls)}
        return cls(**{key: value for key, value in document.items() if key in known})

    def set_writer(self, world_size: int, environment: str) -> None:
        """Set who has computed this state: the former group, until this one has taken a step."""
        self.world_size, self.environment = world_size, environment

    def describe_writer(self) -> str:
        """The ranks that compute this state, and their environment: equal texts mean bitwise equal
        results.
        """
        return f"{self.world_size} rank{'s'[: self.world_size - 1]}, {self.environment}"


class Stateful(Protocol):
    """State that can be saved in a checkpoint and restored."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True)
class TrainingState:
    """The whole state of a training, as checkpoints hold it."""

    world: World
    strategy: Strategy
    module: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    ema: Ema | NullEma
    extras: Mapping[str, Stateful]
    """Small states that are stored as JSON, such as the loss scaler's, by name."""
    state: TrainState
    loading: LoadingCheck = field(default_factory=LoadingCheck)
    """Proves that a new process could load the state; kept as long as the model."""

    def tensors(self) -> dict[str, Any]:
        """All tensors by their full names, and the scheduler's state."""
        return self._complete(self.strategy.state_dict(self.optimizer))

    def template(
        self,
        saved: Mapping[str, ValueKind],
        *,
        absent: Collection[str] = (),
        made: Collection[str] = (),
    ) -> dict[str, Any]:
        """What `load` takes, of the shape that was saved and to be filled; see
        `Strategy.template`.
        """
        strategy = self.strategy
        return self._complete(strategy.template(saved, self.optimizer, absent=absent, made=made))

    def load(
        self,
        tensors: dict[str, Any],
        *,
        absent: Collection[str] = (),
        made: Collection[str] = (),
    ) -> None:
        """Load a template that was filled. Raises `StateMismatchError`."""
        self.strategy.load_state_dict(tensors, self.optimizer, absent=absent, made=made)
        for name, value in tensors.get("average", {}).items():
            if value is not self.ema.tensors[name]:
                to_local(self.ema.tensors[name]).copy_(to_local(value))
        if self.scheduler is not None and tensors["scheduler"][0] is not None:
            check_saved_scheduler(self.scheduler, tensors["scheduler"])
            self.scheduler.load_state_dict(tensors["scheduler"][0])

    def remove_made(self, saved: set[str]) -> set[str]:
        """See `Buffers.remove_made`."""
        own: Any = self.extras.get("buffers")
        return set() if own is None else own.remove_made(saved)

    def _complete(self, tensors: dict[str, Any]) -> dict[str, Any]:
        if self.ema.tensors:
            tensors["average"] = dict(self.ema.tensors)  # a receiver puts others in their place
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        # a tuple is stored whole: its keys need not be strings
        tensors["scheduler"] = (scheduler, describe_scheduler(self.scheduler))
        return tensors
