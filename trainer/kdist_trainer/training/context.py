"""The training context: everything that the training loop of one rank works with, built once before
the first step.

What a job does not ask for is a null object (`NullEma`, `ConstantLr`, ...), so that the loop calls
every part without asking whether it is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import Optimizer

from kdist_trainer.config import Training
from kdist_trainer.data.loader import Batch, Loader
from kdist_trainer.instrumentation.device_stats import DeviceStats
from kdist_trainer.instrumentation.step_timer import BandwidthProbe, CollectiveTimer, StepTimer
from kdist_trainer.liveness import Heartbeat, NullHeartbeat
from kdist_trainer.metrics.reporter import Reporter
from kdist_trainer.metrics.step_stats import StepStats
from kdist_trainer.parallel.base import Strategy
from kdist_trainer.parallel.buffers import Buffers
from kdist_trainer.precision import Precision
from kdist_trainer.tensorboard import TensorBoardWriter
from kdist_trainer.training.checkpointing import TrainerCheckpointing
from kdist_trainer.training.early_stopping import EarlyStopping, NullEarlyStopping
from kdist_trainer.training.ema import Ema, NullEma
from kdist_trainer.training.forward_backward import ForwardBackward
from kdist_trainer.training.gradient_guard import GradientGuard, NullGradientGuard
from kdist_trainer.training.kept_state import Handover
from kdist_trainer.training.loss_scale import LossScale
from kdist_trainer.training.lr_scheduler import LrScheduler
from kdist_trainer.training.pretrained import NullPretrained, Pretrained
from kdist_trainer.training.profiler import Profiler
from kdist_trainer.training.step_log import StepLog
from kdist_trainer.training.sync import StepRecord, StopFlag, SyncExchange
from kdist_trainer.training.training_state import TrainState
from kdist_trainer.workload import Workload
from kdist_trainer.world import World


@dataclass(kw_only=True)
class TrainContext:
    """Everything that the training loop of one rank works with."""

    settings: Training
    world: World

    workload: Workload
    module: nn.Module
    """The model as the workload built it: what is evaluated and saved."""
    model: nn.Module
    """The same model, wrapped by the strategy: what is trained."""
    strategy: Strategy
    buffers: Buffers
    precision: Precision
    forward_backward: ForwardBackward
    loss_scale: LossScale
    optimizer: Optimizer
    lr_scheduler: LrScheduler
    ema: Ema | NullEma
    guard: GradientGuard | NullGradientGuard
    early_stopping: EarlyStopping | NullEarlyStopping

    loader: Loader
    evaluation_batch: int
    """Samples in a batch of the evaluation."""
    batches: Iterator[Batch] = field(default_factory=lambda: iter(()))
    """This rank's batch of each step, from the current step on."""

    state: TrainState
    target: int = 0
    """The last step of the run, once the position is known."""
    handover: Handover = field(default_factory=Handover)
    """How the ranks come by the former group's state."""
    continues_in_place: bool = False
    """Whether a rank of this group has brought its training from a former one, so that what it has
    in plain attributes is on no new rank.
    """
    compared_step: int = -1
    """The newest step after which the ranks have compared what they hold."""
    is_consistent: bool = False
    """Whether weights, optimizer and `state` belong together: not before they are restored."""
    stop_agreed: bool = False
    """Whether all ranks know that one was asked to stop."""
    profile_agreed: bool = False
    """Whether all ranks know that one has a profile request, and none has begun it."""
    first_step: int = 1
    """The first step of this worker group."""
    checkpointing: TrainerCheckpointing
    pretrained: Pretrained | NullPretrained
    step_log: StepLog

    stop_flag: StopFlag
    sync_exchange: SyncExchange
    sync_interval: int = 1
    """Steps between two synchronizations of the ranks; the first one follows the first step."""
    next_sync_step: int = 0
    """The next step after which the ranks synchronize."""
    losses: list[Tensor] = field(default_factory=list)
    """This rank's part of each step's mean loss (scalars) since the last synchronization, still on
    the device.
    """
    step_records: list[StepRecord] = field(default_factory=list)
    """Samples and seconds of the same steps."""
    grad_norm: Tensor | None = None
    """Norm of the last step's gradient (a scalar), if gradients are clipped or checked."""

    stats: StepStats
    device_stats: DeviceStats
    step_timer: StepTimer
    collective_timer: CollectiveTimer
    bandwidth_probe: BandwidthProbe
    reporter: Reporter
    heartbeat: Heartbeat | NullHeartbeat
    tensorboard: TensorBoardWriter
    profiler: Profiler
    progress_logged_at: float = 0.0
    """When the last `progress` event was logged, on the monotonic clock."""

    def next_evaluation_step(self, step: int) -> int | None:
        """The next step after `step` at which the model is evaluated during training; None if the
        run ends before.
        """
        every = self.settings.evaluate_every_steps
        following = None if every is None else (step // every + 1) * every
        return following if following is not None and following < self.target else None

    def evaluates_at(self, step: int) -> bool:
        """Whether the model is evaluated after `step` during training."""
        return self.next_evaluation_step(step - 1) == step
