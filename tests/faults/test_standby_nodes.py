"""A node that stands by (`nodes.standby`): it waits without disturbing anyone, takes the place of
one that is lost, and ends with the others.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .test_in_place import assert_nothing_was_repeated, describe, wait_for_generation
from .training_run import TrainingRun, kill

pytestmark = pytest.mark.processes
NODES = {"min": 2, "max": 2, "standby": 1}


def find_standby_node(run: TrainingRun) -> str:
    """The node that has never been in a group and stands by with a rank that is ready."""

    def is_ready(node: str) -> bool:
        names = {event["event"] for event in run.log(node)}
        return {"node-standby", "worker-prepared"} <= names and "rendezvous-completed" not in names

    found: str = run.wait_until(
        lambda: next((node for node in run.agents() if is_ready(node)), ""), "a node that stands by"
    )
    return found


def read_status(run: TrainingRun) -> dict[str, Any]:
    command = [sys.executable, "-m", "kdist", "status", run.name, "--local", "-o", "json"]
    environment = {**os.environ, "KDIST_HOME": str(run.home / ".kdist")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    status: dict[str, Any] = json.loads(done.stdout)
    return status


@pytest.mark.sampled
def test_a_node_that_stands_by_takes_the_place_of_one_that_is_lost(tmp_path: Path) -> None:
    job = describe("standby", nodes=NODES, procsPerNode=1, train={"epochs": 10_000})
    with TrainingRun(tmp_path, job) as run:
        spare = find_standby_node(run)
        wait_for_generation(run, 1, world_size=2)
        ranks = {rank.node: rank.pid for rank in run.ranks()}
        status = read_status(run)
        assert (status["phase"], status["nodes"]["ready"]) == ("Running", 2)
        states = {pod["name"]: pod["state"] for pod in status["pods"]}
        assert [node for node, state in states.items() if state == "Standby"] == [spare]
        survivor, lost = sorted({"node-0", "node-1", "node-2"} - {spare})
        agent = run.agents()[lost]
        run.process.send_signal(signal.SIGSTOP)  # nobody starts the lost agent again
        kill(agent)
        wait_for_generation(run, 2, world_size=2)
        assert {rank.node for rank in run.ranks()} >= {survivor, spare}
        assert ranks[survivor] in {rank.pid for rank in run.ranks()}
        run.process.send_signal(signal.SIGCONT)
        run.wait_until(
            lambda: run.log(lost)[-1]["event"] == "node-standby", "the lost node to stand by"
        )
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output()
    assert run.events("generation")[-1]["generation"] == 2
    assert_nothing_was_repeated(run)


@pytest.mark.sampled
def test_a_node_that_was_never_needed_ends_with_the_run(tmp_path: Path) -> None:
    job = describe("standby", nodes=NODES, procsPerNode=1, train={"epochs": 1})
    with TrainingRun(tmp_path, job) as run:
        assert run.wait() == 0, run.output()
    records = [json.loads(path.read_text()) for path in run.folder.glob("node-*/exit.json")]
    assert [record["code"] for record in records] == [0, 0, 0]
