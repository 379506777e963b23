"""All that one rank's loop works with, made once before the first step: so that a step only steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from kdist_trainer.config import Training
from kdist_trainer.data.loader import Batch, Steps
from kdist_trainer.parallel.base import Strategy
from kdist_trainer.precision import Precision
from kdist_trainer.signals import Exchange, StopFlag
from kdist_trainer.state import TrainState
from kdist_trainer.stats import StepStats
from kdist_trainer.timing import Laps
from kdist_trainer.workload import Samples, Workload
from kdist_trainer.world import World


@dataclass(kw_only=True)
class Run:
    """One rank of a training."""

    settings: Training
    world: World
    workload: Workload
    samples: Samples
    strategy: Strategy
    model: nn.Module
    """The wrapped model: calling it trains."""
    optimizer: Optimizer
    move_rate: Callable[[], Any]
    """Moves the learning rate after a step."""
    precision: Precision
    set_generators: Callable[[int], None]
    state: TrainState
    steps: Steps
    target: int
    """The run's last step."""
    batches: Iterator[Batch]
    exchange: Exchange
    flag: StopFlag
    stats: StepStats
    laps: Laps
    losses: list[Tensor] = field(default_factory=list)
    """This rank's share of the loss of each step since the last exchange, still on the device."""
    boundary: int = 0
    """The next step after which ranks exchange their losses and flags."""
