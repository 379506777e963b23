"""A script that has opened no checkpoints is started once: a failure, a lost node or an eviction
ends its job with its cause, also where an agent is replaced.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from kdist_trainer.agent.coordination import Generation
from kdist_trainer.agent.restart_policy import final_failure
from kdist_trainer.config import Cause, Exit, TrainConfig
from kdist_trainer.config.exit_codes import Fault
from kdist_trainer.config.train_config import RESTARTS
from kdist_trainer.ipc.failure import Failure
from tests.trainer.agent.lab import Lab, descendants, kill
from tests.trainer.rendezvous.api_server import ApiServer

pytestmark = pytest.mark.processes

PLAIN = """
import os, pathlib, time
folder, rank = pathlib.Path(os.environ["LAB"]), os.environ["RANK"]
with (folder / f"starts-{rank}").open("a") as starts:
    print(os.getpid(), file=starts)
while not (folder / "finish").exists():
    time.sleep(0.02)
"""
RESUMING = """
import torch
from kdist_trainer import Checkpointer
model = torch.nn.Linear(2, 2)
checkpointer = Checkpointer(model=model, optimizer=torch.optim.SGD(model.parameters()))
"""
NOT_AGAIN = "the script is not started again: no rank has opened a Checkpointer"


def started(lab: Lab, rank: int) -> list[int]:
    """The processes that have run the script as this rank, in order."""
    path = lab.folder / f"starts-{rank}"
    return list(map(int, path.read_text().split())) if path.exists() else []


def begin(folder: Path, *nodes: str, text: str = PLAIN, **job: Any) -> Lab:
    """The agents of a job with this script, once all ranks run it."""
    script = folder / "train.py"
    script.write_text(text)
    lab = Lab(folder, script={"path": str(script)}, **job)
    lab.start(*nodes)
    ranks = range(len(nodes) * job.get("procsPerNode", 1))
    lab.wait(lambda: all(started(lab, rank) for rank in ranks), "that the script runs")
    return lab


def assert_ended(lab: Lab, node: str, cause: str, words: str) -> None:
    assert lab.end(node) == 75
    record = lab.record(node)
    assert (record["cause"], record["code"], record["outcome"]) == (cause, 75, "failed")
    assert record["message"].startswith(words)
    assert NOT_AGAIN in record["message"]


def test_a_killed_rank_ends_a_script_that_cannot_continue(tmp_path: Path) -> None:
    with begin(tmp_path, "node-0", procsPerNode=2) as lab:
        kill(started(lab, 1)[0], signal.SIGKILL)
        assert_ended(lab, "node-0", "signal", "rank 1 was killed by SIGKILL")
        assert lab.record("node-0")["rank"] == 1
        assert lab.record("node-0")["message"].endswith("unless its arguments resume it")
        assert [len(started(lab, rank)) for rank in range(2)] == [1, 1]
        (rule,) = lab.events("node-0", "restarts-off")
        assert "maxRestarts" in rule["message"]
        assert not lab.events("node-0", "restarting")
        assert len(lab.ledger("failure")) == 1


def test_an_error_that_the_script_raises_keeps_its_code_and_its_words(tmp_path: Path) -> None:
    text = PLAIN.partition("while")[0] + "raise RuntimeError('no label map')"
    with begin(tmp_path, "node-0", text=text) as lab:
        assert lab.end("node-0") == 70
        record = lab.record("node-0")
        assert (record["cause"], record["code"]) == ("user_code", 70)
        assert record["message"].startswith("RuntimeError: no label map; ")
        assert NOT_AGAIN in record["message"]


def test_an_error_of_the_script_keeps_its_code_where_no_restart_is_allowed() -> None:
    error = Failure(Cause.USER_CODE, Exit.USER, True, "RuntimeError: a", fault=Fault.UNKNOWN)
    for count, expected in ((1, (Cause.USER_CODE, Exit.USER)), (2, (Cause.BUDGET, Exit.BUDGET))):
        counts = {RESTARTS: count}
        after = Generation(2, "failure", [], counts=counts, exhausted=True, over="limit reached")
        ended = final_failure(error, after, after.over, collectives=())
        assert (ended.cause, ended.code) == expected
        assert ended.message == (error.message if count == 1 else "limit reached")


@pytest.mark.sampled
def test_a_number_of_restarts_that_the_job_names_holds_for_it_too(tmp_path: Path) -> None:
    with begin(tmp_path, "node-0", maxRestarts=1) as lab:
        kill(started(lab, 0)[0], signal.SIGKILL)
        lab.wait(lambda: len(started(lab, 0)) == 2, "the restart")
        kill(started(lab, 0)[1], signal.SIGKILL)
        assert lab.end("node-0") == 75
        assert lab.record("node-0")["cause"] == "budget"
        assert not lab.events("node-0", "restarts-off")


@pytest.mark.sampled
def test_a_script_that_has_opened_its_checkpoints_is_started_again(tmp_path: Path) -> None:
    with begin(tmp_path, "node-0", text=RESUMING + PLAIN) as lab:
        lab.wait(lambda: lab.events("node-0", "checkpoints-opened"), "that the agent knows")
        kill(started(lab, 0)[0], signal.SIGKILL)
        lab.wait(lambda: len(started(lab, 0)) == 2, "the restart")
        lab.tell("finish")
        assert lab.end("node-0") == 0


@pytest.mark.sampled
def test_what_a_script_has_opened_outlives_its_agent(tmp_path: Path) -> None:
    with begin(tmp_path, "node-0", text=RESUMING + PLAIN) as lab:
        lab.wait(lambda: lab.events("node-0", "checkpoints-opened"), "that the agent knows")
        lose(lab, "node-0")
        lab.start("node-0")
        lab.wait(lambda: len(started(lab, 0)) == 2, "the restart")
        lab.tell("finish")
        assert lab.end("node-0") == 0


def lose(lab: Lab, node: str) -> None:
    """Kill a node's agent with all its processes, as a node that is switched off."""
    agent = lab.agents[node]
    for pid in [agent.pid, *descendants(agent.pid)]:
        kill(pid, signal.SIGKILL)
    agent.wait()


@pytest.mark.sampled
def test_an_agent_that_replaces_a_lost_one_ends_with_the_loss(tmp_path: Path) -> None:
    with begin(tmp_path, "node-0") as lab:
        lose(lab, "node-0")
        lab.start("node-0")
        assert_ended(lab, "node-0", "node_lost", "lost node-0")
        assert len(started(lab, 0)) == 1


@pytest.mark.sampled
def test_an_agent_that_replaces_an_evicted_one_ends_with_the_eviction(tmp_path: Path) -> None:
    with begin(tmp_path, "node-0") as lab:
        lab.agents["node-0"].terminate()
        assert lab.end("node-0") == 200
        (stopping,) = lab.events("node-0", "stopping")
        assert stopping["saves"] is False
        lab.start("node-0")
        assert_ended(lab, "node-0", "preempted", "a node was asked to end")
        assert len(started(lab, 0)) == 1


GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo")
"""
WAITING = """
import torch
while True:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
"""


@pytest.mark.sampled
def test_the_other_nodes_of_a_lost_one_end_at_once_and_its_successor_as_they_do(
    tmp_path: Path,
) -> None:
    text = GROUP + PLAIN.partition("while")[0] + WAITING
    with begin(tmp_path, "node-0", "node-1", text=text, nodes={"min": 2, "max": 2}) as lab:
        lose(lab, "node-1")
        assert_ended(lab, "node-0", "node_lost", "lost node-1")
        lab.start("node-1")
        assert lab.end("node-1") == 75
        assert lab.record("node-1")["message"] == lab.record("node-0")["message"]
        assert [len(started(lab, rank)) for rank in range(2)] == [1, 1]


@pytest.mark.sampled
def test_in_a_cluster_only_a_users_request_starts_it_again(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PLAIN)
    api = ApiServer(tmp_path / "account", tls=True)
    with Lab(tmp_path, rendezvous="kubernetes:ml/store", script={"path": str(script)}) as lab:
        lab.start("node-0", **api.environment())
        lab.wait(lambda: started(lab, 0), "that the script runs")
        lab.agents["node-0"].terminate()
        assert lab.end("node-0") == 200
        # what `kdist resume` writes
        api.document["metadata"]["annotations"] = {"kdist.dev/requested-at": "2026-01-01"}
        lab.start("node-0", **api.environment())
        lab.wait(lambda: len(started(lab, 0)) == 2, "the start that was asked for")
        lose(lab, "node-0")
        lab.start("node-0", **api.environment())
        assert_ended(lab, "node-0", "node_lost", "lost node-0")
    api.stop()


def test_restarts_that_no_job_names_are_in_no_document() -> None:
    text = '{"name": "job", "nodes": {"min": 1, "max": 1}, "script": {"path": "train.py"}}'
    config = TrainConfig.model_validate_json(text)
    assert "maxRestarts" not in config.to_document()
    assert "maxRestarts" not in config.to_json()
    assert TrainConfig.model_validate_json(config.to_json()).starts_once
    named = config.model_copy(update={"max_restarts": 10})
    assert named.to_document()["maxRestarts"] == 10
    assert not TrainConfig.model_validate_json(named.to_json()).starts_once
