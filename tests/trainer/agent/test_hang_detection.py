"""The watchdog: who stands still, since when, and who is to blame."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from signal import SIGSTOP
from typing import Any

import pytest

from kdist_trainer.agent.hangs import (
    Watchdog,
    dump_stacks,
    find_hung_rank,
)
from kdist_trainer.processes.liveness import Heartbeat, Phase, heartbeat_path
from kdist_trainer.processes.process_tree import is_stopped


class Clock:
    """A monotonic clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("kdist_trainer.agent.hangs.time.monotonic", lambda: self.now)

    def pass_by(self, seconds: float, watchdog: Watchdog) -> list[int]:
        """Let time pass with a poll every half second; returns what the last poll found."""
        found: list[int] = []
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            found = watchdog.poll()
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def watch(
    scratch: Path, *, from_start: bool = True, hang: float = 10
) -> tuple[Watchdog, list[Heartbeat]]:
    watchdog = Watchdog(scratch, ranks=2, hang_seconds=hang, from_start=from_start)
    return watchdog, [Heartbeat.attach(heartbeat_path(scratch, rank)) for rank in range(2)]


def test_a_rank_is_found_when_it_stood_still_for_longer_than_allowed(
    tmp_path: Path, clock: Clock
) -> None:
    watchdog, (first, second) = watch(tmp_path)
    for rank in (first, second):
        rank.beat(Phase.STEP, 1)
    assert clock.pass_by(9, watchdog) == []
    first.beat(Phase.STEP, 2)
    assert clock.pass_by(3, watchdog) == [1]
    assert watchdog.last_step() == 2
    second.beat(Phase.STEP, 2)
    assert clock.pass_by(3, watchdog) == []


def test_ranks_wait_only_while_all_of_them_are_in_one_collective_or_meet_their_group(
    tmp_path: Path, clock: Clock
) -> None:
    watchdog, ranks = watch(tmp_path)
    assert watchdog.has_no_heartbeats()
    for rank in ranks:
        rank.beat(Phase.RENDEZVOUS, -1)
    clock.pass_by(6, watchdog)
    assert not watchdog.has_no_heartbeats()
    assert 5 < watchdog.waited_seconds() <= 6
    for rank in ranks:
        rank.beat(Phase.STEP, 1)
    clock.pass_by(6, watchdog)
    assert (watchdog.waited_seconds(), watchdog.longest_wait) == (0, 0), (
        "a step computes; to meet the group takes its time"
    )
    ranks[0].enter("all_reduce", 8, "float32")
    clock.pass_by(6, watchdog)
    assert watchdog.waited_seconds() == 0, "one of them computes"
    ranks[1].enter("all_reduce", 8, "float32")
    clock.pass_by(4, watchdog)
    assert 3 < watchdog.waited_seconds() <= 4
    ranks[0].enter("all_reduce", 8, "float32")
    clock.pass_by(1, watchdog)
    assert watchdog.waited_seconds() < 1, "another collective is another wait"
    assert 9 < watchdog.longest_wait <= 10


def test_of_a_script_without_beats_the_waits_are_known_and_nothing_else_is_held_against_it(
    tmp_path: Path, clock: Clock
) -> None:
    watchdog, ranks = watch(tmp_path, from_start=False)
    for rank in ranks:
        rank.enter("all_reduce", 8, "float32")
    clock.pass_by(6, watchdog)
    assert watchdog.has_no_heartbeats()
    assert 5 < watchdog.waited_seconds() <= 6
    for rank in ranks:
        rank.leave(rank.entered - 1)
    clock.pass_by(1, watchdog)
    assert watchdog.waited_seconds() > 5, "it was an earlier one that has ended"
    for rank in ranks:
        rank.leave(rank.entered)
    assert clock.pass_by(100, watchdog) == [], "it computes for as long as it likes"
    assert watchdog.waited_seconds() == 0
    assert 6 < watchdog.longest_wait <= 7
    states = watchdog.rank_states([0, 1], {0: 1, 1: 1}, node="", nodes=1)
    calls = [state["calls"] for state in states]
    assert calls == [[], []], "its ranks may differ"


@pytest.mark.parametrize("phase", [Phase.START, Phase.INIT, Phase.RESTORE, Phase.SAVE])
def test_slow_phases_may_take_a_minute_more(tmp_path: Path, clock: Clock, phase: Phase) -> None:
    watchdog, ranks = watch(tmp_path)
    for rank in ranks:
        rank.beat(phase, -1)
    assert clock.pass_by(69, watchdog) == []
    assert clock.pass_by(3, watchdog) == [0, 1]


def test_ranks_of_a_training_are_watched_from_the_start_and_scripts_from_their_first_beat(
    tmp_path: Path, clock: Clock
) -> None:
    watchdog, _ = watch(tmp_path)
    assert clock.pass_by(75, watchdog) == [0, 1], "a rank that never beats hangs on its way"
    watchdog, (first, _) = watch(tmp_path, from_start=False)
    assert clock.pass_by(200, watchdog) == []
    first.beat(Phase.STEP, 1)
    assert clock.pass_by(12, watchdog) == [0]


def test_an_agent_that_was_paused_itself_accuses_nobody(tmp_path: Path, clock: Clock) -> None:
    watchdog, (first, second) = watch(tmp_path)
    first.beat(Phase.STEP, 1)
    second.beat(Phase.STEP, 1)
    watchdog.poll()
    clock.now += 10_000
    assert watchdog.poll() == []


def state(rank: int, **fields: Any) -> dict[str, Any]:
    return {"rank": rank, "stopped": False, "inside": True, "sequence": 9, "step": 5, **fields}


@pytest.mark.parametrize(
    ("states", "rank_at_fault"),
    [
        ([state(0), state(1, inside=False), state(2)], 1),
        ([state(0), state(1), state(2, sequence=8)], 2),
        ([state(0, inside=False), state(1, stopped=True)], 1),
        ([state(0, inside=False, step=6), state(1, inside=False)], 1),
        ([state(0), state(1)], 0),
        ([], None),
    ],
)
def test_to_blame_is_who_is_stopped_or_in_no_collective_or_in_an_earlier_one(
    states: list[Any], rank_at_fault: int | None
) -> None:
    assert find_hung_rank(states) == rank_at_fault


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
