"""A sound checkpoint that does not fit the job: refused with what differs, and left as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kdist_trainer.checkpoint import reader
from kdist_trainer.checkpoint.manifest import CheckpointDirectory, UnloadableStateError
from kdist_trainer.errors import CheckpointMismatchError
from tests.trainer.checkpoint.states import (
    FINGERPRINT,
    digest_of,
    load,
    make_state,
    open_store,
    position,
)


def test_other_data_are_refused_and_nothing_is_loaded(root: Path) -> None:
    tensors = make_state(999)
    with pytest.raises(CheckpointMismatchError, match="trained on other data"):
        open_store(root, generation=2).load(tensors, fingerprint="data-2")
    assert digest_of(tensors) == digest_of(make_state(999))
    assert len(CheckpointDirectory(root).committed()) == 2, (
        "a checkpoint that does not fit is not damaged"
    )


def grow(state: dict[str, Any]) -> None:
    state["model"]["fc.weight"] = torch.zeros(9, 9)


def rename(state: dict[str, Any]) -> None:
    state["model"]["head.weight"] = state["model"].pop("fc.weight")


def lose(state: dict[str, Any]) -> None:
    del state["optimizer"]["state"]["embedding"]


def change_kind(state: dict[str, Any]) -> None:
    state["model"]["norm.count"] = 3


@pytest.mark.parametrize(
    ("change", "printed"),
    [
        (grow, "fc.weight"),
        (rename, "head.weight"),
        (lose, "embedding"),
        (change_kind, "norm.count"),
    ],
)
def test_another_model_is_refused_naming_what_differs(
    root: Path, change: Callable[[dict[str, Any]], None], printed: str
) -> None:
    tensors = make_state(999)
    change(tensors)
    before = digest_of(tensors)
    with pytest.raises(CheckpointMismatchError, match=printed):
        open_store(root, generation=2).load(tensors, fingerprint=FINGERPRINT)
    assert digest_of(tensors) == before


def test_the_options_of_the_model_that_was_saved_and_the_ways_out_are_named(root: Path) -> None:
    folder = CheckpointDirectory(root).committed()[-1].path
    saved = replace(reader.inspect(folder), job={"train": {"options": {"width": 32}}})
    printed = r"\(train.options were {'width': 32}\): .*another checkpoint folder, or .*--fresh"
    with pytest.raises(CheckpointMismatchError, match=printed):
        reader.check_fit(folder, saved, {}, fingerprint=FINGERPRINT)


def test_a_value_that_could_not_be_read_back_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    store = open_store(tmp_path / "checkpoints")
    load(store)
    with pytest.raises(UnloadableStateError, match=r"scheduler\.rule is a builtin_function"):
        store.save({**make_state(1), "scheduler": {"rule": min}}, position(1), step=1)
