"""The heartbeat: what a rank writes, its agent reads, also after the rank was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kdist_trainer.processes.liveness import Heartbeat, Phase


def test_the_agent_reads_what_the_rank_beats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Heartbeat.create(tmp_path / "beat")
    assert (agent.read().count, agent.read().phase, agent.read().step) == (0, Phase.START, -1)
    monkeypatch.setenv("KDIST_GENERATION", "4")
    rank = Heartbeat.attach(tmp_path / "beat")
    for phase in Phase:
        rank.beat(phase, 7)
        assert (agent.read().phase, agent.read().step) == (phase, 7)
    assert agent.read().count == len(Phase)
    assert agent.read().generation == 4
    assert agent.read().pid > 0


def test_the_collective_that_a_rank_is_in_is_named_until_it_returns(tmp_path: Path) -> None:
    agent, rank = Heartbeat.create(tmp_path / "beat"), Heartbeat.attach(tmp_path / "beat")
    assert agent.read().collective is None
    rank.enter("all_reduce", 1024, "torch.float32")
    assert agent.read().collective == "all_reduce(float32[1024]) #1"
    rank.leave()
    assert agent.read().collective is None
    rank.enter("broadcast", 2, "torch.int64")
    assert agent.read().collective == "broadcast(int64[2]) #2"


def test_the_last_beat_outlives_a_rank_that_aborts_inside_a_collective(tmp_path: Path) -> None:
    agent = Heartbeat.create(tmp_path / "beat")
    code = (
        "import os, sys; from pathlib import Path; from kdist_trainer.processes.liveness import "
        "Heartbeat, Phase\n"
    )
    code += "rank = Heartbeat.attach(Path(sys.argv[1])); rank.beat(Phase.STEP, 41)\n"
    code += "rank.enter('all_reduce', 8, 'float32'); os.abort()"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "beat")], check=False, timeout=60
    )
    assert ended.returncode == -6
    beat = agent.read()
    assert (beat.step, beat.phase, beat.collective) == (41, Phase.STEP, "all_reduce(float32[8]) #1")


def test_a_rank_of_an_earlier_generation_cannot_write_into_the_new_heartbeat(
    tmp_path: Path,
) -> None:
    Heartbeat.create(tmp_path / "beat")
    stale = Heartbeat.attach(tmp_path / "beat")
    agent = Heartbeat.create(tmp_path / "beat")
    stale.beat(Phase.STEP, 99)
    assert agent.read().count == 0


def test_readings_are_whole_while_the_rank_writes(tmp_path: Path) -> None:
    agent = Heartbeat.create(tmp_path / "beat")
    code = (
        "import sys; from pathlib import Path; "
        "from kdist_trainer.processes.liveness import Heartbeat, Phase\n"
    )
    code += (
        "rank = Heartbeat.attach(Path(sys.argv[1])); [rank.beat(Phase.STEP, step) for step in "
        "range(1, 300001)]"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "beat")])
    last = 0
    while writer.poll() is None:
        beat = agent.read()
        assert beat.count == max(beat.step, 0), "each beat's step is its number"
        assert beat.count >= last
        last = beat.count
    assert agent.read().count == 300_000


def test_a_rank_that_has_formed_a_group_has_done_so_for_good(tmp_path: Path) -> None:
    agent, rank = Heartbeat.create(tmp_path / "beat"), Heartbeat(tmp_path / "beat")
    assert agent.read().group is None
    for group, known in ((False, False), (None, None), (False, False), (True, True), (None, True)):
        rank.mark_group(group)
        assert agent.read().group is known
    assert agent.read().has_checkpoints is False
