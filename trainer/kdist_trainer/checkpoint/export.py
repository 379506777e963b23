"""Exports the weights of a checkpoint as one safetensors file.

Every byte of the checkpoint is verified before any is used, and only the restricted unpickler runs.
The file is written in the format's own order, a few tensors at a time: safetensors' own
writer holds the whole model in memory, which a pod that trains may not have to spare.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from kdist_trainer.checkpoint.lock import Lock
from kdist_trainer.checkpoint.manifest import (
    FILES,
    Checkpoint,
    DamagedCheckpointError,
    Manifest,
    UnsupportedCheckpointError,
    check_digests,
    read_manifest,
)
from kdist_trainer.checkpoint.reader import load_full_tensors, load_metadata
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.errors import CheckpointMismatchError
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.state import EXTRA

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_AT_ONCE_BYTES = 64 << 20
_MODEL, _AVERAGE = "model.", "average."


@dataclass(frozen=True)
class Export:
    """The weights of one checkpoint, found and verified, ready to be written."""

    checkpoint: Checkpoint
    manifest: Manifest
    sources: Mapping[str, str]
    """Name in the file -> name in the checkpoint."""
    entries: Mapping[str, TensorStorageMetadata]
    """By name in the checkpoint."""

    def write(self, stream: BinaryIO) -> dict[str, Any]:
        """Write the file; returns a summary. Raises `DamagedCheckpointError` or `OSError`."""
        sha, count = hashlib.sha256(), 0
        contents = (one for names in self._groups() for one in self.fetch(names).values())
        weights = (
            one.reshape(-1).view(torch.uint8).numpy().tobytes() for one in contents if one.numel()
        )
        for data in chain((self._header(),), weights):
            sha.update(data)
            count += stream.write(data)
        averaged = sum(source.startswith(_AVERAGE) for source in self.sources.values())
        return {
            "checkpoint": self.checkpoint.name,
            "step": self.checkpoint.step,
            "tensors": len(self.sources),
            "averaged": averaged,
            "bytes": count,
            "sha256": sha.hexdigest(),
        }

    def fetch(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Read weights, whole and on the CPU, by their names in the file. Raises
        `DamagedCheckpointError` or `OSError`.
        """
        found = load_full_tensors(
            self.checkpoint.path, self.manifest, [self.sources[name] for name in names]
        )
        return {name: found[self.sources[name]] for name in names}

    def _names(self) -> list[str]:
        """Names in safetensors' order: wide types first, so that every tensor is aligned."""
        return sorted(self.sources, key=lambda name: (-_type_of(self._entry(name)).itemsize, name))

    def _entry(self, name: str) -> TensorStorageMetadata:
        return self.entries[self.sources[name]]

    def _header(self) -> bytes:
        about = {
            "format": "pt",
            "kdist.checkpoint": self.checkpoint.name,
            "kdist.step": str(self.checkpoint.step),
        }
        document: dict[str, Any] = {"__metadata__": about}
        end = 0
        for name in self._names():
            begin, entry = end, self._entry(name)
            end += entry.size.numel() * _type_of(entry).itemsize
            document[name] = {
                "dtype": _TYPES[_type_of(entry)],
                "shape": list(entry.size),
                "data_offsets": [begin, end],
            }
        text = encode_json(document, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def _groups(self) -> Iterator[list[str]]:
        """Names of successive tensors that are read together: each read opens the index again."""
        group: list[str] = []
        size = 0
        for name in self._names():
            entry = self._entry(name)
            own = entry.size.numel() * _type_of(entry).itemsize
            if group and size + own > _AT_ONCE_BYTES:
                yield group
                group, size = [], 0
            group.append(name)
            size += own
        if group:
            yield group


def prepare(root: StoragePath, *, step: int | None = None, average: bool = False) -> Export:
    """Choose the checkpoint of this step, by default the newest, and verify every byte of it.
    `average` says whether to take the moving average of each weight that has one.

    Raises:
        CheckpointMismatchError: there is no such checkpoint, or it has no such weights.
        DamagedCheckpointError: the checkpoint does not verify.
        UnsupportedCheckpointError: another version wrote the checkpoint.
        OSError: the disk failed.
    """
    found = Lock(root).choose(step)
    try:
        manifest = read_manifest(found.path)
        check_digests(found.path, manifest, manifest.files)
        if any(name.startswith(f"{FILES}/") for name in manifest.files):
            raise CheckpointMismatchError(
                f"{found.path} was written by a framework in its own format; every byte of it "
                f"verifies: let the framework read {manifest.locate(found.path) / FILES}"
            )
        known = load_metadata(found.path, manifest).state_dict_metadata
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(
            f"checkpoint {found.path} is damaged: {error}; --step takes another one"
        ) from error
    except UnsupportedCheckpointError as error:
        raise UnsupportedCheckpointError(
            f"checkpoint {found.path}: {error}; --step takes another one"
        ) from None
    entries = {
        name: entry for name, entry in known.items() if isinstance(entry, TensorStorageMetadata)
    }
    weights = {
        name.removeprefix(_MODEL): name
        for name in entries
        if name.startswith(_MODEL) and EXTRA not in name.split(".")
    }
    if not weights:
        raise CheckpointMismatchError(
            f"{found.path} holds no weights under the name `model`: only the managed "
            "loop's checkpoints are exported"
        )
    unsupported = sorted(
        {str(_type_of(entries[name])) for name in weights.values()} - {str(one) for one in _TYPES}
    )
    if unsupported:
        raise CheckpointMismatchError(
            f"{found.path} has weights of {', '.join(unsupported)}, which safetensors does not know"
        )
    if average:
        weights |= _averages(found, manifest, entries, weights)
    return Export(found, manifest, weights, entries)


def write_file(export: Export, target: Path) -> dict[str, Any]:
    """Write `target` atomically and return a summary. Raises what `Export.write` raises."""
    temporary = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            summary = export.write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    return {"file": str(target), **summary}


def _averages(
    found: Checkpoint,
    manifest: Manifest,
    entries: Mapping[str, TensorStorageMetadata],
    weights: Mapping[str, str],
) -> dict[str, str]:
    """Name of the average of each weight; a weight with several names has one average for all."""
    averages = {name.removeprefix(_AVERAGE): name for name in entries if name.startswith(_AVERAGE)}
    if not averages:
        raise CheckpointMismatchError(
            f"{found.path} holds no moving average: the job trains without emaDecay"
        )
    without = [
        name
        for name in weights
        if name not in averages and _type_of(entries[weights[name]]).is_floating_point
    ]
    shared: dict[str, str] = {}
    for name in without:
        for other, average in averages.items():
            if other not in weights:
                continue
            own, theirs = entries[weights[name]], entries[weights[other]]
            if (own.size, _type_of(own)) == (theirs.size, _type_of(theirs)):
                pair = load_full_tensors(found.path, manifest, (weights[name], weights[other]))
                if torch.equal(*pair.values()):
                    shared[name] = average
                    break
    return {**{name: average for name, average in averages.items() if name in weights}, **shared}


def _type_of(entry: TensorStorageMetadata) -> torch.dtype:
    return entry.properties.dtype
