"""Reads one checkpoint with DCP.

Every part that DCP would unpickle is verified against the manifest or read by a restricted
unpickler, so a damaged or malicious checkpoint cannot run code.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from kdist_trainer.checkpoint.group import CheckpointGroup
from kdist_trainer.checkpoint.manifest import (
    STATE,
    DamagedCheckpointError,
    Manifest,
    UnsupportedCheckpointError,
    read_checked,
    read_manifest,
    read_state_json,
)
from kdist_trainer.checkpoint.safe_unpickler import METADATA, read_metadata
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.checkpoint.values import read_value
from kdist_trainer.errors import CheckpointMismatchError
from kdist_trainer.formats import NewerFormatError

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
    """Read a checkpoint's manifest and state; the manifest is compared with the files' sizes.

    Args:
        folder: the checkpoint's folder.
        framework: the framework that must have written its other files; empty if kdist must have.

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
    """Check that a checkpoint fits the data and the model that it is to be loaded into.

    Args:
        folder: the checkpoint's folder.
        found: the checkpoint.
        flat: the state to fill, by flat name.
        fingerprint: of the data; empty to accept any.

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
    saved = load_metadata(folder, found.manifest).state_dict_metadata
    problems = [f"{name} is missing" for name in flat if name not in saved]
    problems += [f"{name} is not in the model" for name in saved if name not in flat]
    for name, value in flat.items():
        entry = saved.get(name)
        if (
            isinstance(value, Tensor)
            and isinstance(entry, TensorStorageMetadata)
            and entry.size != value.shape
        ):
            problems.append(f"{name} is {tuple(entry.size)} instead of {tuple(value.shape)}")
        elif entry is not None and isinstance(value, Tensor) != isinstance(
            entry, TensorStorageMetadata
        ):
            problems.append(f"{name} is of another kind")
    if problems:
        more = f" and {len(problems) - _MAX_PROBLEMS} more" if len(problems) > _MAX_PROBLEMS else ""
        raise CheckpointMismatchError(
            f"checkpoint {folder} is of another model or optimizer: "
            f"{'; '.join(problems[:_MAX_PROBLEMS])}{more}"
        )


def load_tensors(
    folder: StoragePath, manifest: Manifest, flat: dict[str, Any], group: CheckpointGroup | None
) -> None:
    """Read the flat state in place.

    Args:
        folder: the checkpoint's folder.
        manifest: its manifest.
        flat: the state to fill, by flat name.
        group: the ranks that read together; None if this rank reads alone.

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
        errors = [wrapped[0] for wrapped in error.failures.values()]
        root = next((one for one in errors if isinstance(one, OSError)), errors[0])
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
    """Read tensors whole onto the CPU, on this rank alone.

    Args:
        folder: the checkpoint's folder.
        manifest: its manifest.
        names: names of the tensors.

    Raises:
        DamagedCheckpointError: a tensor is missing or cannot be read.
        OSError: the disk failed.
    """
    saved = load_metadata(folder, manifest).state_dict_metadata
    flat: dict[str, Any] = {}
    for name in names:
        entry = saved.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise DamagedCheckpointError(f"{name} is no tensor in {METADATA}")
        flat[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    load_tensors(folder, manifest, flat, None)
    return flat
