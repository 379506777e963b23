"""A process that saves is killed at, or refused, its N-th write, fsync, rename …: old or new, to
the bit, never garbage.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kdist_trainer.checkpoint.manifest import CheckpointDirectory
from tests.trainer.checkpoint.states import load, open_store, resumable_step, save

pytestmark = pytest.mark.processes
RARE = [pytest.mark.chaos, pytest.mark.wide]

OLD, NEW, NEXT = 1, 2, 3
ROOT = Path(__file__).parents[3]
SMALL_BUFFER = 2048
MOST_CALLS = 1000
CALLS = {
    "write": "write",
    "fsync": "fsync",
    "rename": "?rename,?renameat,?renameat2",
    "open": "?open,?openat",
    "mkdir": "?mkdir,?mkdirat",
    "unlink": "?unlink,?unlinkat,?rmdir",
}


class Saver:
    """The process of saver.py; each case is a fork of it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.checkpoint.saver"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def save(
        self,
        root: Path,
        *inject: str,
        steps: tuple[int, ...] = (NEW,),
        keep: int = 3,
        watch_load: bool = False,
    ) -> dict[str, Any]:
        """Save `steps` in `root`, the first one under these injections; `killed`, and a result for
        each save that ended.
        """
        request: dict[str, Any] = {
            "root": str(root),
            "inject": inject,
            "steps": steps,
            "generation": 2,
            "keep": keep,
        }
        request |= {"buffer": SMALL_BUFFER, "watch_load": watch_load}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        assert answer["killed"] or answer["code"] == 0, answer
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def saver(program: Callable[[str], str]) -> Iterator[Saver]:
    program("strace")
    saver = Saver()
    yield saver
    saver.close()


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint of step OLD, left by the group of generation 1."""
    root = tmp_path_factory.mktemp("old") / "checkpoints"
    store = open_store(root)
    load(store)
    assert save(store, OLD).ok
    return root


def copy_of(old: Path, tmp_path: Path, name: str) -> Path:
    return Path(shutil.copytree(old, tmp_path / name))


def kill_at_every(call: str, saver: Saver, old: Path, tmp_path: Path, *, keep: int) -> list[int]:
    """Kill the save at its N-th `call`, N = 1, 2, … until it survives; returns the steps that could
    be resumed from.
    """
    outcomes = []
    number = 1
    while True:
        root = copy_of(old, tmp_path, f"{call}-{number}")
        calls = CALLS[call]
        answer = saver.save(root, f"{calls}:signal=SIGKILL:when={number}", keep=keep)
        acknowledged = CheckpointDirectory(root).named() == f"step-{NEW:08d}-e2"
        step = resumable_step(root)
        assert step in (OLD, NEW), f"killed at {call} {number}: {step}"
        assert step == NEW or not acknowledged, (
            f"killed at {call} {number}: what was acknowledged is lost"
        )
        outcomes.append(step)
        assert CheckpointDirectory(root).damaged() == [], (
            f"killed at {call} {number}: a half checkpoint carries a whole one's name"
        )
        assert CheckpointDirectory(root).temporary() == [], "the next group removes stale files"
        shutil.rmtree(root)
        if not answer["killed"]:
            assert step == NEW
            return outcomes
        number += 1


@pytest.mark.sampled
@pytest.mark.parametrize(
    "call",
    [call if call == "rename" else pytest.param(call, marks=pytest.mark.chaos) for call in CALLS],
)
@pytest.mark.parametrize("keep", [3, pytest.param(1, marks=RARE)])
def test_killed_at_every_single_call_a_save_leaves_old_or_new(
    saver: Saver, old: Path, tmp_path: Path, call: str, keep: int
) -> None:
    outcomes = kill_at_every(call, saver, old, tmp_path, keep=keep)
    assert outcomes == sorted(outcomes), "once the new one can be resumed from, it stays so"
    assert set(outcomes) == {OLD, NEW} or call == "unlink"


def fail_at_every(
    call: str, error: str, cause: str, saver: Saver, old: Path, tmp_path: Path
) -> int:
    """Let the N-th `call` of a save fail, N = 1, 2, … until none does; returns how many saves
    failed.
    """
    failed = 0
    number = 1
    while True:
        root = copy_of(old, tmp_path, f"{call}-{number}")
        answer = saver.save(root, f"{CALLS[call]}:error={error}:when={number}", steps=(NEW, NEXT))
        first, second = answer["results"]
        assert second["ok"], f"{error} at {call} {number}: the next save must not suffer: {second}"
        if first["ok"]:
            assert [one.step for one in CheckpointDirectory(root).committed()] == [NEXT, NEW, OLD]
        else:
            failed += 1
            assert first["cause"] == cause, first
            assert CheckpointDirectory(root).temporary() == [], (
                f"{error} at {call} {number}: the partial save is not removed"
            )
        assert resumable_step(root) == NEXT
        assert load_step(root, OLD), "the old checkpoint is untouched"
        shutil.rmtree(root)
        if first["ok"] and number > 1 and failed:
            return failed
        number += 1
        assert number < MOST_CALLS, f"no save was refused by {error} at {call}"


def load_step(root: Path, step: int) -> bool:
    """Whether, with all newer ones gone, `step` is what a group resumes from."""
    for one in CheckpointDirectory(root).committed():
        if one.step > step:
            shutil.rmtree(root / one.name)
    (root / "lock").rename(root / "old-lock")
    return resumable_step(root) == step


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("call", "error", "cause"),
    [
        ("rename", "EIO", "eio"),
        ("mkdir", "EROFS", "other"),
        pytest.param("write", "ENOSPC", "enospc", marks=pytest.mark.chaos),
        pytest.param("fsync", "EIO", "eio", marks=pytest.mark.chaos),
        pytest.param("write", "EIO", "eio", marks=RARE),
        pytest.param("write", "EDQUOT", "enospc", marks=RARE),
        pytest.param("fsync", "ENOSPC", "enospc", marks=RARE),
        pytest.param("rename", "ENOSPC", "enospc", marks=RARE),
        pytest.param("mkdir", "ENOSPC", "enospc", marks=RARE),
    ],
)
def test_a_disk_that_refuses_any_single_call_fails_that_save_only(
    saver: Saver, old: Path, tmp_path: Path, call: str, error: str, cause: str
) -> None:
    assert fail_at_every(call, error, cause, saver, old, tmp_path) > 0


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (1, {(None,), (NEW,)}),
        (2, {(None,), (OLD, (NEW, "eio")), (NEW,)}),
    ],
)
def test_what_the_disk_only_fails_to_read_is_read_again_then_passed_over_but_stays_in_its_place(
    saver: Saver, old: Path, tmp_path: Path, times: int, expected: set[tuple[object, ...]]
) -> None:
    both = copy_of(old, tmp_path, "both")
    assert not saver.save(both)["killed"]
    shutil.rmtree(both / "lock")  # so that the same generation may come again
    outcomes = set()
    for number in range(1, MOST_CALLS, times):
        root = copy_of(both, tmp_path, f"read-{number}")
        inject = f"read:error=EIO:when={number}..{number + times - 1}"
        (result,) = saver.save(root, inject, steps=(), watch_load=True)["results"]
        fallbacks = [(one["step"], one["cause"]) for one in result.get("fallbacks", [])]
        outcomes.add((result.get("loaded"), *fallbacks))
        assert CheckpointDirectory(root).damaged() == [], (
            "a disk that does not answer is no proof of damage"
        )
        assert [one.step for one in CheckpointDirectory(root).committed()] == [NEW, OLD]
        shutil.rmtree(root)
        if result == {"loaded": NEW, "fallbacks": []} and number > 30:
            break
    assert outcomes == expected, (
        "None: the lock could not be read, the group fails and another one tries"
    )
