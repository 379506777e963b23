"""The watchdog: who stands still, since when, and who is to blame."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from signal import SIGSTOP
from typing import Any

import pytest

from kdist_trainer.agent.hang_detection import (
    Watchdog,
    dump_stacks,
    find_hung_rank,
    heartbeat_path,
    is_stopped,
)
from kdist_trainer.liveness import Heartbeat, Phase


class Clock:
    """A monotonic clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("kdist_trainer.agent.hang_detection.time.monotonic", lambda: self.now)

    def pass_by(self, seconds: float, dog: Watchdog) -> list[int]:
        """Let time pass with a look every half second; returns what the last look found."""
        found: list[int] = []
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            found = dog.look()
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def watch(
    scratch: Path, *, from_start: bool = True, hang: float = 10
) -> tuple[Watchdog, list[Heartbeat]]:
    dog = Watchdog(scratch, ranks=2, hang_seconds=hang, from_start=from_start)
    return dog, [Heartbeat.attach(heartbeat_path(scratch, rank)) for rank in range(2)]


def test_a_rank_is_found_when_it_stood_still_for_longer_than_allowed(
    tmp_path: Path, clock: Clock
) -> None:
    dog, (first, second) = watch(tmp_path)
    for rank in (first, second):
        rank.beat(Phase.STEP, 1)
    assert clock.pass_by(9, dog) == []
    first.beat(Phase.STEP, 2)
    assert clock.pass_by(3, dog) == [1]
    assert (dog.step(0), dog.step(1), dog.last_step()) == (2, 1, 2)
    second.beat(Phase.STEP, 2)
    assert clock.pass_by(3, dog) == []


def test_ranks_wait_only_while_all_of_them_are_in_one_collective_or_meet_their_group(
    tmp_path: Path, clock: Clock
) -> None:
    dog, ranks = watch(tmp_path)
    assert dog.never_beats()
    for rank in ranks:
        rank.beat(Phase.RENDEZVOUS, -1)
    clock.pass_by(6, dog)
    assert not dog.never_beats()
    assert 5 < dog.waited_seconds() <= 6
    for rank in ranks:
        rank.beat(Phase.STEP, 1)
    clock.pass_by(6, dog)
    assert (dog.waited_seconds(), dog.longest_wait) == (0, 0), (
        "a step computes; to meet the group takes its time"
    )
    ranks[0].enter("all_reduce", 8, "float32")
    clock.pass_by(6, dog)
    assert dog.waited_seconds() == 0, "one of them computes"
    ranks[1].enter("all_reduce", 8, "float32")
    clock.pass_by(4, dog)
    assert 3 < dog.waited_seconds() <= 4
    ranks[0].enter("all_reduce", 8, "float32")
    clock.pass_by(1, dog)
    assert dog.waited_seconds() < 1, "another collective is another wait"
    assert 9 < dog.longest_wait <= 10


def test_of_a_script_without_beats_the_waits_are_known_and_nothing_else_is_held_against_it(
    tmp_path: Path, clock: Clock
) -> None:
    dog, ranks = watch(tmp_path, from_start=False)
    for rank in ranks:
        rank.enter("all_reduce", 8, "float32")
    clock.pass_by(6, dog)
    assert dog.never_beats()
    assert 5 < dog.waited_seconds() <= 6
    for rank in ranks:
        rank.leave(rank.entered - 1)
    clock.pass_by(1, dog)
    assert dog.waited_seconds() > 5, "it was an earlier one that has ended"
    for rank in ranks:
        rank.leave(rank.entered)
    assert clock.pass_by(100, dog) == [], "it computes for as long as it likes"
    assert dog.waited_seconds() == 0
    assert 6 < dog.longest_wait <= 7
    assert dog.note(0, rank=0, pid=1)["calls"] == dog.note(1, rank=1, pid=1)["calls"] == [], (
        "its ranks may differ"
    )


@pytest.mark.parametrize("phase", [Phase.START, Phase.INIT, Phase.RESTORE, Phase.SAVE])
def test_slow_phases_may_take_a_minute_more(tmp_path: Path, clock: Clock, phase: Phase) -> None:
    dog, ranks = watch(tmp_path)
    for rank in ranks:
        rank.beat(phase, -1)
    assert clock.pass_by(69, dog) == []
    assert clock.pass_by(3, dog) == [0, 1]


def test_ranks_of_a_training_are_watched_from_the_start_and_scripts_from_their_first_beat(
    tmp_path: Path, clock: Clock
) -> None:
    dog, _ = watch(tmp_path)
    assert clock.pass_by(75, dog) == [0, 1], "a rank that never beats hangs on its way"
    dog, (first, _) = watch(tmp_path, from_start=False)
    assert clock.pass_by(200, dog) == []
    first.beat(Phase.STEP, 1)
    assert clock.pass_by(12, dog) == [0]


def test_an_agent_that_was_paused_itself_accuses_nobody(tmp_path: Path, clock: Clock) -> None:
    dog, (first, second) = watch(tmp_path)
    first.beat(Phase.STEP, 1)
    second.beat(Phase.STEP, 1)
    dog.look()
    clock.now += 10_000
    assert dog.look() == []


def note(rank: int, **fields: Any) -> dict[str, Any]:
    return {"rank": rank, "stopped": False, "inside": True, "sequence": 9, "step": 5, **fields}


@pytest.mark.parametrize(
    ("notes", "blamed"),
    [
        ([note(0), note(1, inside=False), note(2)], 1),
        ([note(0), note(1), note(2, sequence=8)], 2),
        ([note(0, inside=False), note(1, stopped=True)], 1),
        ([note(0, inside=False, step=6), note(1, inside=False)], 1),
        ([note(0), note(1)], 0),
        ([], None),
    ],
)
def test_to_blame_is_who_is_stopped_or_in_no_collective_or_in_an_earlier_one(
    notes: list[Any], blamed: int | None
) -> None:
    assert find_hung_rank(notes) == blamed


def test_stacks_of_a_stopped_rank_are_dumped(tmp_path: Path) -> None:
    code = "import faulthandler, signal, sys, time\n"
    code += "faulthandler.register(signal.SIGUSR2, file=open(sys.argv[1], 'w'))\n"
    code += (
        "def stand_still():\n    print('ready', flush=True)\n    time.sleep(600)\nstand_still()\n"
    )
    path = tmp_path / "stacks"
    rank = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    try:
        assert rank.stdout is not None
        rank.stdout.readline()
        rank.send_signal(SIGSTOP)
        while not is_stopped(rank.pid):
            assert rank.poll() is None
        lines = dump_stacks({0: rank.pid}, {0: path})[0]
        assert any("stand_still" in line for line in lines)
    finally:
        rank.kill()
        rank.wait()
