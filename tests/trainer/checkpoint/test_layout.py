"""Names in a checkpoint folder: what is taken for a checkpoint, in which order, and who may look
inside.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kdist_trainer.checkpoint.lock import Lock
from kdist_trainer.checkpoint.manifest import CheckpointDirectory, parse_name
from kdist_trainer.formats import checkpoint_name
from tests.trainer.checkpoint.states import load, open_store, save


def test_only_real_folders_of_exactly_the_committed_name_are_checkpoints(tmp_path: Path) -> None:
    good = ["step-00000001-e1", "step-123456789-e12"]
    bad = ["step-1-e1", "step-00000002-e1.tmp-a-1", "step-00000003-e1.damaged", "step-00000004"]
    bad += ["xstep-00000005-e1", "lock"]
    for name in good + bad:
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000006-e1").write_text("a file")
    (tmp_path / "step-00000007-e1").symlink_to(tmp_path / good[0])
    directory = CheckpointDirectory(tmp_path)
    assert {one.path.name for one in directory.committed()} == set(good)
    assert [one.name for one in directory.temporary()] == ["step-00000002-e1"]
    assert [one.name for one in directory.damaged()] == ["step-00000003-e1"]


def test_what_a_later_group_committed_is_newer_whatever_its_step(tmp_path: Path) -> None:
    for step, epoch in [(100, 1), (20, 3), (60, 2), (10, 3)]:
        (tmp_path / checkpoint_name(step, epoch)).mkdir()
    expected = [(3, 20), (3, 10), (2, 60), (1, 100)]
    assert [(one.epoch, one.step) for one in CheckpointDirectory(tmp_path).committed()] == expected


@pytest.mark.parametrize(
    "content",
    [
        "../../etc",
        "",
        "step-00000001-e1",
        "step-00000001-e1/../..",
        "step-00000009-e9",
        "\x00",
        "é" * 10,
    ],
)
def test_what_latest_says_decides_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "step-00000001-e1").mkdir()
    (tmp_path / "step-00000002-e1").mkdir()
    (tmp_path / "LATEST").write_text(content, encoding="utf-8")
    newest = Lock(tmp_path).find_newest()
    assert newest is not None
    assert newest.path == tmp_path / "step-00000002-e1"


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "nowhere")
    assert (directory.committed(), directory.named(), directory.done()) == ([], None, None)
    assert Lock(tmp_path / "nowhere").find_newest() is None


def test_names_read_back_what_they_were_made_of() -> None:
    assert parse_name(checkpoint_name(1200, 3)) == (3, 1200)
    assert checkpoint_name(1200, 3) == "step-00001200-e3"


def test_done_is_written_whole_and_read_back_and_anything_else_is_not_done(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "run")
    directory.write_done({"run_id": "r", "step": 7})
    assert directory.done() == {"run_id": "r", "step": 7}
    (tmp_path / "run" / "DONE").write_text('{"run_id": "r", "st')
    assert directory.done() is None


def test_nobody_else_may_look_into_what_is_saved(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    store = open_store(root)
    load(store)
    assert save(store, 1).ok
    for path in [root, *root.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, f"{path} is open to others"
