"""Reads torch's checkpoint files without running code that is in them.

DCP keeps its index, `.metadata`, as a pickle and reads it with `pickle.load`, which runs whatever
the file says; its small values are pickles too and are read with `weights_only=False`. Here the
index may only refer to an allow-list of torch's plain record types, and is then checked against the
manifest: no path outside the checkpoint, no range outside a file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from kdist_trainer.allow_list import AllowList, UnsafePickleError
from kdist_trainer.checkpoint.manifest import DamagedCheckpointError
from kdist_trainer.checkpoint.torch_internals import (
    INDEX_GLOBALS,
    MemoryFormatEncoding,
    StorageInfo,
    find_layout,
    set_properties,
)
from kdist_trainer.digest import Digest

METADATA = ".metadata"
_SHOWN_CHARACTERS = 200

_RECORD_TYPES = (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
    ChunkStorageMetadata,
    BytesStorageMetadata,
    StorageInfo,
)


def _find_member(owner: Any, name: Any) -> Any:
    """`getattr` for members of one enumeration only: early releases of Python 3.11 pickle them as
    such a call.
    """
    members = MemoryFormatEncoding.__members__
    if owner is not MemoryFormatEncoding or type(name) is not str or name not in members:
        raise ValueError("it asks for an attribute of something else than an enumeration")
    return members[name]


def _find_layout(name: Any) -> Any:
    """Find a layout as torch does, but by text only: torch hashes what it gets."""
    if type(name) is not str:
        raise TypeError("it asks for a layout by something else than its name")
    return find_layout(name)  # type: ignore[no-untyped-call]


_INDEX = AllowList(
    source=METADATA,
    names={
        **{(module, name): getattr(import_module(module), name) for module, name in INDEX_GLOBALS},
        ("torch.serialization", "_get_layout"): _find_layout,
        ("builtins", "getattr"): _find_member,
    },
    records={kind: kind.__dataclass_fields__ for kind in _RECORD_TYPES},
    setters={TensorProperties: set_properties},
    keys={
        MetadataIndex: {
            "fqn": (str,),
            "offset": (torch.Size, type(None)),
            "index": (int, type(None)),
        }
    },
)


def read_metadata(data: bytes, files: Mapping[str, Digest]) -> Metadata:
    """Read DCP's index, without running anything that it refers to.

    Args:
        data: the content of `.metadata`.
        files: the manifest's files, which the index may refer to.

    Raises:
        DamagedCheckpointError: it is no index, or one of other files.
    """
    try:
        metadata = _INDEX.read(data)
    except UnsafePickleError as error:
        raise DamagedCheckpointError(str(error)) from error
    _check(metadata, files)
    assert isinstance(metadata, Metadata)  # noqa: S101 - _check raised otherwise
    return metadata


def _check(metadata: Any, files: Mapping[str, Digest]) -> None:
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise DamagedCheckpointError(f"{METADATA} is no index")
    if not isinstance(metadata.storage_data, dict) or not all(
        map(_is_value, metadata.state_dict_metadata.items())
    ):
        raise DamagedCheckpointError(f"{METADATA} is no index of tensors and values")
    held: Counter[str] = Counter()
    for index, info in metadata.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(info, StorageInfo):
            raise DamagedCheckpointError(f"{METADATA} is no index of files")
        path = info.relative_path
        if type(path) is not str:  # which may take gigabytes to show
            raise DamagedCheckpointError(f"{METADATA} leads to something else than a file")
        if path not in files:
            raise DamagedCheckpointError(
                f"{METADATA} leads to {path[:_SHOWN_CHARACTERS]!r}, which is not in the manifest"
            )
        numbers = (info.offset, info.length)
        inside = all(type(number) is int and number >= 0 for number in numbers)
        if not inside or sum(numbers) > files[path].size:
            raise DamagedCheckpointError(f"{METADATA} leads beyond the end of {path}")
        if info.transform_descriptors:
            raise DamagedCheckpointError(
                f"{METADATA} asks for transformations, which kdist never writes"
            )
        held[index.fqn] += info.length
    for name, value in metadata.state_dict_metadata.items():
        if (
            isinstance(value, TensorStorageMetadata)
            and value.size.numel() * value.properties.dtype.itemsize > held[name]
        ):
            raise DamagedCheckpointError(
                f"{METADATA} says that {name} is {tuple(value.size)}, more than its files hold"
            )


def _is_value(item: tuple[Any, Any]) -> bool:
    name, value = item
    if isinstance(value, TensorStorageMetadata):
        return (
            isinstance(name, str)
            and _is_size(value.size)
            and isinstance(value.properties, TensorProperties)
            and all(
                isinstance(chunk, ChunkStorageMetadata) and _is_part(chunk, value.size)
                for chunk in value.chunks
            )
        )
    return isinstance(name, str) and isinstance(value, BytesStorageMetadata)


def _is_size(size: Any) -> bool:
    return isinstance(size, torch.Size) and all(
        type(length) is int and length >= 0 for length in size
    )


def _is_part(chunk: ChunkStorageMetadata, whole: torch.Size) -> bool:
    """Whether a chunk is inside its tensor."""
    if not (
        _is_size(chunk.offsets)
        and _is_size(chunk.sizes)
        and len(chunk.offsets) == len(chunk.sizes) == len(whole)
    ):
        return False
    return all(
        start + size <= length
        for start, size, length in zip(chunk.offsets, chunk.sizes, whole, strict=True)
    )
