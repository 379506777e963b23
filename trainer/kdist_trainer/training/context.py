"""The training context: everything that the training loop of one rank works with, built once before
the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from kdist_trainer.config import Training
from kdist_trainer.data.loader import Batch, Loader, MicroBatch
from kdist_trainer.instrumentation.device_stats import DeviceStats
from kdist_trainer.instrumentation.step_timer import BandwidthProbe, StepTimer, Timer
from kdist_trainer.liveness import Phase
from kdist_trainer.metrics.step_stats import StepStats
from kdist_trainer.parallel.base import Strategy
from kdist_trainer.parallel.buffers import Buffers
from kdist_trainer.precision import Admit, Precision
from kdist_trainer.tensorboard import TensorBoardWriter
from kdist_trainer.training.checkpointing import TrainerCheckpointing, TrainState
from kdist_trainer.training.early_stopping import EarlyStopping
from kdist_trainer.training.ema import Ema
from kdist_trainer.training.gradient_guard import GradientGuard
from kdist_trainer.training.pretrained import Pretrained
from kdist_trainer.training.sync import StepRecord, StopFlag, SyncExchange
from kdist_trainer.workload import LrSchedule, Workload
from kdist_trainer.world import World


@dataclass(kw_only=True)
class TrainContext:
    """Everything that the training loop of one rank works with."""

    settings: Training
    world: World
    workload: Workload
    module: nn.Module
    """The model as the workload made it: what is evaluated and saved."""
    model: nn.Module
    """The same, wrapped by the strategy: what is trained."""
    strategy: Strategy
    buffers: Buffers
    optimizer: Optimizer
    move_rate: Callable[[], object]
    """Moves the learning rate after a step."""
    curve: LrSchedule | None
    """What moves it, where job.yaml says how: any step can be gone on from."""
    precision: Precision
    set_generators: Callable[[int], object]
    learn: Callable[[TrainContext, Sequence[MicroBatch], float], Tensor]
    """Makes a step's forward and backward passes: leaves the gradients' mean, returns this rank's
    share of the loss.
    """
    weigh: Callable[[Batch], float]
    """What a step's losses are multiplied by: 1 / the count of the whole step, times the copies of
    the model.
    """
    loader: Loader
    evaluation_batch: int

    state: TrainState
    target: int
    """The run's last step."""
    saves: TrainerCheckpointing
    pretrained: Pretrained | None
    """Weights to begin with, where the job names some."""
    guard: GradientGuard | None
    """What judges each update, where the job asks for it."""
    averages: Ema | None
    patience: EarlyStopping | None

    flag: StopFlag
    exchange: SyncExchange
    stats: StepStats
    curves: TensorBoardWriter
    resources: DeviceStats
    laps: StepTimer
    timer: Timer
    probe: BandwidthProbe
    report: Callable[[], None]
    flush: Callable[[], None]
    beat: Callable[[Phase, int], None]

    batches: Iterator[Batch] = field(default_factory=lambda: iter(()))
    """This rank's part of each step, opened where the run goes on."""
    interval: int = 1
    """Steps between two conferences of the ranks; the first one follows the first step."""
    boundary: int = 0
    """The next step after which the ranks confer."""
    first_step: int = 1
    """The first step of this generation."""
    losses: list[Tensor] = field(default_factory=list)
    """This rank's share of each step's loss since the last sync point, still on the device."""
    records: list[StepRecord] = field(default_factory=list)
    """The same steps' samples and seconds."""
    norm: Tensor | None = None
    """Norm of the last step's gradient, where gradients are clipped."""
    admit: Admit | None = None
    """Asked with the gradient's norm before each update, where there is a guard."""
    must_go_back: bool = False
    """The step under way was refused, and the training goes back to its newest checkpoint."""
    inbox: Path | None = None
    """Where this rank's agent is asked for a profile."""
    traces: Path | None = None
    """The folder below which profiles are kept."""
    profiled_until: int = 0
    """The last step of the profile that was asked for last."""
    spoken_at: float = 0.0
    """When the last line of progress was logged, on the monotonic clock."""

    def after_update(self) -> None:
        """Update the moving average of the weights."""
        if self.averages is not None:
            self.averages.update()

    def evaluates_after(self, step: int) -> int | None:
        """The next step after `step` at which the model is evaluated during training, if there is
        one before the last.
        """
        every = self.settings.evaluate_every_steps
        following = None if every is None else (step // every + 1) * every
        return following if following is not None and following < self.target else None

    def evaluates_at(self, step: int) -> bool:
        """Whether the model is evaluated after `step` during training."""
        return self.evaluates_after(step - 1) == step
