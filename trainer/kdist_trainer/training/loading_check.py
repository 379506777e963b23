"""Proves that a new process could load the present state: before its first checkpoint counts, and
as soon as there is a first step.

Two things are compared. What this process had when it could have restored, so after its warm-up, is
noted by name, kind, shape and type: a new process will have the same. And where each rank holds the
whole model and it is small enough, a model, an optimizer and a scheduler are made as a new process
makes them, and the state is loaded into them: that also meets what raises only when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.nn.parameter import is_lazy

from kdist_trainer.checkpoint.loadable import Description, LoadableCheck, fill
from kdist_trainer.errors import find_place
from kdist_trainer.parallel.ddp import Replicated
from kdist_trainer.state import (
    StateMismatchError,
    absent_buffers,
    describe,
    find_differences,
)

if TYPE_CHECKING:
    from kdist_trainer.training.training_state import TrainingState

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
        """Note what this process has, which is what a new one will have.

        Args:
            training: The training, new or kept from a former group.
            is_restoring: Whether it is about to restore, after its warm-up; that counts, and only
                for the first time.
        """
        if self._noted is None or (is_restoring and not self._noted.was_restoring):
            self._noted = _note(training, was_restoring=is_restoring)
        self.check.prove = lambda state, _: self._find_problems(training, state)

    def _find_problems(self, training: TrainingState, state: Mapping[str, Any]) -> Sequence[str]:
        """Why a new process could not load a state; empty if it could."""
        buffers = training.extras["buffers"].state_dict()
        absent, made = buffers.get("absent", ()), buffers.get("made", ())
        problems = self._compare(state, absent, made)
        if problems or self.build is None or not _can_be_built(training, state):
            return problems
        with self.build() as fresh:
            if fresh is None or _shares_memory(fresh, state):
                return ()
            if any(map(is_lazy, fresh.module.parameters())):
                return ()
            return _load(fresh, state, absent=absent, made=made)

    def _compare(
        self, state: Mapping[str, Any], absent: Collection[str], made: Collection[str]
    ) -> list[str]:
        """Compare a state with what is noted."""
        noted = self._noted
        if noted is None:
            return []
        saved = describe({key: state[key] for key in ("model", "optimizer")})
        own = dict(noted.described)
        for name in list(own):
            may_be_absent = name.removeprefix(_MODEL) in absent or "_extra_state" in name
            if name.startswith(_MODEL) and name not in saved and may_be_absent:
                del own[name]
        known = frozenset[str]().union(*noted.parameters)
        for name, kind in saved.items():
            plain = name.removeprefix(_MODEL)
            if name.startswith(_STATE):
                if _is_of(name.removeprefix(_STATE), known):
                    own[name] = kind
            elif plain in made or plain in noted.absent or "_extra_state" in plain:
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


def _note(training: TrainingState, *, was_restoring: bool) -> _Noted:
    state = training.strategy.state_dict(training.optimizer)
    groups = state["optimizer"]["param_groups"]
    state["optimizer"]["state"] = {}
    return _Noted(
        describe(state),
        frozenset(absent_buffers(training.module)),
        tuple(frozenset(one["params"]) for one in groups),
        was_restoring,
    )


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


def _can_be_built(training: TrainingState, state: Mapping[str, Any]) -> bool:
    """Whether a second model may be built on this rank, which commits the checkpoints."""
    if not isinstance(training.strategy, Replicated) or not training.world.is_rank_zero:
        return False
    held = [value for value in state["model"].values() if isinstance(value, Tensor)]
    return sum(value.nbytes for value in held) <= MOST_BYTES


def _shares_memory(fresh: TrainingState, state: Mapping[str, Any]) -> bool:
    """Whether a model is the one that is trained, since the workload keeps it."""
    own = {value.data_ptr() for value in state["model"].values() if isinstance(value, Tensor)}
    return any(value.data_ptr() in own and value.numel() for value in fresh.module.parameters())


def _load(
    fresh: TrainingState,
    state: Mapping[str, Any],
    *,
    absent: Collection[str],
    made: Collection[str],
) -> Sequence[str]:
    """Load a state as a new process does; returns what is wrong."""
    saved = describe(state)
    try:
        template = fresh.template(saved, absent=absent, made=made)
        problems = fill(template, state)
        if not problems:
            fresh.load(template, absent=absent, made=made)
    except StateMismatchError:
        return ()  # decided by what was noted, after the warm-up
    except Exception as error:  # noqa: BLE001 - of the user's own load_state_dict, set_extra_state …
        place = find_place(error)
        return [
            f"loading it raises {type(error).__name__}: {error}{f' ({place})' if place else ''}"
        ]
    return ()
