"""Workers that fail before they have a group: the run ends, or goes on, as if they had been started
in the group.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from kdist_trainer.config import Exit

from .test_in_place import (
    assert_nothing_was_repeated,
    describe,
    wait_for_generation,
)
from .training_run import TrainingRun, kill


def describe_late(name: str, orders: Path, **changes: Any) -> dict[str, Any]:
    train = {"workload": "late:Late", "epochs": 10_000, "options": {"orders": str(orders)}}
    train |= changes.pop("train", {})
    return describe(name, train=train, code=str(Path(__file__).parent / "code"), **changes)


def give_order(orders: Path, how: str, *, node: str, waiting: bool) -> None:
    (orders / "fail").write_text(json.dumps({"how": how, "node": node, "waiting": waiting}))


def lose_node(run: TrainingRun) -> None:
    """Kill node-1; the launcher is stopped, so that nobody starts it again."""
    wait_for_generation(run, 1, world_size=2)
    lost = [run.agents()["node-1"]]
    lost += [rank.pid for rank in run.ranks() if rank.node == "node-1"]
    run.process.send_signal(signal.SIGSTOP)
    for pid in lost:
        kill(pid)
    wait_for_generation(run, 2, world_size=1)


def fail_on_return(home: Path, how: str, recovery: str) -> dict[str, Any]:
    """What is recorded of a run whose second node fails when it returns."""
    home.mkdir()
    job = describe_late(
        "late",
        home,
        nodes={"min": 1, "max": 2},
        procsPerNode=1,
        train={"recovery": recovery, "checkpoint": {"every": {"steps": 20}}},
    )
    with TrainingRun(home, job) as run:
        lose_node(run)
        give_order(home, how, node="node-1", waiting=False)
        run.process.send_signal(signal.SIGCONT)
        code = run.wait()
        failed = run.events("failed")[-1]
        record = json.loads((run.folder / "node-1" / "exit.json").read_text())
    known = ("cause", "code", "message", "rank", "node", "place", "outcome")
    return {
        "code": code,
        "event": {key: failed[key] for key in ("cause", "code", "message")},
        "record": {key: record.get(key) for key in known},
        "restarts": [event["reason"] for event in run.events("generation")],
    }


@pytest.mark.sampled
@pytest.mark.chaos
@pytest.mark.processes
@pytest.mark.parametrize("how", ["raise", "exit"])
def test_a_newcomer_that_fails_is_reported_as_if_it_had_failed_in_the_group(
    how: str, tmp_path: Path
) -> None:
    early = fail_on_return(tmp_path / "early", how, "auto")
    assert early == fail_on_return(tmp_path / "in-group", how, "restart")
    assert early["event"]["code"] == Exit.USER
    assert "ordered to fail" in early["event"]["message"] or how == "exit"


@pytest.mark.sampled
@pytest.mark.processes
def test_a_newcomer_that_crashes_only_without_a_group_is_started_again_in_it(
    tmp_path: Path,
) -> None:
    job = describe_late("late", tmp_path, nodes={"min": 1, "max": 2}, procsPerNode=1)
    with TrainingRun(tmp_path, job) as run:
        lose_node(run)
        give_order(tmp_path, "exit", node="node-1", waiting=True)
        run.process.send_signal(signal.SIGCONT)
        wait_for_generation(run, 3, world_size=2)
        (failed,) = tmp_path.glob("failed-*")
        assert failed.read_text() == "1", "its rank was not foretold"
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output()
    assert_nothing_was_repeated(run)
