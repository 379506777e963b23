"""The numbers that a script gives its optimizers and schedulers: lr, weight decay, T_max. A resume
takes the saved ones, so an edit of the script has no effect, and is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

from kdist_trainer.checkpoint.script_objects import Keeper, ScriptObjects
from kdist_trainer.checkpoint.state_json import UnloadableStateError, encode
from kdist_trainer.errors import CheckpointMismatchError

_MOST_SHOWN: Final = 8
_PROGRESS: Final = frozenset(
    {
        "last_epoch",
        "_step_count",
        "_last_lr",
        "_is_initial",
        "_get_lr_called_within_step",
        "_initial_step",
    }
)
"""What of a scheduler's state counts, and is no setting."""


def read_settings(objects: ScriptObjects) -> dict[str, Any]:
    """The settings by their path, such as `optimizer.param_groups[0].lr`, as JSON. Read before the
    training has begun.
    """
    found: dict[str, Any] = {}
    for path, value in _walk(objects):
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        try:
            found[path] = encode(value, path)[0]
        except UnloadableStateError:
            continue  # a function, for example, which nobody can compare
    return found


def find_edits(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """What differs between the settings of the script now and of the script that began the
    training, as sentences.
    """
    edits = [
        f"{path} was {saved[path]} and is {value} in the script"
        for path, value in own.items()
        if path in saved and saved[path] != value
    ]
    more = len(edits) - _MOST_SHOWN
    return [*edits[:_MOST_SHOWN], *([f"and {more} more"] if more > 0 else [])]


def name_classes(objects: ScriptObjects) -> dict[str, str]:
    """The class of each object, by `optimizer` or `optimizer.NAME`."""
    every: dict[str, Mapping[str, Any]] = {"optimizer": objects.optimizers, **objects.keepers}
    return {
        f"{kind}.{name}".rstrip("."): type(one).__name__
        for kind, named in every.items()
        for name, one in named.items()
    }


def check_classes(saved: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Raise `CheckpointMismatchError` if an object is of another class than the saved one."""
    problems = [
        f"{name} was {saved[name]} and is {kind}"
        for name, kind in own.items()
        if name in saved and saved[name] != kind
    ]
    if problems:
        raise CheckpointMismatchError(
            f"the checkpoint is of other classes: {'; '.join(problems)}. Use the same, or start "
            "again with --fresh"
        )


def _walk(objects: ScriptObjects) -> Iterator[tuple[str, Any]]:
    for name, optimizer in objects.optimizers.items():
        yield from _of_optimizer(f"optimizer.{name}".rstrip("."), optimizer)
    for kind, keepers in objects.keepers.items():
        for name, keeper in keepers.items():
            yield from _of_keeper(f"{kind}.{name}".rstrip("."), keeper)


def _of_optimizer(path: str, optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                yield f"{path}.param_groups[{number}].{key}", value


def _of_keeper(path: str, keeper: Keeper) -> Iterator[tuple[str, Any]]:
    for key, value in keeper.state_dict().items():
        if key not in _PROGRESS:
            yield f"{path}.{key}", value
