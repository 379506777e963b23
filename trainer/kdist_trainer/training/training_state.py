"""The state of a training at a step: `TrainState`, its position, and `TrainingState`, all that a
checkpoint of it holds.

`LoadingCheck` proves that a new process could load the state, before its first checkpoint counts
and as soon as there is a first step. It compares two things. What this process had when it could
have restored, after its warm-up, is recorded by name, kind, shape and type: a new process will have
the same. And where each rank holds the whole model and it is small enough, a model, an optimizer
and a scheduler are made as a new process makes them, and the state is loaded into them: that also
meets what raises only when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from kdist_trainer.checkpoint.writer import Description, LoadableCheck, fill
from kdist_trainer.config import Training
from kdist_trainer.distributed.world import World, to_local
from kdist_trainer.errors import find_place
from kdist_trainer.parallel.base import Strategy
from kdist_trainer.parallel.ddp import Replicated
from kdist_trainer.state import (
    AS_NEW,
    BufferNames,
    StateMismatchError,
    ValueKind,
    absent_buffers,
    describe,
    find_differences,
)
from kdist_trainer.training.optimizer import Ema
from kdist_trainer.training.workload_checks import check_saved_scheduler, describe_scheduler

MOST_BYTES: Final = 1 << 30
"""Size of a state above which no second model is built."""
_MODEL: Final = "model."
_STATE: Final = "optimizer.state."


@dataclass(frozen=True)
class _Noted:
    """What a new process has."""

    described: Description
    absent: frozenset[str]
    """Names of the buffers that are None."""
    parameters: tuple[frozenset[str], ...]
    """Names of the parameters of each of the optimizer's groups."""
    was_restoring: bool


class LoadingCheck:
    """Knows what a new process has. One for each model of this process: a rank that continues in
    place keeps it.
    """

    def __init__(self) -> None:
        self.check = LoadableCheck()
        self.build: Callable[[], AbstractContextManager[TrainingState | None]] | None = None
        """Makes what a new process has, within a `with` block that leaves no trace."""
        self._noted: _Noted | None = None

    def observe(self, training: TrainingState, *, is_restoring: bool) -> None:
        """Note what this process has, which is what a new one will have. What counts is what it has
        when it is about to restore for the first time, after its warm-up.
        """
        if self._noted is None or (is_restoring and not self._noted.was_restoring):
            state = training.strategy.state_dict(training.optimizer)
            groups = state["optimizer"]["param_groups"]
            state["optimizer"]["state"] = {}
            self._noted = _Noted(
                describe(state),
                frozenset(absent_buffers(training.module)),
                tuple(frozenset(one["params"]) for one in groups),
                is_restoring,
            )
        self.check.prove = lambda state, _: self._find_problems(training, state)

    def _find_problems(self, training: TrainingState, state: Mapping[str, Any]) -> Sequence[str]:
        """Why a new process could not load a state; empty if it could."""
        changes = training.extras["buffers"].state_dict()
        buffers = BufferNames(changes.get("absent", ()), changes.get("made", ()))
        problems = self._compare(state, buffers)
        # a second model is built on the rank that commits the checkpoints, if it has the memory
        if not isinstance(training.strategy, Replicated) or not training.world.is_rank_zero:
            return problems
        held = [value for value in state["model"].values() if isinstance(value, Tensor)]
        if problems or self.build is None or sum(value.nbytes for value in held) > MOST_BYTES:
            return problems
        with self.build() as fresh:
            if fresh is None:
                return ()
            own, weights = {value.data_ptr() for value in held}, list(fresh.module.parameters())
            # where a workload keeps its model, the second one is the one that is trained
            if any(one.data_ptr() in own and one.numel() for one in weights) or any(
                map(is_lazy, weights)
            ):
                return ()
            return _load(fresh, state, buffers=buffers)

    def _compare(self, state: Mapping[str, Any], buffers: BufferNames) -> list[str]:
        """Compare a state with what is noted."""
        noted = self._noted
        if noted is None:
            return []
        saved = describe({key: state[key] for key in ("model", "optimizer")})
        own = dict(noted.described)
        for name in list(own):
            may_be_absent = name.removeprefix(_MODEL) in buffers.absent or "_extra_state" in name
            if name.startswith(_MODEL) and name not in saved and may_be_absent:
                del own[name]
        known = frozenset[str]().union(*noted.parameters)
        for name, kind in saved.items():
            plain = name.removeprefix(_MODEL)
            if name.startswith(_STATE):
                if _is_of(name.removeprefix(_STATE), known):
                    own[name] = kind
            elif plain in buffers.made or plain in noted.absent or "_extra_state" in plain:
                own[name] = kind
            elif name.startswith("optimizer.param_groups.") and name not in own:
                own[name] = kind  # a number that a group got later is loaded with it
        groups = tuple(frozenset(one["params"]) for one in state["optimizer"]["param_groups"])
        problems = find_differences(own, saved)
        if groups != noted.parameters:
            problems.append(
                "optimizer.param_groups have other parameters than a new optimizer has: "
                f"{_show_groups(noted.parameters, groups)}"
            )
        return problems


def _is_of(name: str, parameters: Collection[str]) -> bool:
    """Whether a value of the optimizer's state is of one of these parameters, or the optimizer's
    own.
    """
    while name:
        if name in parameters or name.startswith("("):
            return True
        name = name.rpartition(".")[0]
    return False


def _show_groups(noted: Sequence[Collection[str]], groups: Sequence[Collection[str]]) -> str:
    if len(noted) != len(groups):
        return f"{len(groups)} groups instead of {len(noted)}"
    for number, (own, other) in enumerate(zip(noted, groups, strict=True)):
        for name in sorted({*own} ^ {*other}):
            return f"{name} is {'missing in' if name in own else 'new in'} group {number}"
    return ""


def _load(fresh: TrainingState, state: Mapping[str, Any], *, buffers: BufferNames) -> Sequence[str]:
    """Load a state as a new process does; returns what is wrong."""
    saved = describe(state)
    try:
        template = fresh.template(saved, buffers=buffers)
        problems = fill(template, state)
        if not problems:
            fresh.load(template, buffers=buffers)
    except StateMismatchError:
        return ()  # decided by what was noted, after the warm-up
    except Exception as error:  # noqa: BLE001 - of the user's own load_state_dict, set_extra_state …
        place = find_place(error)
        return [
            f"loading it raises {type(error).__name__}: {error}{f' ({place})' if place else ''}"
        ]
    return ()


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
    ema: Ema
    extras: Mapping[str, Stateful]
    """Small states that are stored as JSON, such as the loss scaler's, by name."""
    state: TrainState
    loading: LoadingCheck = field(default_factory=LoadingCheck)
    """Proves that a new process could load the state; kept as long as the model."""

    def tensors(self) -> dict[str, Any]:
        """All tensors by their full names, and the scheduler's state."""
        return self._complete(self.strategy.state_dict(self.optimizer))

    def template(
        self, saved: Mapping[str, ValueKind], *, buffers: BufferNames = AS_NEW
    ) -> dict[str, Any]:
        """What `load` takes, of the shape that was saved and to be filled; see
        `Strategy.template`.
        """
        strategy = self.strategy
        return self._complete(strategy.template(saved, self.optimizer, buffers=buffers))

    def load(self, tensors: dict[str, Any], *, buffers: BufferNames = AS_NEW) -> None:
        """Load a template that was filled. Raises `StateMismatchError`."""
        self.strategy.load_state_dict(tensors, self.optimizer, buffers=buffers)
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


def describe_environment(train: Training, world: World) -> str:
    """What must be the same, besides the world size, for bitwise identical results; `ddp` is the
    default and not named.
    """
    replicas = f" with {world.data_size} copies" if world.model_parallel > 1 else ""
    strategy = "" if train.strategy == "ddp" else f"{train.strategy}{replicas}, "
    device = (
        torch.cuda.get_device_name(world.device)
        if world.device.type == "cuda"
        else torch.backends.cpu.get_cpu_capability()
    )
    return f"{strategy}torch {torch.__version__}, {torch.get_num_threads()} threads, {device}"
