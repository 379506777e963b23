"""Hostile checkpoints, with manifests that are correct: nothing that lies in them is run, nothing
outside of them is read.
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from kdist_trainer.checkpoint.manifest import DamagedCheckpointError, read_manifest
from kdist_trainer.checkpoint.reader import METADATA, inspect
from kdist_trainer.formats.digest import Digest
from tests.trainer.checkpoint.states import load, open_store

TENSORS = "__0_0.distcp"


def newest(root: Path) -> Path:
    return root / "step-00000002-e1"


def forge(folder: Path, **contents: bytes) -> None:
    """Replace files of a checkpoint and make the manifest agree with them, as one could who may
    write the folder.
    """
    manifest = read_manifest(folder)
    files = dict(manifest.files)
    for name, data in contents.items():
        (folder / name).write_bytes(data)
        files[name] = Digest(len(data), xxhash.xxh3_128_hexdigest(data))
    (folder / "manifest.json").write_bytes(replace(manifest, files=files).to_bytes())


class Evil:
    """An object whose pickle runs a shell command when it is read."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.proof}",))


def index_of(folder: Path) -> Metadata:
    index: Metadata = pickle.loads((folder / METADATA).read_bytes())  # noqa: S301 - written by this test
    return index


def evil_in_torch_file(proof: Path, payload: bytes) -> bytes:
    """A file as torch.save makes it, its pickle replaced."""
    plain = io.BytesIO()
    torch.save({"x": torch.zeros(1)}, plain)
    forged = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(plain.getvalue())) as source,
        zipfile.ZipFile(forged, "w", zipfile.ZIP_STORED) as target,
    ):
        for entry in source.infolist():
            target.writestr(
                entry.filename,
                payload if entry.filename.endswith("data.pkl") else source.read(entry),
            )
    return forged.getvalue()


def test_an_evil_index_with_a_correct_manifest_is_refused_and_runs_nothing(
    root: Path, tmp_path: Path
) -> None:
    proof = tmp_path / "ran"
    evil = pickle.dumps(Evil(proof))
    pickle.loads(evil)  # noqa: S301 - the attack works on a reader that trusts
    assert proof.exists()
    proof.unlink()
    forge(newest(root), **{METADATA: evil})
    store = open_store(root, generation=2)
    assert load(store) == 1
    assert not proof.exists()
    assert "system" in store.fallbacks[0].reason


def test_evil_hidden_inside_a_true_index_runs_nothing(root: Path, tmp_path: Path) -> None:
    proof = tmp_path / "ran"
    index = index_of(newest(root))
    index.planner_data = {"model": Evil(proof)}
    forge(newest(root), **{METADATA: pickle.dumps(index)})
    assert load(open_store(root, generation=2)) == 1
    assert not proof.exists()


def lead_outside(info: _StorageInfo) -> None:
    info.relative_path = "../../../etc/passwd"


def lead_to_a_path_of_gigabytes(info: _StorageInfo) -> None:
    """Text of 2^40 characters, in 400 bytes of pickle: only whoever shows it has to make it."""
    path: object = ("x" * 10,)
    for _ in range(40):
        path = (path, path)
    info.relative_path = path  # type: ignore[assignment]


def lead_to_absolute(info: _StorageInfo) -> None:
    info.relative_path = "/etc/passwd"


def lead_beyond(info: _StorageInfo) -> None:
    info.length = 1 << 40


def lead_before(info: _StorageInfo) -> None:
    info.offset = -1


def ask_for_transforms(info: _StorageInfo) -> None:
    info.transform_descriptors = ["zstd"]


def be_of_odd_numbers(info: _StorageInfo) -> None:
    info.offset = "0"  # type: ignore[assignment]


@pytest.mark.parametrize(
    "twist",
    [
        lead_outside,
        lead_to_a_path_of_gigabytes,
        lead_to_absolute,
        lead_beyond,
        lead_before,
        ask_for_transforms,
        be_of_odd_numbers,
    ],
)
def test_an_index_that_leads_out_of_the_checkpoint_is_refused(
    root: Path, twist: Callable[[_StorageInfo], None]
) -> None:
    index = index_of(newest(root))
    twist(next(iter(index.storage_data.values())))
    forge(newest(root), **{METADATA: pickle.dumps(index)})
    store = open_store(root, generation=2)
    assert load(store) == 1
    assert [one.cause for one in store.fallbacks] == ["corrupt"]


def reduced(index: Metadata, owner: Any, name: str) -> bytes:
    """The index, its members of an enumeration pickled as `getattr(owner, name)`: early releases of
    Python 3.11 do so.
    """
    packed = io.BytesIO()
    pickler = pickle.Pickler(packed)
    pickler.dispatch_table = copyreg.dispatch_table | {
        _MEM_FORMAT_ENCODING: lambda member: (getattr, (owner, name or member.name))
    }
    pickler.dump(index)
    assert b"getattr" in packed.getvalue()
    return packed.getvalue()


def test_an_index_written_by_an_early_python_311_is_read(root: Path) -> None:
    forge(newest(root), **{METADATA: reduced(index_of(newest(root)), _MEM_FORMAT_ENCODING, "")})
    assert load(open_store(root, generation=2)) == 2


@pytest.mark.parametrize(
    ("owner", "name"), [(_MEM_FORMAT_ENCODING, "mro"), (Metadata, "__init__"), ("text", "format")]
)
def test_an_index_that_asks_for_any_other_attribute_is_refused(
    root: Path, owner: Any, name: str
) -> None:
    forge(newest(root), **{METADATA: reduced(index_of(newest(root)), owner, name)})
    store = open_store(root, generation=2)
    assert load(store) == 1
    assert "attribute" in store.fallbacks[0].reason


class Slots:
    """Pickled as a class of the allow-list and a state for it that sets attributes, as BUILD does
    for `__slots__`.
    """

    def __init__(self, owner: Any, state: dict[str, Any]) -> None:
        self.owner = owner
        self.state = state

    def packed(self) -> bytes:
        """The pickle: GLOBAL, the pair (None, state), BUILD."""
        inner = pickle.dumps((None, self.state), protocol=2)[2:-1]
        return (
            b"\x80\x02"
            + pickle.dumps(self.owner, protocol=2)[2:-1]
            + inner
            + pickle.BUILD
            + pickle.STOP
        )


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Metadata, "__init__"),
        (MetadataIndex, "__eq__"),
        (torch.serialization._get_layout, "__defaults__"),
    ],
)
def test_an_index_that_sets_a_method_of_a_record_type_is_refused_and_changes_nothing(
    root: Path, owner: Any, name: str
) -> None:
    before = getattr(owner, name)
    forge(newest(root), **{METADATA: Slots(owner, {name: ("text",)}).packed()})
    store = open_store(root, generation=2)
    assert load(store) == 1
    assert "sets a state" in store.fallbacks[0].reason
    assert getattr(owner, name) is before


def be_vast(value: TensorStorageMetadata) -> None:
    value.size = torch.Size([2**60])


def be_negative(value: TensorStorageMetadata) -> None:
    value.size = torch.Size([-1])


def reach_out(value: TensorStorageMetadata) -> None:
    value.chunks = [ChunkStorageMetadata(torch.Size([1]), value.size)]


@pytest.mark.parametrize("twist", [be_vast, be_negative, reach_out])
def test_a_tensor_that_its_files_cannot_hold_is_refused_before_memory_is_asked_for(
    root: Path, twist: Callable[[TensorStorageMetadata], None]
) -> None:
    index = index_of(newest(root))
    value = next(
        value
        for value in index.state_dict_metadata.values()
        if isinstance(value, TensorStorageMetadata)
    )
    twist(value)
    forge(newest(root), **{METADATA: pickle.dumps(index)})
    with pytest.raises(DamagedCheckpointError, match=METADATA):
        inspect(newest(root))
    assert load(open_store(root, generation=2)) == 1


NO_TENSOR: Any = {"a": 5}


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80\x04.", pickle.dumps({"a": 1}), pickle.dumps(Metadata(NO_TENSOR, storage_data={}))],
)
def test_an_index_of_something_else_is_refused(root: Path, content: bytes) -> None:
    forge(newest(root), **{METADATA: content})
    assert load(open_store(root, generation=2)) == 1


@pytest.mark.parametrize("value", ["model.fc.weight", "optimizer.param_groups.0.lr"])
def test_evil_among_the_tensors_and_values_with_correct_digests_runs_nothing(
    root: Path, tmp_path: Path, value: str
) -> None:
    proof = tmp_path / "ran"
    evil = evil_in_torch_file(proof, pickle.dumps(Evil(proof), protocol=2))
    torch.load(io.BytesIO(evil), weights_only=False)
    assert proof.exists(), "the attack works on a reader that trusts"
    proof.unlink()
    index = index_of(newest(root))
    tensors = (newest(root) / TENSORS).read_bytes()
    info = next(info for index_, info in index.storage_data.items() if index_.fqn == value)
    info.offset, info.length = len(tensors), len(evil)
    forge(newest(root), **{METADATA: pickle.dumps(index), TENSORS: tensors + evil})
    store = open_store(root, generation=2)
    assert load(store) == 1, "and whatever was half loaded is loaded again from the older one"
    assert not proof.exists()
    assert [one.cause for one in store.fallbacks] == ["corrupt"]


@pytest.mark.parametrize(
    "name", ["../escape", "/etc/passwd", "a/b", "..", ".", "", "manifest.json", "nul\0"]
)
def test_a_manifest_that_names_files_elsewhere_is_refused(root: Path, name: str) -> None:
    manifest = read_manifest(newest(root))
    forged = replace(manifest, files={**manifest.files, name: Digest(0, "")})
    (newest(root) / "manifest.json").write_bytes(forged.to_bytes())
    assert load(open_store(root, generation=2)) == 1
