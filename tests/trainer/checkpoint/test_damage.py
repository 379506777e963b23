"""Damaged and hostile checkpoints: noticed before anything is loaded, passed over, counted, kept, and nothing of them run."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from kdist_trainer.checkpoint.files import Digest
from kdist_trainer.checkpoint.layout import CheckpointDirectory
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.manifest import Manifest, read_manifest
from kdist_trainer.checkpoint.unpickler import METADATA
from kdist_trainer.failure import Mismatch
from tests.trainer.checkpoint.states import FINGERPRINT, digest_of, load, make_state, open_store, position, save

TENSORS = "__0_0.distcp"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of steps 1 and 2, its lock released."""
    root = tmp_path_factory.mktemp("saved") / "checkpoints"
    store = open_store(root)
    load(store)
    for step in (1, 2):
        assert save(store, step).ok
    store.close()
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoints", symlinks=True))


def newest(root: Path) -> Path:
    return root / "step-00000002-e1"


def flip_a_bit(path: Path, *, at: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 0x10
    path.write_bytes(content)


def flip_in_manifest(path: Path) -> None:
    text = path.read_text()
    assert '"samples_seen": 64' in text
    path.write_text(text.replace('"samples_seen": 64', '"samples_seen": 65'))


def replace_by_link(path: Path) -> None:
    real = path.with_name("elsewhere")
    path.rename(real)
    path.symlink_to(real)


def zero_the_tail(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, size // 2)
    os.truncate(path, size)


def exchange_with_older(path: Path) -> None:
    shutil.copy(path.parent.with_name("step-00000001-e1") / path.name, path)


def make_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "a flipped bit in the tensors": (TENSORS, flip_a_bit),
    "a flipped bit in the first byte": (TENSORS, lambda path: flip_a_bit(path, at=0)),
    "a flipped bit in the index": (METADATA, flip_a_bit),
    "a flipped bit in the state": ("state.json", flip_a_bit),
    "a changed number in the manifest": ("manifest.json", flip_in_manifest),
    "a truncated file": (TENSORS, lambda path: os.truncate(path, path.stat().st_size - 1)),
    "a longer file": (TENSORS, lambda path: path.write_bytes(path.read_bytes() + b"\0")),
    "a zeroed tail": (TENSORS, zero_the_tail),
    "an empty file": (TENSORS, lambda path: os.truncate(path, 0)),
    "an empty index": (METADATA, lambda path: os.truncate(path, 0)),
    "an empty manifest": ("manifest.json", lambda path: os.truncate(path, 0)),
    "a missing file": (TENSORS, Path.unlink),
    "a missing index": (METADATA, Path.unlink),
    "a missing manifest": ("manifest.json", Path.unlink),
    "a manifest that is no JSON": ("manifest.json", lambda path: path.write_bytes(b"\xff\xfe{")),
    "a manifest that is JSON of something else": ("manifest.json", lambda path: path.write_text("[[[]]]")),
    "a manifest nested without end": ("manifest.json", lambda path: path.write_text("[" * 100_000)),
    "the manifest of another step": ("manifest.json", exchange_with_older),
    "the tensors of another step": (TENSORS, exchange_with_older),
    "a link instead of a file": (TENSORS, replace_by_link),
    "a link instead of the manifest": ("manifest.json", replace_by_link),
    "a folder instead of a file": (TENSORS, make_a_folder),
    "a pipe instead of a file": (TENSORS, lambda path: (path.unlink(), os.mkfifo(path))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_noticed_before_the_load_and_costs_one_checkpoint(root: Path, damage: str) -> None:
    name, apply = DAMAGES[damage]
    apply(newest(root) / name)
    store = open_store(root, generation=2)
    assert load(store) == 1
    assert [(one.step, one.cause) for one in store.fallbacks] == [(2, "corrupt")]
    assert [one["step"] for one in RunLedger(root).events() if one["event"] == "fallback"] == [2]
    assert [one.step for one in CheckpointDirectory(root).damaged()] == [2], "what did not verify is kept aside"
    assert save(store, 3).ok
    assert read_manifest(root / "step-00000003-e2").parent == "step-00000001-e1"


def test_an_undamaged_folder_loads_the_newest_and_counts_nothing(root: Path) -> None:
    store = open_store(root, generation=2)
    assert load(store) == 2
    assert store.fallbacks == []


def test_when_no_checkpoint_can_be_read_the_training_does_not_quietly_begin_anew(root: Path) -> None:
    for path in root.glob(f"step-*/{TENSORS}"):
        flip_a_bit(path)
    with pytest.raises(Mismatch, match=r"no checkpoint in .* can be read"):
        load(open_store(root, generation=2))
    with pytest.raises(Mismatch, match="set aside as damaged"):
        load(open_store(root, generation=3))


def test_evidence_is_kept_but_not_without_end(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for generation in range(1, 8):
        store = open_store(root, generation=generation)
        load(store)
        assert save(store, generation * 10).ok
        assert save(store, generation * 10 + 1).ok
        flip_a_bit(root / f"step-{generation * 10 + 1:08d}-e{generation}" / TENSORS)
    assert len(CheckpointDirectory(root).damaged()) == 3


def forge(folder: Path, **contents: bytes) -> None:
    """Replace files of a checkpoint and make the manifest agree with them, as one could who may write the folder."""
    manifest = read_manifest(folder)
    files = dict(manifest.files)
    for name, data in contents.items():
        (folder / name).write_bytes(data)
        files[name] = Digest(len(data), hashlib.sha256(data).hexdigest())
    (folder / "manifest.json").write_bytes(replace(manifest, files=files).to_bytes())


class Evil:
    """An object whose pickle runs a shell command when it is read."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.witness}",))


def index_of(folder: Path) -> Metadata:
    return pickle.loads((folder / METADATA).read_bytes())  # noqa: S301 - written by this test


def evil_in_torch_file(witness: Path, payload: bytes) -> bytes:
    """A file as torch.save makes it, its pickle replaced."""
    plain = io.BytesIO()
    torch.save({"x": torch.zeros(1)}, plain)
    forged = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(plain.getvalue())) as source, zipfile.ZipFile(forged, "w", zipfile.ZIP_STORED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, payload if entry.filename.endswith("data.pkl") else source.read(entry))
    return forged.getvalue()


def test_an_evil_index_with_a_correct_manifest_is_refused_and_runs_nothing(root: Path, tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    evil = pickle.dumps(Evil(witness))
    pickle.loads(evil)  # noqa: S301 - the attack works on a reader that trusts
    assert witness.exists()
    witness.unlink()
    forge(newest(root), **{METADATA: evil})
    store = open_store(root, generation=2)
    assert load(store) == 1
    assert not witness.exists()
    assert "system" in store.fallbacks[0].reason


def test_evil_hidden_inside_a_true_index_runs_nothing(root: Path, tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    index = index_of(newest(root))
    index.planner_data = {"model": Evil(witness)}
    forge(newest(root), **{METADATA: pickle.dumps(index)})
    assert load(open_store(root, generation=2)) == 1
    assert not witness.exists()


def lead_outside(info: _StorageInfo) -> None:
    info.relative_path = "../../../etc/passwd"


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
    "twist", [lead_outside, lead_to_absolute, lead_beyond, lead_before, ask_for_transforms, be_of_odd_numbers]
)
def test_an_index_that_leads_out_of_the_checkpoint_is_refused(root: Path, twist: Callable[[_StorageInfo], None]) -> None:
    index = index_of(newest(root))
    twist(next(iter(index.storage_data.values())))
    forge(newest(root), **{METADATA: pickle.dumps(index)})
    store = open_store(root, generation=2)
    assert load(store) == 1
    assert [one.cause for one in store.fallbacks] == ["corrupt"]


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04.", pickle.dumps({"a": 1}), pickle.dumps(Metadata({"a": 5}, storage_data={}))]
)  # type: ignore[dict-item]
def test_an_index_of_something_else_is_refused(root: Path, content: bytes) -> None:
    forge(newest(root), **{METADATA: content})
    assert load(open_store(root, generation=2)) == 1


@pytest.mark.parametrize("value", ["model.fc.weight", "optimizer.param_groups.0.lr"])
def test_evil_among_the_tensors_and_values_with_correct_digests_runs_nothing(root: Path, tmp_path: Path, value: str) -> None:
    witness = tmp_path / "ran"
    evil = evil_in_torch_file(witness, pickle.dumps(Evil(witness), protocol=2))
    torch.load(io.BytesIO(evil), weights_only=False)
    assert witness.exists(), "the attack works on a reader that trusts"
    witness.unlink()
    index = index_of(newest(root))
    tensors = (newest(root) / TENSORS).read_bytes()
    info = next(info for index_, info in index.storage_data.items() if index_.fqn == value)
    info.offset, info.length = len(tensors), len(evil)
    forge(newest(root), **{METADATA: pickle.dumps(index), TENSORS: tensors + evil})
    store = open_store(root, generation=2)
    assert load(store) == 1, "and whatever was half loaded is loaded again from the older one"
    assert not witness.exists()
    assert [one.cause for one in store.fallbacks] == ["corrupt"]


@pytest.mark.parametrize("name", ["../escape", "/etc/passwd", "a/b", "..", ".", "", "manifest.json", "nul\0"])
def test_a_manifest_that_names_files_elsewhere_is_refused(root: Path, name: str) -> None:
    manifest = read_manifest(newest(root))
    forged = replace(manifest, files={**manifest.files, name: Digest(0, "")})
    (newest(root) / "manifest.json").write_bytes(forged.to_bytes())
    assert load(open_store(root, generation=2)) == 1


def test_a_manifest_of_an_unknown_format_is_not_guessed_at(root: Path) -> None:
    path = newest(root) / "manifest.json"
    body = json.loads(path.read_bytes())["manifest"]
    body["format"] = 2
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    path.write_text(json.dumps({"manifest": body, "sha256": digest}))
    assert load(open_store(root, generation=2)) == 1


def test_a_manifest_reads_back_as_it_was_written() -> None:
    files = {"a": Digest(3, "00"), "b": Digest(4, "11")}
    manifest = Manifest(7, 2, 224, 3, "run", "step-00000006-e1", "digest", {"torch": "2"}, files)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert manifest.nbytes == 7


def test_other_data_are_refused_and_nothing_is_loaded(root: Path) -> None:
    tensors = make_state(999)
    with pytest.raises(Mismatch, match="trained on other data"):
        open_store(root, generation=2).load(tensors, fingerprint="data-2")
    assert digest_of(tensors) == digest_of(make_state(999))
    assert len(CheckpointDirectory(root).committed()) == 2, "a checkpoint that does not fit is not damaged"


def grow(state: dict[str, Any]) -> None:
    state["model"]["fc.weight"] = torch.zeros(9, 9)


def rename(state: dict[str, Any]) -> None:
    state["model"]["head.weight"] = state["model"].pop("fc.weight")


def lose(state: dict[str, Any]) -> None:
    del state["optimizer"]["state"]["embedding"]


def change_kind(state: dict[str, Any]) -> None:
    state["model"]["norm.count"] = 3


@pytest.mark.parametrize(
    ("change", "said"), [(grow, "fc.weight"), (rename, "head.weight"), (lose, "embedding"), (change_kind, "norm.count")]
)
def test_another_model_is_refused_naming_what_differs(root: Path, change: Callable[[dict[str, Any]], None], said: str) -> None:
    tensors = make_state(999)
    change(tensors)
    before = digest_of(tensors)
    with pytest.raises(Mismatch, match=said):
        open_store(root, generation=2).load(tensors, fingerprint=FINGERPRINT)
    assert digest_of(tensors) == before


def test_a_value_that_could_not_be_read_back_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    store = open_store(tmp_path / "checkpoints")
    load(store)
    with pytest.raises(ValueError, match=r"scheduler\.rule is a builtin_function"):
        store.save({**make_state(1), "scheduler": {"rule": min}}, position(1), step=1)
