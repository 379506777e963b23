"""Before the first checkpoint of a shape is acknowledged, it is proven that a new process could
load it: what it asks for is compared with what is on the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kdist_trainer.checkpoint import writer
from kdist_trainer.checkpoint.checkpointer import CheckpointManager
from kdist_trainer.checkpoint.lock import Lock
from kdist_trainer.checkpoint.manifest import CheckpointDirectory, Manifest, UnloadableStateError
from tests.trainer.checkpoint.ranks import Rank, run_ranks
from tests.trainer.checkpoint.states import load, make_state, open_store, opened, position, save


def lose(copies: dict[str, Any]) -> None:
    del copies["model.fc.bias"]


def change_type(copies: dict[str, Any]) -> None:
    copies["model.fc.bias"] = copies["model.fc.bias"].double()


def change_shape(copies: dict[str, Any]) -> None:
    copies["model.fc.bias"] = copies["model.fc.bias"][:3].clone()


def change_kind(copies: dict[str, Any]) -> None:
    copies["model.fc.bias"] = 7


def add(copies: dict[str, Any]) -> None:
    copies["model.more"] = torch.ones(1)


def make_unreadable(copies: dict[str, Any]) -> None:
    copies["optimizer.param_groups.0.lr"] = range(3)


@pytest.mark.parametrize(
    ("change", "printed"),
    [
        (lose, "model.fc.bias is missing"),
        (change_type, "model.fc.bias is float64"),
        (change_shape, r"model.fc.bias is float32\[3\] instead of float32\[8\]"),
        (change_kind, "model.fc.bias is value instead of"),
        (add, "model.more is not in the model"),
        (make_unreadable, "optimizer.param_groups.0.lr: its content cannot be read"),
    ],
)
def test_what_is_written_otherwise_than_a_new_process_asks_for_is_not_committed(
    change: Callable[[dict[str, Any]], None],
    printed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = opened(tmp_path)
    stage = writer.Stager.stage

    def staged_otherwise(self: writer.Stager, *given: Any, **named: Any) -> Any:
        copies, paths = stage(self, *given, **named)
        change(copies)
        return copies, {**paths, "model.more": ("model", "more")}

    monkeypatch.setattr(writer.Stager, "stage", staged_otherwise)
    with pytest.raises(UnloadableStateError, match=printed):
        save(store, 1)
    assert CheckpointDirectory(tmp_path).committed() == []
    assert CheckpointDirectory(tmp_path).temporary() == []


def test_each_shape_is_proven_once_in_memory_and_once_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proven: list[int] = []
    read: list[str] = []
    check = writer.check_saved

    def note(folder: Path, manifest: Manifest, described: Any) -> None:
        read.append(manifest.name)
        check(folder, manifest, described)

    monkeypatch.setattr("kdist_trainer.checkpoint.writer.check_saved", note)

    def prove(state: Any, described: writer.Description) -> list[str]:
        proven.append(len(described))
        return []

    store = opened(tmp_path)
    store.loadable.prove = prove
    for step in (1, 2, 3):
        assert save(store, step).ok
    assert len(proven) == 1
    assert read == ["step-00000001-e1"]
    larger = {**make_state(4), "more": torch.ones(1)}
    for step in (4, 5):
        store.save(larger, position(step), step=step)
    assert len(proven) == 2
    assert read == ["step-00000001-e1", "step-00000004-e1"]


def test_what_a_new_process_could_not_load_is_refused_before_it_is_written(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.loadable.prove = lambda *_: ["model.a is not in the model"]
    with pytest.raises(UnloadableStateError, match=r"would count: model\.a is not in the"):
        save(store, 1)
    assert CheckpointDirectory(tmp_path).committed() == []


def test_a_shape_that_was_loaded_needs_no_proof(root: Path) -> None:
    store = open_store(root, generation=2)
    assert load(store) == 2
    store.loadable.accept(make_state(1))
    store.loadable.prove = lambda *_: ["must not be asked"]
    assert save(store, 3).ok


def save_otherwise(rank: Rank, root: Path, bad: bool) -> tuple[str, int]:
    """Save on two ranks; with `bad`, rank 1 writes what nobody asks for."""
    store = open_store(root, rank)
    load(store)
    if bad and rank.rank == 1:
        stage = store._stager.stage

        def staged_otherwise(*given: Any, **named: Any) -> Any:
            copies, paths = stage(*given, **named)
            name = next(name for name, one in copies.items() if one.numel())
            return {**copies, name: copies[name].flatten().repeat(2)}, paths

        store._stager.stage = staged_otherwise  # type: ignore[method-assign]
    try:
        save(store, 1)
    except UnloadableStateError as error:
        return str(error), 0
    newest = Lock(root).find_newest()
    return "", newest.step if newest is not None else 0


@pytest.mark.processes
def test_every_rank_learns_what_one_of_them_has_written_otherwise(tmp_path: Path) -> None:
    assert run_ranks(2, save_otherwise, tmp_path, tmp_path / "good", False) == [("", 1), ("", 1)]
    bad = run_ranks(2, save_otherwise, tmp_path, tmp_path / "bad", True)
    assert bad[0] == bad[1]
    assert "what was written is not what a new process asks for" in bad[0][0]


def test_the_manager_has_a_check_of_its_own(tmp_path: Path) -> None:
    store: CheckpointManager = opened(tmp_path)
    assert store.loadable.prove is None
