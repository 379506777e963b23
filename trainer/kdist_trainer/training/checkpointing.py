"""The checkpoint contents of the training loop, and when they are saved and restored.

Besides model and optimizer a checkpoint holds the position in the training (`TrainState`) and small
states such as the loss scaler. `CheckpointManager` does the saving.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from kdist_trainer.checkpoint.checkpointer import CheckpointManager, SaveResult
from kdist_trainer.config import Change, Every
from kdist_trainer.metrics.step_stats import StepStats
from kdist_trainer.parallel.base import Strategy
from kdist_trainer.training.ema import Ema
from kdist_trainer.training.step_log import StepLog
from kdist_trainer.workload import take_over
from kdist_trainer.world import World, to_local


@dataclass
class TrainState:
    """The position of a training; `samples_seen` and `seed` determine the next samples."""

    seed: int
    fingerprint: str
    """Identity of the data set."""
    world_size: int
    environment: str
    """What besides the world size must be the same for equal bits: versions, threads, device."""
    step: int = 0
    samples_seen: int = 0
    evaluated: int = 0
    """The step after which the model was measured last, on the way."""
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

    def describe_writer(self) -> str:
        """The environment that writes this state: equal texts mean bitwise equal results."""
        return f"{self.world_size} rank{'s'[: self.world_size - 1]}, {self.environment}"


class Stateful(Protocol):
    """State that can be saved in a checkpoint and restored."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True)
class TrainingState:
    """The whole state of a training."""

    world: World
    strategy: Strategy
    module: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    averages: Ema | None
    extras: Mapping[str, Stateful]
    """What is small and kept as JSON: loss scaler and the like, by name."""
    state: TrainState

    def tensors(self) -> dict[str, Any]:
        """All tensors by their full names, and the scheduler's state."""
        tensors = self.strategy.tensors(self.optimizer)
        if self.averages is not None:
            tensors["average"] = self.averages.tensors
        moved = None if self.scheduler is None else self.scheduler.state_dict()
        tensors["scheduler"] = (moved,)  # a tuple is kept whole: its keys need not be texts
        return tensors


class TrainerCheckpointing:
    """Saves and restores the training's state. Every rank calls the same methods in
    the same order.
    """

    def __init__(
        self,
        store: CheckpointManager | None,
        parts: TrainingState,
        *,
        every: Every,
        diary: StepLog,
        stats: StepStats,
        judge: Callable[[Mapping[str, Any]], list[Change]] = lambda _: [],
    ) -> None:
        """Without a store (the job has no checkpoint folder) nothing is saved.

        `judge` returns what was edited since a checkpoint of a job was written, or raises
        `CheckpointMismatchError`.
        """
        self.store = store
        self.parts = parts
        self.diary = diary
        self.kept_step = -1
        """Step of the newest checkpoint that is committed."""
        self.changes: list[Change] = []
        """What was edited in the job since the checkpoint that was restored last."""
        self._counted_fallbacks = 0
        self._ask = judge
        self._asked = (
            [dict(group) for group in parts.optimizer.param_groups] if store is not None else []
        )
        self._every = every
        self._stats = stats
        self._begun_step = -1
        self._begun_at = time.monotonic()
        if store is not None:
            store.on_result = self._count

    def restore(self) -> TrainState | None:
        """Restore the newest checkpoint that verifies and return its state; None, with nothing
        changed, if there is none.
        """
        if self.store is None:
            return None
        parts = self.parts
        fresh = not parts.optimizer.state
        tensors = parts.tensors()
        found = self.store.load(tensors, fingerprint=parts.state.fingerprint, judge=self._judge)
        for one in self.store.fallbacks[self._counted_fallbacks :]:
            self._stats.add_fallback(one.cause)
        self._counted_fallbacks = len(self.store.fallbacks)
        if found is None:
            if fresh:
                # making `tensors` took a step there, if one that moves nothing
                parts.optimizer.state.clear()
            return None
        parts.strategy.put(tensors, parts.optimizer)
        if parts.scheduler is not None and tensors["scheduler"][0] is not None:
            parts.scheduler.load_state_dict(tensors["scheduler"][0])
        saved = TrainState.from_json(found)
        state = parts.state
        state.step, state.samples_seen, state.evaluated = (
            saved.step,
            saved.samples_seen,
            saved.evaluated,
        )
        edited = {change.field for change in self.changes}
        for name, part in parts.extras.items():
            # What the job asks for since then begins anew, and so do evaluations of another kind.
            if name in saved.extras and not (
                name == "early_stop" and any(field.startswith("earlyStop") for field in edited)
            ):
                part.load_state_dict(saved.extras[name])
        take_over(parts.optimizer, self._asked, edited, parts.scheduler)
        self._begun_step = self.kept_step = saved.step
        self._stats.add_checkpoint("restore")
        return saved

    def _judge(self, job: Mapping[str, Any]) -> None:
        self.changes = self._ask(job)

    def reopen(self) -> None:
        """Mark the run as continuing, even if it was completed before."""
        if self.store is not None:
            self.store.reopen()

    @property
    def resumed_from(self) -> str | None:
        """Name of the checkpoint that was resumed from."""
        resumed = self.store.resumed if self.store is not None else None
        return resumed.name if resumed is not None else None

    def due_after(self, step: int) -> int | None:
        """The next step after `step` that the save interval in steps selects."""
        every = self._every.steps
        return None if self.store is None or every is None else (step // every + 1) * every

    def due(self, step: int) -> bool:
        """Whether the save interval in steps selects `step`."""
        return self.due_after(step - 1) == step

    def due_by_clock(self) -> bool:
        """Whether the save interval in seconds has passed on this rank's clock; rank 0's clock
        decides.
        """
        seconds = self._every.seconds
        return (
            self.store is not None
            and seconds is not None
            and time.monotonic() - self._begun_at >= seconds
        )

    def save(self, *, required: bool = False, done: Mapping[str, Any] | None = None) -> None:
        """Save the current state; a failure is counted and training continues.

        `required`: the state is committed on return. `done`: this is the final state of the run,
        and the document that records it. Raises `StorageError` if one of them is given and a second
        attempt failed too.
        """
        if self.store is None:
            return
        parts, state = self.parts, self.parts.state
        if required and self._begun_step == state.step:
            self.store.wait()
            if self.kept_step == state.step:
                return
        self._begun_step, self._begun_at = state.step, time.monotonic()
        state.extras = {name: part.state_dict() for name, part in parts.extras.items()}
        self.diary.flush()
        self.store.save(
            parts.tensors(),
            state.to_json(),
            step=state.step,
            before_commit=self.diary.sync,
            required=required,
            final=None if done is None else dict(done),
        )

    def settle(self) -> None:
        """Wait for the save in progress; afterwards the saved checkpoints are the same on every
        rank.
        """
        if self.store is not None:
            self.store.wait()

    def poll(self) -> None:
        """Count a save that has completed meanwhile, and update the metric of the save interval."""
        if self.store is not None:
            self.store.poll()
            self._stats.checkpoint_interval = self.interval_seconds()

    def interval_seconds(self) -> float | None:
        """Time between two saves; None while the duration of a step is unknown."""
        seconds, steps, pace = self._every.seconds, self._every.steps, self._stats.step_ewma
        by_steps = None if steps is None or pace is None else steps * pace
        return min((each for each in (seconds, by_steps) if each is not None), default=None)

    def close(self) -> None:
        """Close the store; nothing more is saved."""
        if self.store is not None:
            self.store.close()

    def weights_are_finite(self) -> bool:
        """Whether no weight is NaN or infinite, so that the state is worth saving."""
        weights = [
            to_local(weight)
            for weight in self.parts.module.parameters()
            if weight.is_floating_point()
        ]
        filled = [weight for weight in weights if weight.numel()]
        # NaN wins over all
        largest = (
            [norm.float() for norm in torch._foreach_norm(filled, torch.inf)] if filled else []
        )
        own = not largest or bool(torch.isfinite(torch.stack(largest)).all())
        return all(self.parts.world.all_gather_object(own)) if self.parts.strategy.sharded else own

    def _count(self, result: SaveResult) -> None:
        self._stats.add_checkpoint(
            "save",
            cause=None if result.ok else result.cause,
            visible=result.visible_seconds,
            total=result.total_seconds,
            nbytes=result.nbytes,
            step=result.step,
        )
        if result.ok:
            self.kept_step = result.step
