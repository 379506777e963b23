"""The state that a checkpoint is read into: given, or made from what the checkpoint has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from kdist_trainer.checkpoint import torch_internals
from kdist_trainer.checkpoint.reader import LoadedCheckpoint, SavedIndex
from kdist_trainer.state import ValueKind

Template = Callable[[LoadedCheckpoint, SavedIndex], dict[str, Any]]
"""Makes the nested state to fill: for each checkpoint that is tried, on every rank. Raises
`CheckpointMismatchError` if it cannot.
"""


def describe_index(index: SavedIndex) -> dict[str, ValueKind]:
    """What a checkpoint holds by flat name, as `state.template` takes it."""
    return {
        name: ValueKind(
            "tensor", list(entry.size), str(entry.properties.dtype).removeprefix("torch.")
        )
        if isinstance(entry, TensorStorageMetadata)
        else ValueKind("value")
        for name, entry in index.items()
    }


class Target:
    """A state to fill: nested as it was given, and flat."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state
        self.flat, self._paths = torch_internals.flatten(state)

    def put_values(self) -> None:
        """Put what is no tensor into the nested state; tensors are filled in place."""
        for name, value in self.flat.items():
            if not isinstance(value, Tensor):
                torch_internals.set_value(self._state, self._paths[name], value)
