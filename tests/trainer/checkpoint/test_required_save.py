"""Attempts of a save that must succeed, on a disk that is really full."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kdist_trainer.checkpoint import checkpointer
from kdist_trainer.checkpoint.checkpointer import RequiredSave, Waiting
from kdist_trainer.checkpoint.commit import SaveResult
from kdist_trainer.distributed.checkpoint_group import CheckpointGroup
from kdist_trainer.errors import PeersLostError, StorageError
from tests.small_disk import fill, small_disk


class Alone(NamedTuple):
    rank: int = 0
    size: int = 1
    generation: int = 1


class Attempts:
    """Writes two MiB; `at` is called before the attempt of that number, counted from 1."""

    def __init__(self, folder: Path, at: dict[int, Callable[[], object]]) -> None:
        self.count = 0
        self._path = folder / "saved"
        self._at = at

    def __call__(self) -> SaveResult:
        self.count += 1
        self._at.get(self.count, lambda: None)()
        try:
            self._path.write_bytes(bytes(2 << 20))
        except OSError as error:
            self._path.unlink()
            return SaveResult(7, ok=False, cause="enospc", error=str(error))
        return SaveResult(7, ok=True)


@pytest.fixture(name="disk")
def make_disk(tmp_path: Path) -> Iterator[Path]:
    yield from small_disk(tmp_path / "disk", mib=8)


def make(disk: Path, attempts: Attempts, *, is_last: bool, **waiting: Callable[[], object]) -> None:
    save = RequiredSave(CheckpointGroup(Alone()), disk)
    save.waiting = Waiting(**waiting)  # type: ignore[arg-type]  # of the tests here
    save.make(attempts, is_last=is_last)


def test_before_a_stop_there_are_two_attempts(disk: Path) -> None:
    fill(disk)
    attempts = Attempts(disk, {})
    with pytest.raises(StorageError, match=r"step 7 could not be saved: .*No space left"):
        make(disk, attempts, is_last=False)
    assert attempts.count == 2


def test_a_last_save_is_tried_as_soon_as_there_is_room(disk: Path) -> None:
    ballast = fill(disk)
    attempts = Attempts(disk, {})
    beats = itertools.count(1)

    def beat() -> None:
        if next(beats) == 2:
            ballast.unlink()

    make(disk, attempts, is_last=True, beat=beat, pause_seconds=lambda: 600.0)
    assert attempts.count == 3


def test_a_last_save_is_tried_after_each_pause(disk: Path) -> None:
    ballast = fill(disk)
    attempts = Attempts(disk, {5: ballast.unlink})
    make(disk, attempts, is_last=True, pause_seconds=lambda: 0.0)
    assert attempts.count == 5


def test_a_stop_has_a_last_save_tried_once_more(disk: Path) -> None:
    fill(disk)
    attempts = Attempts(disk, {})
    with pytest.raises(StorageError):
        make(disk, attempts, is_last=True, is_asked_to_stop=lambda: True)
    assert attempts.count == 3


def test_a_last_save_is_given_up_in_the_end(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer, "LONGEST_SECONDS", 0.1)
    fill(disk)
    attempts = Attempts(disk, {})
    with pytest.raises(StorageError):
        make(disk, attempts, is_last=True)
    assert attempts.count >= 3, "also once when the time is over"


def test_a_save_that_a_lost_rank_has_cut_is_not_tried_by_those_that_are_left(disk: Path) -> None:
    def attempt() -> SaveResult:
        return SaveResult(7, ok=False, cause="other", secondary=True)

    with pytest.raises(PeersLostError):
        RequiredSave(CheckpointGroup(Alone()), disk).make(attempt, is_last=True)
