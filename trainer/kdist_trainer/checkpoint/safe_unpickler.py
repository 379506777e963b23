"""Reading torch's checkpoint files without running anything that lies in them.

DCP keeps its index, `.metadata`, as a pickle and reads it with `pickle.load`, which runs whatever
the file says; its small values are pickles too and are read with `weights_only=False`. Here the
index may only name an allow-list of torch's plain record types, and is then checked against the
manifest: no path outside of the checkpoint, no range outside of a file.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from kdist_trainer.checkpoint.durable_files import Digest
from kdist_trainer.checkpoint.layout import DamagedCheckpointError

METADATA = ".metadata"
_RECORDS = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
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
    ("torch.serialization", "_get_layout"),  # looks a layout up by its name
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}


_RECORD_TYPES = (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
    ChunkStorageMetadata,
    BytesStorageMetadata,
    _StorageInfo,
)


class _Unpickler(pickle._Unpickler):
    """Python's own, whose BUILD can be kept to records: the one in C lets a state set any attribute
    of whatever it is given.

    It reads an index of 20,000 tensors in some three seconds instead of one and a half.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]

    def load_build(self) -> None:
        """Give a record its fields, and nothing else to nothing else: no class, no function, no
        method.
        """
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is TensorProperties and isinstance(state, tuple):
            target.__setstate__(state)  # type: ignore[no-untyped-call]
            return
        if (
            type(target) not in _RECORD_TYPES
            or type(state) is not dict
            or not state.keys() <= type(target).__dataclass_fields__.keys()
        ):
            raise pickle.UnpicklingError(f"{METADATA} sets a state of {target!r:.100}")
        target.__dict__.update(state)

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("builtins", "getattr"):
            return _find_member
        if (module_name, global_name) not in _ALLOWED:
            raise pickle.UnpicklingError(
                f"{METADATA} names {module_name}.{global_name}, which is not on the allow-list"
            )
        return super().find_class(module_name, global_name)


def _find_member(owner: Any, name: Any) -> Any:
    """What `getattr` may do here: early releases of Python 3.11 pickle the member of an enumeration
    as such a call.
    """
    if owner is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError(f"{METADATA} asks for an attribute of {owner!r}")
    return _MEM_FORMAT_ENCODING[name]


def read_metadata(data: bytes, files: Mapping[str, Digest]) -> Metadata:
    """DCP's index from its bytes, checked against the manifest's files. Raises
    `DamagedCheckpointError`; runs nothing that `data` names.
    """
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:
        # What a broken pickle raises is not limited to UnpicklingError: the records' constructors
        # see its arguments.
        raise DamagedCheckpointError(f"{METADATA} cannot be read safely: {error}") from error
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
        if not isinstance(index, MetadataIndex) or not isinstance(info, _StorageInfo):
            raise DamagedCheckpointError(f"{METADATA} is no index of files")
        if info.relative_path not in files:
            raise DamagedCheckpointError(
                f"{METADATA} leads to {info.relative_path!r}, which is not in the manifest"
            )
        numbers = (info.offset, info.length)
        inside = all(type(number) is int and number >= 0 for number in numbers)
        if not inside or sum(numbers) > files[info.relative_path].size:
            raise DamagedCheckpointError(f"{METADATA} leads beyond the end of {info.relative_path}")
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
    """Whether a chunk lies inside of its tensor."""
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
