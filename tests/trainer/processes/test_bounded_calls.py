"""Calls of storage that may not answer: here a pipe to which nobody writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kdist_trainer.processes.threads import BoundedCalls
from tests.patience import soon


@pytest.fixture(name="pipe")
def make_pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_what_does_not_answer_is_let_go_on_and_its_result_fetched_later(pipe: Path) -> None:
    calls = BoundedCalls("the pipe", seconds=0.05)
    with pytest.raises(TimeoutError, match="the pipe does not answer"):
        calls.resume(pipe.read_text)
    assert not calls.has_answered
    with pytest.raises(TimeoutError):
        calls.resume(pipe.read_text)
    pipe.write_text("late")
    assert soon(lambda: calls.has_answered)
    assert calls.resume(pipe.read_text) == "late"
    assert not calls.has_answered


def test_another_call_is_begun_only_after_the_one_that_hangs_has_ended(pipe: Path) -> None:
    calls = BoundedCalls("the pipe", seconds=0.05)
    begun = []
    with pytest.raises(TimeoutError):
        calls.call(pipe.read_text)
    with pytest.raises(TimeoutError):
        calls.call(lambda: begun.append(1))
    assert not begun
    pipe.write_text("nobody wants it any more")
    assert soon(lambda: calls.has_answered)
    assert calls.call(lambda: 7) == 7


def test_an_error_is_the_callers(tmp_path: Path) -> None:
    calls = BoundedCalls("the folder")
    with pytest.raises(FileNotFoundError):
        calls.call((tmp_path / "none").read_text)
    assert calls.call(lambda: 7) == 7
