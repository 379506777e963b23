"""Reads one checkpoint without running code that is in it, and defines the values it can hold.

DCP keeps its index, `.metadata`, as a pickle and reads it with `pickle.load`, which runs whatever
the file says; its small values are pickles too and are read with `weights_only=False`. Here the
index may only refer to an allow-list of torch's plain record types, and is then checked against the
manifest: no path outside the checkpoint, no range outside a file. All that is unpickled is verified
first or read by a restricted unpickler.

Values other than whole tensors are copied, before they are saved, into types that can be read back
this way, or refused with the path that leads to them. Numbers and strings of derived types, such as
NumPy's, become Python's. Keys and tuples keep their types. A NumPy array is stored as a tuple of
its type, shape and bytes, so that nothing of NumPy's has to be allowed where it is read.
"""

from __future__ import annotations

import math
import pickle
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from kdist_trainer.checkpoint import torch_internals
from kdist_trainer.checkpoint.manifest import (
    STATE,
    DamagedCheckpointError,
    Manifest,
    UnloadableStateError,
    UnsupportedCheckpointError,
    read_checked,
    read_manifest,
    read_state_json,
    too_deep,
)
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.checkpoint.torch_internals import (
    INDEX_GLOBALS,
    MemoryFormatEncoding,
    StorageInfo,
    find_layout,
    set_properties,
)
from kdist_trainer.distributed.checkpoint_group import CheckpointGroup
from kdist_trainer.errors import CheckpointMismatchError
from kdist_trainer.formats import NewerFormatError
from kdist_trainer.formats.allow_list import NOT_ALLOWED, AllowList, UnsafePickleError
from kdist_trainer.formats.digest import Digest
from kdist_trainer.state import ValueKind

_NUMBERS: Final = (bool, int, float, complex)
_KEPT: Final = frozenset(
    {*_NUMBERS, type(None), bytes, bytearray, torch.dtype, torch.device, torch.Size}
)
_MAPPINGS: Final = (dict, OrderedDict, Counter)
_MOST_DEPTH: Final = 100
_REFUSED: Final = re.compile(r"GLOBAL (\S+) was not an allowed global")
_ARRAY: Final = "numpy.ndarray"
"""The first of the four values that stand for an array."""
_EMPTY_BYTES: Final = "bytes()"
"""The one value that stands for `b""`, which torch would refuse to read."""
_ARRAY_KINDS: Final = frozenset("biufcSU")
"""Kinds of arrays whose elements are no objects."""


def copy_value(value: Any, path: str, *, depth: int = 0) -> Any:
    """A copy of a value, in memory of its own, of types that `read_value` returns: numbers, texts,
    tensors, NumPy arrays, and containers of these. Raises `UnloadableStateError`, with the `path`
    that leads to it, if a checkpoint cannot hold it.
    """
    kind = type(value)
    if kind in _KEPT:
        return value if value != b"" else (_EMPTY_BYTES,)
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if depth > _MOST_DEPTH:
        raise too_deep(path, _MOST_DEPTH)
    inner = depth + 1
    if kind in (list, tuple):
        return kind(
            copy_value(one, f"{path}[{number}]", depth=inner) for number, one in enumerate(value)
        )
    if kind in _MAPPINGS:
        return kind(
            {
                copy_key(key, path): copy_value(one, f"{path}[{key!r:.80}]", depth=inner)
                for key, one in value.items()
            }
        )
    if kind is set:
        return {copy_key(one, path) for one in value}
    if isinstance(value, np.ndarray):
        kind = value.dtype.kind
        if kind not in _ARRAY_KINDS or (kind in "fc" and value.itemsize > 16):
            raise UnloadableStateError(
                f"{path} is a NumPy array of {value.dtype}, which a checkpoint cannot hold: give "
                "numbers or texts"
            )
        return _ARRAY, value.dtype.str, value.shape, bytearray(value.tobytes())
    return _plain(value, path)


def copy_key(key: Any, path: str) -> Any:
    """The key of a dict or member of a set, of types that `read_value` returns; an equal one.
    Raises `UnloadableStateError` if a checkpoint cannot hold it.
    """
    if type(key) is tuple:
        return tuple(copy_key(one, path) for one in key)
    if key != b"" and (key is None or isinstance(key, (*_NUMBERS, str, bytes, np.generic))):
        return _plain(key, f"the key {key!r:.80} of {path}")
    raise UnloadableStateError(
        f"{path} has a key of type {_name(key)}, which a checkpoint cannot hold: use texts, "
        "numbers or tuples of these as keys"
    )


def _plain(value: Any, path: str) -> Any:
    """A number or text of Python's own types."""
    if type(value) in _KEPT:
        return value
    if isinstance(value, np.generic):
        value = value.item()  # of a longdouble it is one again
        if type(value) in _KEPT:
            return value
    if isinstance(value, str):
        text = str.__str__(value)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UnloadableStateError(
                f"{path} is a text with half of a UTF-16 pair, which a checkpoint cannot hold"
            ) from None
        return text
    if isinstance(value, bytes):
        return bytes(memoryview(value))
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, complex) and not isinstance(value, np.generic):
        return complex(value.real, value.imag)
    raise UnloadableStateError(
        f"{path} is a {_name(value)}, which a checkpoint cannot hold: give numbers, texts or "
        "tensors, lists, tuples, dicts and sets of these, or leave it out of state_dict()"
    )


def _name(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def read_value(stream: IO[bytes]) -> Any:
    """Read a value that `copy_value` returned and `torch.save` wrote, without running code that is
    in it. Raises what `torch.load` raises if it cannot be read.
    """
    try:
        value = torch.load(stream, weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's own text is an advice to run what is in the file
        found = _REFUSED.search(str(error))
        raise ValueError(
            f"it refers to {found[1]:.100}{NOT_ALLOWED}"
            if found
            else f"it is no plain value ({str(error).rpartition('error: ')[2]:.200})"
        ) from None
    return _restore(value)


def _restore(value: Any) -> Any:
    """The value, with the arrays that it was saved with."""
    kind = type(value)
    if kind is tuple and value and type(value[0]) is str:
        if len(value) == 4 and value[0] == _ARRAY:
            return _make_array(value)
        if value == (_EMPTY_BYTES,):
            return b""
    if kind in (list, tuple):
        return kind(map(_restore, value))
    if kind in _MAPPINGS:
        return kind({key: _restore(one) for key, one in value.items()})
    return value


def _make_array(described: tuple[Any, ...]) -> Any:
    _, code, shape, content = described
    if not (type(code) is str and type(shape) is tuple and type(content) is bytearray):
        raise ValueError(f"a value says that it is a {_ARRAY}, and is none")
    dtype = np.dtype(code)
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"an array is of {dtype}, which kdist never writes")
    if math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"an array of {shape} holds {len(content)} bytes")
    array = np.empty(shape, dtype)
    if content:
        array[...] = np.frombuffer(content, dtype).reshape(shape)
    return array


def check_tensor(tensor: Tensor, name: str) -> None:
    """Raise `UnloadableStateError` if a checkpoint cannot hold a tensor of this kind."""
    what = (
        "has no content (it is on the meta device)"
        if tensor.is_meta
        else f"is {str(tensor.layout).removeprefix('torch.')}"
        if tensor.layout is not torch.strided
        else "is quantized"
        if tensor.is_quantized
        else "is a nested tensor"
        if tensor.is_nested
        else None
    )
    if what is not None:
        raise UnloadableStateError(
            f"{name} is a tensor that {what}, which a checkpoint cannot hold: keep a dense tensor "
            "in the state, or leave it out of state_dict()"
        )


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
    """Read DCP's index, the content of `.metadata`, without running anything in it. Raises
    `DamagedCheckpointError` if it is no index, or refers to others than `files`, those of the
    manifest.
    """
    try:
        metadata: Any = _INDEX.read(data)
    except UnsafePickleError as error:
        raise DamagedCheckpointError(str(error)) from error
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
    return metadata


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


SavedIndex = Mapping[str, TensorStorageMetadata | BytesStorageMetadata]
"""What a checkpoint has, by flat name: tensors with their sizes, and values."""

_MAX_PROBLEMS = 3


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint whose manifest, state and index are intact; the digests of its files are checked
    separately, because that takes long.
    """

    manifest: Manifest
    state: dict[str, Any]
    job: dict[str, Any] = field(default_factory=dict)
    """The job that saved it; empty if the checkpoint does not contain it."""


class _ObjectFileSystem(FileSystem):
    """DCP's access to the files of a checkpoint in an object store, to read them."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:  # noqa: ARG002 - DCP's signature
        with path.open(self._manifest.files[path.name].size) as stream:
            yield stream


class _UnreadableIndex(Metadata):
    """Stands for an index that could not be read."""

    def __init__(self, error: Exception) -> None:
        super().__init__({})
        self.error = error


class _Reader(FileSystemReader):
    """DCP's reader, with an index that is verified and read by the restricted unpickler."""

    def __init__(self, folder: StoragePath, manifest: Manifest) -> None:
        files: Any = manifest.locate(folder)
        super().__init__(files if isinstance(files, Path) else Path())
        if not isinstance(files, Path):
            self.fs = _ObjectFileSystem(manifest)
            self.path = files
        self._folder = folder
        self._manifest = manifest

    def read_metadata(self, *_: Any) -> Metadata:
        """The index. An error is left for the planner to raise: DCP would turn it into an
        AssertionError, which makes a store that does not answer look like damage. Without a
        parameter named `kwargs`, DCP does not try an index of this rank alone afterwards.
        """
        try:
            metadata = load_metadata(self._folder, self._manifest)
        except (OSError, DamagedCheckpointError) as error:
            return _UnreadableIndex(error)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _Planner(DefaultLoadPlanner):
    """DCP's planner, with small values read by `weights_only`, unlike DCP's own."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        if isinstance(metadata, _UnreadableIndex):
            raise metadata.error
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = read_value(value)


def load_metadata(folder: StoragePath, manifest: Manifest) -> Metadata:
    """DCP's index of a checkpoint, verified. Raises `DamagedCheckpointError` or `OSError`."""
    return read_metadata(read_checked(folder, METADATA, manifest), manifest.files)


def read_index(folder: StoragePath, manifest: Manifest) -> SavedIndex:
    """What a checkpoint has, by flat name. Raises `DamagedCheckpointError` or `OSError`."""
    return load_metadata(folder, manifest).state_dict_metadata


def inspect(folder: StoragePath) -> LoadedCheckpoint:
    """Read a checkpoint's manifest, index and state, without running any code that is in it.

    Raises:
        DamagedCheckpointError: one of them does not verify.
        UnsupportedCheckpointError: another version wrote it.
        OSError: the disk failed.
    """
    return inspect_index(folder)[0]


def inspect_index(folder: StoragePath) -> tuple[LoadedCheckpoint, SavedIndex]:
    """Inspect a checkpoint; returns what it has too. Raises as `inspect` does."""
    found = read_state(folder)
    return found, read_index(folder, found.manifest)


def read_state(folder: StoragePath, *, framework: str = "") -> LoadedCheckpoint:
    """Read a checkpoint's manifest and state; the manifest is compared with the files' sizes. This
    framework must have written its other files; kdist, if that is empty.

    Raises:
        CheckpointMismatchError: another one has.
        DamagedCheckpointError: manifest or state does not verify.
        UnsupportedCheckpointError: another version wrote it.
        OSError: the disk failed.
    """
    try:
        manifest = read_manifest(folder)
    except UnsupportedCheckpointError as error:
        raise UnsupportedCheckpointError(
            f"checkpoint {folder}: {error}, or move the folder away to continue from an older one"
        ) from None
    state, job = _read_documents(folder, manifest)
    writer = state.get("framework", "")
    if writer != framework:
        raise CheckpointMismatchError(
            f"checkpoint {folder} is in the format of {writer or 'kdist'}, and this script reads "
            f"that of {framework or 'kdist'}; give the job a checkpoint folder of its own, or "
            "--fresh"
        )
    return LoadedCheckpoint(manifest, state, job)


def _read_documents(
    folder: StoragePath, manifest: Manifest
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state and the job of a checkpoint. Raises as `read_state` does."""
    try:
        state, job = read_state_json(read_checked(folder, STATE, manifest))
    except NewerFormatError as error:
        raise UnsupportedCheckpointError(f"checkpoint {folder}: {error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{STATE} holds no state") from error
    if not isinstance(state, dict) or not isinstance(job, dict):
        raise DamagedCheckpointError(f"{STATE} holds no state")
    return state, job


def check_fit(
    folder: StoragePath, found: LoadedCheckpoint, flat: Mapping[str, Any], *, fingerprint: str
) -> None:
    """Check that a checkpoint fits the data (any, if `fingerprint` is empty) and `flat`, the state
    that it is to be loaded into, by flat name.

    Raises:
        CheckpointMismatchError: it does not; the message says what differs.
        DamagedCheckpointError: the index no longer verifies.
        OSError: the disk failed.
    """
    theirs = found.state.get("fingerprint", "")
    if fingerprint and theirs != fingerprint:
        raise CheckpointMismatchError(
            f"checkpoint {folder} was trained on other data, of fingerprint {theirs!r} "
            f"instead of {fingerprint!r}; "
            "give the job a checkpoint folder of its own, or --fresh"
        )
    saved = {
        name: entry.size if isinstance(entry, TensorStorageMetadata) else None
        for name, entry in read_index(folder, found.manifest).items()
    }
    if problems := find_misfits(shapes_of(flat), saved):
        more = f" and {len(problems) - _MAX_PROBLEMS} more" if len(problems) > _MAX_PROBLEMS else ""
        train = found.job.get("train")
        options = train.get("options") if isinstance(train, dict) else None
        made = f" (train.options were {str(options)[:400]})" if options else ""
        raise CheckpointMismatchError(
            f"checkpoint {folder} is of another model or optimizer{made}: "
            f"{'; '.join(problems[:_MAX_PROBLEMS])}{more}; train the model that it was made with, "
            "give the job another checkpoint folder, or start again with --fresh"
        )


def shapes_of(flat: Mapping[str, Any]) -> dict[str, torch.Size | None]:
    """The shapes of the tensors of a flat state; None for other values."""
    return {name: one.shape if isinstance(one, Tensor) else None for name, one in flat.items()}


def find_misfits(
    own: Mapping[str, torch.Size | None], saved: Mapping[str, torch.Size | None]
) -> list[str]:
    """Why `saved` cannot be loaded into `own`, one sentence per difference. Both map flat names to
    the shapes of tensors, and to None for other values.
    """
    problems = [f"{name} is missing" for name in own if name not in saved]
    problems += [f"{name} is not in the model" for name in saved if name not in own]
    for name in own:
        ours, theirs = own[name], saved.get(name, own[name])
        if (ours is None) != (theirs is None):
            problems.append(f"{name} is of another kind")
        elif ours is not None and theirs is not None and ours != theirs:
            problems.append(f"{name} is {tuple(theirs)} instead of {tuple(ours)}")
    return problems


def find_root_cause(error: CheckpointException, *preferred: type[Exception]) -> BaseException:
    """The root cause among the errors of all ranks that DCP collects: of these types, if any is."""
    errors = [wrapped[0] for wrapped in error.failures.values()]
    return next((one for one in errors if isinstance(one, preferred)), errors[0])


def load_tensors(
    folder: StoragePath, manifest: Manifest, flat: dict[str, Any], group: CheckpointGroup | None
) -> None:
    """Read the flat state in place; the ranks of the group read together, and without one this rank
    reads alone.

    Raises:
        DamagedCheckpointError: the content cannot be read; the state may be filled in part.
        OSError: the disk failed; the state may be filled in part.
    """
    process_group = group.process_group if group is not None else None
    reader = _Reader(folder, manifest)
    try:
        state_dict_loader.load(
            flat,
            storage_reader=reader,
            planner=_Planner(flatten_state_dict=False),
            process_group=process_group,
            no_dist=process_group is None,
        )
    except CheckpointException as error:
        root = find_root_cause(error, OSError)
        if isinstance(root, OSError | DamagedCheckpointError):
            raise root from None
        raise DamagedCheckpointError(
            f"its content cannot be read: {type(root).__name__}: {root}"
        ) from None


def read_all_values(folder: StoragePath) -> None:
    """Read all of a checkpoint but the content of its tensors, as a training would: the state, the
    index, and the values that are no tensors. Of one in a framework's format only the state.

    Raises:
        CheckpointMismatchError, DamagedCheckpointError: something cannot be read without running
            code that is in it; the message says what.
        OSError: the disk failed.
    """
    manifest = read_manifest(folder)
    state, _ = _read_documents(folder, manifest)
    if state.get("framework"):
        return
    read_values(folder, manifest, read_index(folder, manifest))


def read_values(folder: StoragePath, manifest: Manifest, index: SavedIndex) -> None:
    """Read the values of a checkpoint that are no tensors. Raises `DamagedCheckpointError`, which
    names the first that cannot be read, or `OSError`.
    """
    names = [name for name, one in index.items() if isinstance(one, BytesStorageMetadata)]
    try:
        load_tensors(folder, manifest, dict.fromkeys(names), None)
    except DamagedCheckpointError:
        for name in names:
            try:
                load_tensors(folder, manifest, {name: None}, None)
            except DamagedCheckpointError as error:
                raise DamagedCheckpointError(f"{name}: {error}") from None
        raise


def load_full_tensors(
    folder: StoragePath, manifest: Manifest, names: Sequence[str]
) -> dict[str, Tensor]:
    """Read tensors of these names whole onto the CPU, on this rank alone.

    Raises:
        DamagedCheckpointError: a tensor is missing or cannot be read.
        OSError: the disk failed.
    """
    saved = read_index(folder, manifest)
    flat: dict[str, Any] = {}
    for name in names:
        entry = saved.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise DamagedCheckpointError(f"{name} is no tensor in {METADATA}")
        flat[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    load_tensors(folder, manifest, flat, None)
    return flat


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
