"""Undocumented parts of torch's distributed checkpoint (DCP) that kdist uses, in one place.

They flatten a nested state, copy tensors to the CPU and name the records of DCP's index. A release
of torch may change them: `tests/trainer/checkpoint/test_torch_internals.py` compares each with the
installed torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.distributed._state_dict_utils import _copy_state_dict as copy_to_cpu
from torch.distributed._state_dict_utils import _create_cpu_state_dict as allocate_on_cpu
from torch.distributed.checkpoint._traverse import set_element as set_value
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties
from torch.serialization import _get_layout as find_layout

from kdist_trainer.checkpoint.manifest import UnloadableStateError

MemoryFormatEncoding = _MEM_FORMAT_ENCODING
"""How the index spells `torch.memory_format`."""

KeyPath = tuple[str | int, ...]
"""Keys and indices that lead to a value of a nested state."""

_RECORDS = "torch.distributed.checkpoint.metadata"
INDEX_GLOBALS = {
    (_RECORDS, "Metadata"),
    (_RECORDS, "MetadataIndex"),
    (_RECORDS, "StorageMeta"),
    (_RECORDS, "TensorProperties"),
    (_RECORDS, "TensorStorageMetadata"),
    (_RECORDS, "ChunkStorageMetadata"),
    (_RECORDS, "BytesStorageMetadata"),
    (_RECORDS, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # finds a layout by its name
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}
"""Module and name of every global that DCP's pickled index refers to."""


def flatten(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """Flatten a nested state as DCP does; but a dict whose keys are not all texts stays whole,
    since DCP would make texts of them. Returns the values by flat name, such as `model.fc.weight`,
    and the path of each. Raises `UnloadableStateError` if two values have the same flat name.
    """
    flat: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}

    def visit(path: KeyPath, value: Any) -> None:
        if isinstance(value, Mapping) and _has_texts(value):
            for key, one in value.items():
                visit((*path, key), one)
        elif isinstance(value, list) and not _is_whole(value):
            for number, one in enumerate(value):
                visit((*path, number), one)
        else:
            name = ".".join(map(str, path))
            if name in flat:
                raise UnloadableStateError(
                    f"two values of the state are called {name}, {paths[name]} and {path}: a "
                    "checkpoint cannot tell them apart; use keys without a dot"
                )
            flat[name], paths[name] = value, path

    for key, value in state.items():
        visit((key,), value)
    return flat, paths


def _has_texts(mapping: Mapping[Any, Any]) -> bool:
    return all(type(key) is str for key in mapping)


def _is_whole(values: list[Any]) -> bool:
    """Whether a list is one value: it contains neither tensors nor what is flattened."""
    return not any(
        isinstance(one, Tensor)
        or (isinstance(one, Mapping) and _has_texts(one))
        or (isinstance(one, list) and not _is_whole(one))
        for one in values
    )


def set_properties(properties: TensorProperties, state: tuple[Any, ...]) -> None:
    """Give a record of the index its pickled state.

    torch 2.15 appends a field (the strides), which an older torch would refuse; none is needed to
    load a tensor in place.
    """
    properties.__setstate__(state[: len(fields(TensorProperties))])  # type: ignore[no-untyped-call]
