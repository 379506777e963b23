"""The number of nodes changes while the job runs: agents take new bounds from train.json, nodes
join and leave by plan.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from kdist_trainer.agent.settings import NodeLimits
from kdist_trainer.config import Nodes, TrainConfig
from tests.trainer.agent.lab import Lab


def rewrite(lab: Lab, least: int, most: int) -> None:
    """Put another train.json in the place of the old one, as the kubelet does."""
    path = lab.folder / "train.json"
    fresh = path.with_suffix(".new")
    fresh.write_text(
        json.dumps({**json.loads(path.read_text()), "nodes": {"min": least, "max": most}})
    )
    fresh.replace(path)


def shown(lab: Lab, node: str) -> dict[str, int]:
    """The bounds in the status of a node's agent."""
    port = json.loads((lab.folder / node / "agent.json").read_text())["port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=60) as response:
        nodes: dict[str, int] = json.load(response)["nodes"]
    return nodes


def test_bounds_follow_the_file_and_outlast_one_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    document = {"name": "job", "nodes": {"min": 1, "max": 2}, "script": {"path": "train.py"}}
    path.write_text(json.dumps(document))
    bounds = NodeLimits(path, Nodes(min=1, max=2))
    path.write_text(json.dumps({**document, "nodes": {"min": 2, "max": 30}}))
    assert bounds.current() == Nodes(min=2, max=30)
    path.write_text("{")
    assert bounds.current() == Nodes(min=2, max=30)
    path.unlink()
    assert bounds.current() == Nodes(min=2, max=30)


def test_in_a_cluster_the_nodes_stand_next_to_a_train_json_that_never_changes(
    tmp_path: Path,
) -> None:
    path, nodes = tmp_path / "train.json", tmp_path / "nodes.json"
    path.write_text(json.dumps({"name": "job", "script": {"path": "train.py"}}))
    nodes.write_text(json.dumps({"min": 1, "max": 2}))
    config = TrainConfig.read(path)
    assert config.nodes == Nodes(min=1, max=2)
    bounds = NodeLimits(path, config.nodes)
    nodes.write_text(json.dumps({"min": 2, "max": 30}))
    assert bounds.current() == TrainConfig.read(path).nodes == Nodes(min=2, max=30)


@pytest.mark.sampled
@pytest.mark.processes
def test_nodes_join_beyond_the_old_bounds_and_leave_below_them_without_a_failure(
    tmp_path: Path,
) -> None:
    with Lab(tmp_path, nodes={"min": 2, "max": 2}) as lab:
        lab.start("node-0", "node-1")
        lab.stepping(1, world=2)
        rewrite(lab, 1, 3)
        lab.wait(
            lambda: shown(lab, "node-0") == shown(lab, "node-1") == {"min": 1, "max": 3},
            "the new bounds",
        )
        lab.start("node-2")
        lab.stepping(2, world=3)
        assert {rank["kdist_nodes"] for rank in lab.ranks(2).values()} == {"1:3"}
        for node in ("node-1", "node-2"):
            lab.agents[node].terminate()
        assert [lab.end(node) for node in ("node-1", "node-2")] == [200, 200]
        lab.wait(
            lambda: lab.ledger("generation")[-1]["nodes"] == ["node-0"], "that node-0 goes on alone"
        )
        last = lab.ledger("generation")[-1]["generation"]
        lab.stepping(last, world=1)
        rewrite(lab, 1, 1)
        before = len(lab.events("node-1", "rendezvous-started"))
        lab.start("node-1")
        lab.wait(
            lambda: len(lab.events("node-1", "rendezvous-started")) > before,
            "a node above the new maximum",
        )
        lab.tell("finish")
        assert [lab.end("node-0"), lab.end("node-1")] == [0, 0]
        assert not lab.events("node-1", "rendezvous-retried")
        reasons = [one["reason"] for one in lab.ledger("generation")]
        assert reasons[:2] == ["start", "join"]
        assert "failure" not in reasons


@pytest.mark.sampled
@pytest.mark.processes
def test_nodes_wait_for_others_to_join_with_them_until_the_group_is_complete(
    tmp_path: Path,
) -> None:
    with Lab(tmp_path, nodes={"min": 1, "max": 3}, joinWindowSeconds=600) as lab:
        lab.start("node-0")
        lab.stepping(1, world=1)
        lab.start("node-1")
        lab.wait(lambda: lab.events("node-1", "rendezvous-started"), "a node that waits")
        lab.start("node-2")
        lab.stepping(2, world=3)
        assert [one["reason"] for one in lab.ledger("generation")] == ["start", "join"]
