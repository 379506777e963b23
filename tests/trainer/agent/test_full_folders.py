"""A folder without room is named, with what is left of it and what helps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kdist_trainer.agent.exits import describe_full, describe_room
from tests.small_disk import fill, small_disk


@pytest.fixture(name="disk")
def make_disk(tmp_path: Path) -> Iterator[Path]:
    yield from small_disk(tmp_path / "disk", mib=4)


def test_only_a_folder_without_room_is_named(disk: Path, tmp_path: Path) -> None:
    folders = [("checkpoints", disk), ("scratch", tmp_path)]
    assert describe_full(folders) == ""
    assert describe_full([("checkpoints", "s3://bucket/run")]) == ""
    fill(disk)
    found = describe_full(folders)
    assert found.startswith(
        f"storage: {disk} (checkpoints) has 0 bytes free of 4.0 MiB: delete old"
    )
    assert f"; storage: {tmp_path} " not in found


def test_a_folder_that_was_removed_is_named_and_the_room_of_any_other_one_on_request(
    disk: Path,
) -> None:
    gone = disk / "gone"
    assert describe_full([("checkpoints", gone)]) == (
        f"storage: {gone} (checkpoints) does not exist: it was removed, or is not mounted"
    )
    assert "has 4.0 MiB free of 4.0 MiB" in describe_room("checkpoints", disk, is_full=False)
