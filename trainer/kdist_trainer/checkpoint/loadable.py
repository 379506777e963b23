"""Proves that a new process could load what is saved, before the first checkpoint of a run, or of a
new shape of its state, is acknowledged.

In memory, what a new process would have is built by whoever trains, and the state is loaded into it
(`prove`). On the disk, every name, kind, shape and type is compared with what was to be saved, and
what is no tensor is read as a new process would.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kdist_trainer.checkpoint import reader, torch_internals
from kdist_trainer.checkpoint.manifest import DamagedCheckpointError, Manifest
from kdist_trainer.checkpoint.state_json import UnloadableStateError
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.checkpoint.target import describe_index
from kdist_trainer.checkpoint.values import copy_value, read_value
from kdist_trainer.state import ValueKind, find_differences, kind_of

Description = dict[str, ValueKind]
"""What every value of a state is, by flat name; values that are no tensors are all alike."""
Proof = Callable[[Mapping[str, Any], Description], Sequence[str]]
"""Loads a nested state into what a new process would have; returns what is wrong, with its path.
It may take as long as a start.
"""

_VALUE = ValueKind("value")
_MOST_SHOWN = 5


def describe_saved(state: Mapping[str, Any]) -> Description:
    """What a checkpoint of a nested state must have."""
    flat, _ = torch_internals.flatten(state)
    return {
        name: kind_of(value) if isinstance(value, Tensor) else _VALUE
        for name, value in flat.items()
    }


class LoadableCheck:
    """Has each shape of the state proven once, on this rank."""

    def __init__(self) -> None:
        self.prove: Proof | None = None
        self._proven: dict[str, Any] | None = None
        """The shape that is known to be loadable."""
        self._is_read_back = False
        """Whether a checkpoint of it was read back from the disk."""

    def check(self, state: Mapping[str, Any]) -> Description | None:
        """Prove that a new process can load a state, unless one of the same shape is proven.

        Returns:
            What must be compared with what is on the disk; None if that was done before.

        Raises:
            UnloadableStateError: a new process could not load it.
        """
        shape = _shape_of(state)
        if shape != self._proven:
            described = describe_saved(state)
            problems = self.prove(state, described) if self.prove is not None else ()
            if problems:
                raise UnloadableStateError(
                    "a new process could not load this state, so that no checkpoint of it would "
                    f"count: {_shorten(problems)}. What training adds must be there before a state "
                    "is loaded (made by model() and optimizer(), or before resume() in a script), "
                    "or be left out of state_dict()"
                )
            self._proven, self._is_read_back = shape, False
        return None if self._is_read_back else describe_saved(state)

    def confirm(self) -> None:
        """Note that a checkpoint of the present shape was read back, or loaded."""
        self._is_read_back = True

    def accept(self, state: Mapping[str, Any]) -> None:
        """Note that this state was loaded from a checkpoint."""
        self.accept_received(state)
        self.confirm()

    def accept_received(self, state: Mapping[str, Any]) -> None:
        """Note that this process has loaded this state from another rank's memory. No checkpoint of
        it need have been read.
        """
        self._proven = _shape_of(state)


def _shape_of(state: Mapping[str, Any]) -> dict[str, Any]:
    flat, _ = torch_internals.flatten(state)
    return {
        name: (value.shape, value.dtype) if isinstance(value, Tensor) else type(value)
        for name, value in flat.items()
    }


def check_saved(
    folder: StoragePath, manifest: Manifest, described: Sequence[Description | None]
) -> None:
    """Read a checkpoint back that is written and not yet committed.

    Args:
        folder: of its files.
        manifest: has the digests of its files.
        described: by rank, what must be there; None from a rank that has it proven.

    Raises:
        UnloadableStateError: it is not what a new process would ask for.
        OSError: the disk failed.
    """
    demanded = {name: kind for one in described if one is not None for name, kind in one.items()}
    try:
        index = reader.read_index(folder, manifest)
        saved = describe_index(index)
        if any(one is None for one in described):
            saved = {name: kind for name, kind in saved.items() if name in demanded}
        problems = find_differences(demanded, saved)
        if problems:
            raise UnloadableStateError(
                f"what was written is not what a new process asks for: {_shorten(problems)}"
            )
        reader.read_values(folder, manifest, index)
    except DamagedCheckpointError as error:
        raise UnloadableStateError(f"what was written cannot be read back: {error}") from None


def round_trip(value: Any, path: str) -> Any:
    """A value as a new process would read it. Raises `UnloadableStateError`."""
    stream = io.BytesIO()
    try:
        torch.save(copy_value(value, path), stream)
        stream.seek(0)
        return read_value(stream)
    except UnloadableStateError:
        raise
    except Exception as error:
        # what torch cannot write or read, whatever it raises
        raise UnloadableStateError(
            f"{path} cannot be read back: {type(error).__name__}: {error}"
        ) from error


def fill(template: dict[str, Any], state: Mapping[str, Any]) -> list[str]:
    """Fill a template with the values of a nested state, as a checkpoint would.

    Returns:
        What the template lacks or has besides, with its path; nothing is filled then.
    """
    flat, _ = torch_internals.flatten(state)
    own, paths = torch_internals.flatten(template)
    problems = [
        *(f"{name} is missing" for name in own if name not in flat),
        *(f"{name} is not in the model" for name in flat if name not in own),
    ]
    for name in own.keys() & flat.keys():
        ours, theirs = own[name], flat[name]
        if isinstance(ours, Tensor) != isinstance(theirs, Tensor):
            problems.append(f"{name} is of another kind")
        elif isinstance(ours, Tensor) and ours.shape != theirs.shape:
            problems.append(f"{name} is {tuple(theirs.shape)} instead of {tuple(ours.shape)}")
    if problems:
        return problems
    with torch.no_grad():
        for name, value in flat.items():
            if isinstance(value, Tensor):
                if not value.is_meta and not own[name].is_meta:
                    own[name].copy_(value)
            else:
                torch_internals.set_value(template, paths[name], round_trip(value, name))
    return []


def _shorten(problems: Sequence[str]) -> str:
    rest = len(problems) - _MOST_SHOWN
    return "; ".join(problems[:_MOST_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")
