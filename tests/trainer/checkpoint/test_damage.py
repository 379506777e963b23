"""Damaged checkpoints: noticed before anything is loaded, skipped, counted and kept as
evidence.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.manifest import CheckpointDirectory, Manifest, read_manifest
from kdist_trainer.checkpoint.reader import METADATA
from kdist_trainer.errors import CheckpointMismatchError
from kdist_trainer.formats.digest import Digest
from tests.trainer.checkpoint.states import load, open_store, save

TENSORS = "__0_0.distcp"


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


def make_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


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
    "a manifest that is JSON of something else": (
        "manifest.json",
        lambda path: path.write_text("[[[]]]"),
    ),
    "a manifest nested without end": ("manifest.json", lambda path: path.write_text("[" * 100_000)),
    "the manifest of another step": ("manifest.json", exchange_with_older),
    "the tensors of another step": (TENSORS, exchange_with_older),
    "a link instead of a file": (TENSORS, replace_by_link),
    "a link instead of the manifest": ("manifest.json", replace_by_link),
    "a folder instead of a file": (TENSORS, make_a_folder),
    "a pipe instead of a file": (TENSORS, make_a_pipe),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_noticed_before_the_load_and_costs_one_checkpoint(
    root: Path, damage: str
) -> None:
    name, apply = DAMAGES[damage]
    apply(newest(root) / name)
    store = open_store(root, generation=2)
    assert load(store) == 1
    assert [(one.step, one.cause) for one in store.fallbacks] == [(2, "corrupt")]
    assert [one["step"] for one in RunLedger(root).events() if one["event"] == "fallback"] == [2]
    assert [one.step for one in CheckpointDirectory(root).damaged()] == [2], (
        "what did not verify is kept aside"
    )
    assert save(store, 3).ok
    assert read_manifest(root / "step-00000003-e2").parent == "step-00000001-e1"


def test_an_undamaged_folder_loads_the_newest_and_counts_nothing(root: Path) -> None:
    store = open_store(root, generation=2)
    assert load(store) == 2
    assert store.fallbacks == []


def test_when_no_checkpoint_can_be_read_the_training_does_not_quietly_begin_again(
    root: Path,
) -> None:
    for path in root.glob(f"step-*/{TENSORS}"):
        flip_a_bit(path)
    with pytest.raises(CheckpointMismatchError, match=r"no checkpoint in .* can be read"):
        load(open_store(root, generation=2))
    with pytest.raises(CheckpointMismatchError, match="archived as damaged"):
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


def test_a_manifest_reads_back_as_it_was_written() -> None:
    files = {"a": Digest(3, "00"), "b": Digest(4, "11")}
    manifest = Manifest(7, 2, 224, 3, "run", "step-00000006-e1", "digest", {"torch": "2"}, files)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert manifest.nbytes == 7
