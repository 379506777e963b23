"""Causes of workers' exits: from exit codes, recorded failures, and the agent's own signals."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdist_trainer.agent import exits
from kdist_trainer.agent.exits import (
    RECENT_SECONDS,
    ExitContext,
    OomKills,
    count_oom_kills,
    read_count,
)
from kdist_trainer.agent.monitor import WorkerMonitor
from kdist_trainer.config import Cause, Exit
from kdist_trainer.instrumentation.fault_handler import stacks_path
from kdist_trainer.ipc import failure, result
from kdist_trainer.processes.liveness import Call, Phase, RankSnapshot


def snapshot(step: int = -1, *, inside: bool = False) -> RankSnapshot:
    call = Call(3, 3, "all_reduce", "float32", 8, "8", "")
    return RankSnapshot(1, Phase.STEP, step, 0, call, inside=inside, generation=4, pid=1)


def context(
    scratch: Path, code: int, *, step: int = -1, inside: bool = False, **fields: Any
) -> ExitContext:
    return ExitContext(
        node="node-1",
        generation=4,
        scratch=scratch,
        global_ranks=[6, 7],
        exits={1: code},
        snapshots=[snapshot(), snapshot(step, inside=inside)],
        **fields,
    )


def record_of(scratch: Path, local_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record a failure as a rank of an agent's does."""
    monkeypatch.setenv("KDIST_SCRATCH", str(scratch))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    failure.record(ValueError("odd"))


@pytest.mark.parametrize(
    ("record", "is_late", "grace"),
    [
        ({"code": 0}, False, 60),
        ({"code": 75, "cause": "deadline"}, False, 60),
        ({"code": 75, "cause": "budget"}, False, 0),
        ({"code": 70, "cause": "user-code"}, True, 60),
        ({}, False, math.inf),
    ],
)
def test_ranks_may_save_where_another_node_has_ended_the_run_at_its_deadline(
    record: dict[str, Any], is_late: bool, grace: float
) -> None:
    node: Any = SimpleNamespace(
        agent_store=SimpleNamespace(run_result=lambda: record),
        config=SimpleNamespace(termination_grace_period_seconds=60),
        _is_past_deadline=is_late,
        _kill_at=math.inf,
    )
    WorkerMonitor._apply_run_result(node)
    assert node._kill_at == pytest.approx(time.monotonic() + grace, abs=10)


CODES = [
    (-9, {}, Cause.SIGNAL, Exit.PEERS_LOST, True),
    (-11, {}, Cause.SIGNAL, Exit.PEERS_LOST, True),
    (-9, {"out_of_memory": True}, Cause.OOM_HOST, Exit.HOST_OOM, True),
    (-15, {}, Cause.SIGNAL, Exit.PEERS_LOST, True),
    (-6, {}, Cause.SIGNAL, Exit.PEERS_LOST, True),
    (
        -6,
        {"inside": True},
        Cause.COLLECTIVE_TIMEOUT,
        Exit.HANG,
        False,
    ),
    (0, {}, Cause.USER_CODE, Exit.USER, True),
    (0, {"terminated": True}, Cause.USER_CODE, Exit.USER, True),
    (200, {}, Cause.UNKNOWN, Exit.PEERS_LOST, True),
    (1, {}, Cause.USER_CODE, Exit.USER, True),
    (127, {}, Cause.USER_CODE, Exit.USER, True),
    (128, {}, Cause.UNKNOWN, Exit.PEERS_LOST, True),
    (255, {}, Cause.SIGNAL, Exit.PEERS_LOST, True),
    (65, {}, Cause.DATA, Exit.DATA, True),
    (65, {"managed": False}, Cause.USER_CODE, Exit.USER, True),
    (71, {}, Cause.OOM_DEVICE, Exit.DEVICE_OOM, True),
    (203, {}, Cause.STORAGE, Exit.STORAGE, True),
    (201, {}, Cause.NODE_LOST, Exit.PEERS_LOST, False),
    (202, {}, Cause.COLLECTIVE_TIMEOUT, Exit.HANG, False),
    (201, {"managed": False}, Cause.UNKNOWN, Exit.PEERS_LOST, True),
]


@pytest.mark.parametrize(("code", "fields", "cause", "exit_code", "primary"), CODES)
def test_an_exit_code_alone_gives_a_cause(
    tmp_path: Path, code: int, fields: dict[str, Any], cause: Cause, exit_code: Exit, primary: bool
) -> None:
    (found,) = exits.find_failures(context(tmp_path, code, step=12, **fields)).values()
    assert (found.cause, found.code, found.primary) == (cause, exit_code, primary)
    assert (found.rank, found.node, found.generation, found.step) == (7, "node-1", 4, 12)


def test_what_the_rank_left_says_more_than_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_of(tmp_path, 1, monkeypatch)
    (found,) = exits.find_failures(context(tmp_path, -6, step=3, inside=True)).values()
    assert found.cause == Cause.USER_CODE
    assert found.message == "ValueError: odd"
    assert found.step == 3
    assert found.collective == "all_reduce(float32[8]) #3"
    assert (found.rank, found.generation) == (7, 4)


@pytest.mark.parametrize(
    ("code", "recorded", "terminated", "outcome"),
    [
        (0, "done", True, "done"),
        (0, "stopped", False, "stopped"),
        (-9, "done", False, "done"),
        (-6, "stopped", False, "stopped"),
        (-15, None, True, "stopped"),
        (143, None, True, "stopped"),
    ],
)
def test_ends_that_are_no_failures(
    tmp_path: Path, code: int, recorded: str | None, terminated: bool, outcome: str
) -> None:
    if recorded is not None:
        (tmp_path / "rank-1.result").write_text(json.dumps({"outcome": recorded}))
    ended = context(tmp_path, code, terminated=terminated)
    assert exits.find_outcomes(ended) == {1: outcome}
    assert not exits.find_failures(ended)


@pytest.mark.parametrize(
    ("code", "recorded", "terminated", "outcome"),
    [
        (0, None, False, "done"),
        (0, None, True, "stopped"),
        (0, "done", False, "done"),
        (0, "done", True, "stopped"),
        (-15, None, True, "stopped"),
        (200, None, False, "stopped"),
    ],
)
def test_the_exit_code_of_a_script_speaks_for_it_as_under_torchrun(
    tmp_path: Path, code: int, recorded: str | None, terminated: bool, outcome: str
) -> None:
    if recorded is not None:
        result.write_result(recorded, scratch=tmp_path, local_rank=1)
    ended = context(tmp_path, code, terminated=terminated, managed=False)
    assert exits.find_outcomes(ended) == {1: outcome}
    assert not exits.find_failures(ended)


def test_what_a_rank_has_left_counts_before_its_process_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_of(tmp_path, 0, monkeypatch)
    (found,) = exits.recorded_failures(context(tmp_path, -9)).values()
    assert (found.rank, found.message) == (6, "ValueError: odd")


def test_what_an_earlier_generation_left_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_of(tmp_path, 1, monkeypatch)
    (tmp_path / "rank-0.result").write_text('{"outcome": "done"}')
    stacks_path(tmp_path, 0).touch()
    exits.reset_files(tmp_path, 2)
    assert [
        (failure.read(tmp_path, rank), result.read_result(tmp_path, rank)) for rank in (0, 1)
    ] == [(None, None)] * 2
    assert not list(tmp_path.glob("*.stacks"))


def test_the_kernels_count_of_oom_kills_is_read_in_its_three_forms(tmp_path: Path) -> None:
    path = tmp_path / "counter"
    for text, count in (
        ("low 0\nhigh 0\nmax 4\noom 2\noom_kill 3\noom_group_kill 0\n", 3),
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n", 1),
        ("nr_free_pages 5\noom_kill 12\n", 12),
        ("oom_kill\n", None),
        ("", None),
    ):
        path.write_text(text)
        assert read_count(path) == count
    assert read_count(tmp_path / "missing") is None
    assert count_oom_kills() >= 0


def test_an_oom_kill_of_long_ago_explains_no_sigkill_of_today() -> None:
    now, count = [1000.0], [5]
    kills = OomKills(lambda: count[0], lambda: now[0])

    def pass_seconds(seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            now[0] += 0.1
            kills.poll()

    assert not kills.recent(), "what was counted before the group began"
    pass_seconds(30)
    count[0] += 1
    assert kills.recent()
    pass_seconds(RECENT_SECONDS / 2)
    assert kills.recent(), "a process with much memory takes its time to end"
    pass_seconds(RECENT_SECONDS)
    assert not kills.recent()
    count[0] += 1
    assert kills.recent()
    now[0] += 3600
    assert kills.recent(), "an agent that was stopped itself has seen nothing since"
