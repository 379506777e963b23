"""What a rank keeps of its training when it leaves its worker group, to continue with it in the
next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from kdist_trainer.checkpoint.carried_save import CarriedSave
from kdist_trainer.parallel.ddp import Buckets
from kdist_trainer.precision import Precision
from kdist_trainer.stream import Stream
from kdist_trainer.training.early_stopping import EarlyStopping, NullEarlyStopping
from kdist_trainer.training.ema import Ema, NullEma
from kdist_trainer.training.gradient_guard import GradientGuard, NullGradientGuard
from kdist_trainer.training.sync import StepRecord
from kdist_trainer.training.training_state import TrainingState, TrainState
from kdist_trainer.workload import Samples


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
        committed: The step of the newest checkpoint that the rank knows of, -1 for none.
        carried: The save that this rank writes alone.
    """

    module: nn.Module
    precision: Precision
    ema: Ema | NullEma
    training: TrainingState
    samples: Samples | Stream
    guard: GradientGuard | NullGradientGuard
    early_stopping: EarlyStopping | NullEarlyStopping
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
