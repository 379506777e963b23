"""`TrainContext`: everything that the training loop of one rank works with, built once before the
first step. `KeptState` is what a rank keeps of it when it leaves its worker group, and `Handover`
how the next group continues with that.

What a job does not ask for is an object that does nothing (an `Ema` of no weights, ...), so that
the loop calls every part without asking whether it exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from kdist_trainer.checkpoint.writer import CarriedSave
from kdist_trainer.config import Training
from kdist_trainer.data.loader import Batch, Loader
from kdist_trainer.distributed.world import World
from kdist_trainer.instrumentation.device_stats import DeviceStats
from kdist_trainer.instrumentation.step_timer import BandwidthProbe, CollectiveTimer, StepTimer
from kdist_trainer.metrics.rank_metrics import StepStats
from kdist_trainer.metrics.transport import Reporter
from kdist_trainer.numerics.precision import Precision
from kdist_trainer.parallel.base import Strategy
from kdist_trainer.parallel.buffers import Buffers
from kdist_trainer.parallel.ddp import Buckets
from kdist_trainer.processes.liveness import Heartbeat, NullHeartbeat
from kdist_trainer.stream import Stream
from kdist_trainer.training.checkpointing import TrainerCheckpointing
from kdist_trainer.training.evaluation import EarlyStopping
from kdist_trainer.training.forward_backward import ForwardBackward, LossScale
from kdist_trainer.training.gradient_guard import GradientGuard
from kdist_trainer.training.optimizer import Ema
from kdist_trainer.training.pretrained import Pretrained
from kdist_trainer.training.step_log import StepLog
from kdist_trainer.training.sync import StepRecord, StopFlag, SyncExchange
from kdist_trainer.training.training_state import TrainingState, TrainState
from kdist_trainer.workload import Samples, Workload


class UnrecordedStep(NamedTuple):
    """A finished step whose loss is not in the ledger yet."""

    record: StepRecord
    part: float
    """This rank's part of the loss."""
    loss: float | None
    """The mean loss of all ranks, if this rank had received it."""


class WarmUp(NamedTuple):
    """What a group's warm-up has shown, by which the next group does without one."""

    buckets: Buckets
    """DDP's buckets, which it lays again after its first backward pass."""
    buffers: dict[str, Any]
    """What training changes besides weights."""
    has_numpy: bool
    """Whether the loss may draw from NumPy's generator."""
    has_python: bool
    """The same for Python's."""
    flops_per_sample: float


class FormerRank(NamedTuple):
    """What a rank tells the others about the losses of its former group."""

    rank: int
    size: int
    """The number of ranks of that group."""
    generation: int
    step: int
    """The step whose state the rank has kept."""
    unrecorded: Sequence[UnrecordedStep]


class Position(NamedTuple):
    """How far a training has come; the greater one is ahead."""

    step: int
    evaluated: int
    """The step of the last evaluation."""
    generation: int
    """The worker group that trained it: another group may have computed the same step in other
    bits.
    """


@dataclass(kw_only=True)
class KeptState:
    """The state of a training after a finished step, without anything that belongs to a group.

    Attributes:
        module: The model, not wrapped.
        precision: The arithmetic, with its loss scaler.
        ema: The moving average of the weights.
        training: Optimizer, scheduler and position; of the former group otherwise.
        samples: The training split: a workload may open it with generators that its model has drawn
            from before.
        guard: The gradient guard.
        early_stopping: The evaluations so far.
        target: The last step of the run.
        rank: This rank in the former group.
        size: The number of ranks of the former group.
        generation: The former group.
        unrecorded: The finished steps whose losses are not in the ledger.
        lines: The lines of the step ledger since the last commit.
        warm_up: What the warm-up has shown; None if the next group needs one of its own.
        moved: Names of what seemed constant and has changed: of this the last finished step's value
            is not known, so that the newest checkpoint is restored.
        clock: How much training no checkpoint holds; see `SaveClock.to_json`.
        is_due: Whether the state is to be saved by that clock.
        best_at: The step of the best evaluation, -1 for none.
        committed: The step of the newest checkpoint that the rank knows of, -1 for none.
        carried: The save that this rank writes alone.
    """

    module: nn.Module
    precision: Precision
    ema: Ema
    training: TrainingState
    samples: Samples | Stream
    guard: GradientGuard
    early_stopping: EarlyStopping
    target: int
    rank: int
    size: int
    generation: int
    unrecorded: Sequence[UnrecordedStep] = ()
    lines: list[dict[str, Any]] = field(default_factory=list)
    warm_up: WarmUp | None = None
    moved: Sequence[str] = ()
    clock: dict[str, Any] = field(default_factory=dict)
    is_due: bool = False
    best_at: int = -1
    committed: int = -1
    carried: CarriedSave | None = None

    @property
    def state(self) -> TrainState:
        """The position of the training, and its small states."""
        return self.training.state

    @property
    def position(self) -> Position:
        """How far the training has come, and in which group."""
        return Position(self.state.step, self.state.evaluated, self.generation)


class Handover(NamedTuple):
    """How the ranks of a new group come by the state of the former one.

    Attributes:
        source: The rank that has the newest state; None if no rank has any.
        complete: Whether every rank has it already.
        is_current: Whether this rank has it already.
        holders: How many ranks have it already.
        generation: The former group.
        leader_kept: Whether rank 0 was rank 0 of the former group too, so that the ledger is whole.
        kept: What this rank has kept of the training; None once it is in use again.
        warm_up: What the warm-up of a former group has shown; None if this one needs its own.
        moved: Names of what seemed constant on a rank and has changed (see `KeptState`).
        carried: Names of the folders of saves that ranks write alone.
    """

    source: int | None = None
    complete: bool = False
    is_current: bool = False
    holders: int = 0
    generation: int = 0
    leader_kept: bool = False
    kept: KeptState | None = None
    warm_up: WarmUp | None = None
    moved: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()


class TensorBoard:
    """The curves that rank 0 writes: `TensorBoardWriter` of `kdist_trainer.tensorboard`, or none
    here, if they are not wanted or that package is missing.
    """

    def begin(self, step: int) -> None:
        """Begin a curve that continues after `step`."""

    def add_step(self, step: int, *, samples: int, seconds: float, loss: float) -> None:
        """Add a step with its samples and mean loss over all ranks."""

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add what an evaluation after `step` has measured."""

    def close(self) -> None:
        """End the curve."""


class StepProfiler:
    """Records steps when asked to: `Profiler` of `kdist_trainer.profiling`, or none here, if that
    package is missing.
    """

    def is_requested(self) -> bool:
        """Whether this rank's agent has received a request since the last profile."""
        return False

    def start(self, target: int) -> None:
        """Record from the next step to at most step `target`."""

    def after_step(self) -> None:
        """Advance the recording, if there is one."""

    def cancel(self) -> None:
        """Discard the recording in progress, if there is one."""


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
    lr_scheduler: LRScheduler | None
    """Sets the learning rates; None if they stay as the optimizer was built with."""
    ema: Ema
    guard: GradientGuard
    early_stopping: EarlyStopping

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
    pretrained: Pretrained | None
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
    tensorboard: TensorBoard
    profiler: StepProfiler
    progress_logged_at: float = 0.0
    """When the last `progress` event was logged, on the monotonic clock."""
