"""Agents in a StatefulSet, which would restart whatever exits: those that have finished stay alive,
and report how the training ended.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kdist_trainer.checkpoint.manifest import CheckpointDirectory
from tests.trainer.agent.lab import Lab

pytestmark = pytest.mark.processes


def kept_alive(folder: Path, **job: Any) -> Lab:
    lab = Lab(folder, **job)
    lab.arguments = ["--on-finish", "keep-alive", "--termination-message", str(folder / "message")]
    return lab


def ask(lab: Lab, path: str) -> tuple[int, str]:
    """Status and body of a question to node-0's agent."""
    port = json.loads((lab.folder / "node-0" / "agent.json").read_text())["port"]
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as response:
            return int(response.status), response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def wait_until_kept_alive(lab: Lab) -> dict[str, Any]:
    """Wait until node-0 is kept alive; returns its status."""
    lab.wait(lambda: lab.events("node-0", "kept-alive"), "that node-0 is kept alive")
    assert ask(lab, "/readyz")[0] == 503
    assert ask(lab, "/healthz")[0] == 200, "the kubelet shall leave it alone"
    document: dict[str, Any] = json.loads(ask(lab, "/status")[1])
    assert json.loads((lab.folder / "message").read_text())["code"] == document["exit"]["code"]
    return document


def test_an_agent_that_is_done_stays_until_it_is_reported_to_go(tmp_path: Path) -> None:
    with kept_alive(tmp_path) as lab:
        lab.start("node-0")
        lab.stepping(1, world=1)
        lab.tell("finish")
        document = wait_until_kept_alive(lab)
        assert document["state"] == "succeeded"
        assert document["phase"] == "succeeded"
        assert document["exit"]["outcome"] == "done"
        lab.agents["node-0"].terminate()
        assert lab.end("node-0") == 0


def test_a_failure_for_good_is_shown_until_somebody_has_seen_it_and_the_code_is_kept(
    tmp_path: Path,
) -> None:
    with kept_alive(tmp_path) as lab:
        lab.start("node-0")
        lab.stepping(1, world=1)
        lab.tell("raise-0")
        document = wait_until_kept_alive(lab)
        assert (document["state"], document["exit"]["cause"]) == ("failed", "user_code")
        assert document["exit"]["traceback"][-1] == "ValueError: bad sample on rank 0"
        lab.agents["node-0"].terminate()
        assert lab.end("node-0") == 70


def test_an_agent_that_starts_after_the_end_is_kept_alive_and_one_that_is_stopped_ends(
    tmp_path: Path,
) -> None:
    with kept_alive(tmp_path) as lab:
        CheckpointDirectory(lab.checkpoints).write_done(
            {"run_id": "run-1", "step": 7, "outcome": "done"}
        )
        lab.start("node-0")
        assert wait_until_kept_alive(lab)["exit"]["step"] == 7
        assert not lab.events("node-0", "rendezvous-started")
        lab.agents["node-0"].terminate()
        assert lab.end("node-0") == 0
    with kept_alive(tmp_path / "stopped") as lab:
        lab.start("node-0")
        lab.stepping(1, world=1)
        lab.agents["node-0"].terminate()
        assert lab.end("node-0") == 200
        assert not lab.events("node-0", "kept-alive")


def test_a_wrong_train_json_keeps_the_agent_alive_so_that_nothing_restarts_it_for_ever(
    tmp_path: Path,
) -> None:
    with kept_alive(tmp_path) as lab:
        train = json.loads((tmp_path / "train.json").read_text())
        (tmp_path / "train.json").write_text(json.dumps({**train, "maxRestarts": -1}))
        lab.start("node-0")
        document = wait_until_kept_alive(lab)
        assert document["state"] == "failed"
        assert document["exit"]["code"] == 64
        assert document["exit"]["cause"] == "config"
        assert "maxRestarts" in document["exit"]["message"]
        lab.agents["node-0"].terminate()
        assert lab.end("node-0") == 64
