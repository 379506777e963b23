"""The API server begins to refuse the agents of a job in the middle of it, as when its
ServiceAccount is deleted: nothing restarts for it, and all end as they would have ended.
"""

from __future__ import annotations

import json
import signal
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kdist_trainer.config import Exit
from tests.trainer.agent.lab import Lab, descendants, is_alive, kill
from tests.trainer.rendezvous.api_server import ApiServer

pytestmark = [pytest.mark.processes, pytest.mark.sampled]

AWAITED = """
import os, pathlib, time
folder, rank = pathlib.Path(os.environ["LAB"]), os.environ["RANK"]
fresh = folder / f"fresh-{rank}"
fresh.write_text(os.environ["KDIST_NODE"])
fresh.rename(folder / f"began-{rank}")
while not (folder / f"end-{rank}").exists():
    time.sleep(0.02)
"""


def show_status(lab: Lab, node: str) -> dict[str, Any]:
    port = json.loads((lab.folder / node / "agent.json").read_text())["port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=10) as response:
        document: dict[str, Any] = json.load(response)
    return document


def node_of(rank: int, lab: Lab) -> str:
    """The node that a script with this rank runs on."""
    return (lab.folder / f"began-{rank}").read_text()


@pytest.mark.parametrize("status", [401, 404])
def test_an_api_server_that_begins_to_refuse_ends_no_training_and_delays_no_end(
    tmp_path: Path, status: int
) -> None:
    api = ApiServer(tmp_path / "account", tls=True)
    with Lab(tmp_path, rendezvous="kubernetes:ml/store", nodes={"min": 2, "max": 2}) as lab:
        lab.start("node-0", "node-1", **api.environment())
        lab.stepping(1, world=2)
        with api.failing(status, for_ever=True):
            for node in lab.agents:
                lab.wait(partial(lab.events, node, "rendezvous-refused"), "that agents notice")
            step = lab.ranks(1)[0]["step"]
            lab.stepping(1, world=2, steps=step + 100)
            assert show_status(lab, "node-0")["rendezvous_refused"] is True
            lab.tell("finish")
            assert [lab.end("node-0"), lab.end("node-1")] == [0, 0], "within less than 600 s"
        assert len(lab.ledger("generation")) == 1
        assert lab.record("node-1")["outcome"] == "done"
    api.stop()


@pytest.mark.parametrize("lost", [False, True])
def test_scripts_that_an_api_server_refuses_end_as_done_only_if_all_of_them_are(
    tmp_path: Path, lost: bool
) -> None:
    api = ApiServer(tmp_path / "account", tls=True)
    script = tmp_path / "train.py"
    script.write_text(AWAITED)
    two: dict[str, Any] = {"nodes": {"min": 2, "max": 2}, "script": {"path": str(script)}}
    with Lab(tmp_path, rendezvous="kubernetes:ml/store", **two) as lab:
        lab.start("node-0", "node-1", **api.environment())
        lab.wait(lambda: len(list(tmp_path.glob("began-*"))) == 2, "that both scripts run")
        with api.failing(403, for_ever=True):
            for node in lab.agents:
                lab.wait(partial(lab.events, node, "rendezvous-refused"), "that agents notice")
            lab.tell("end-1")
            early, late = node_of(1, lab), node_of(0, lab)
            pid = lab.events(early, "worker-started")[0]["pid"]
            lab.wait(lambda: not is_alive(pid), "the end of one script")
            if lost:
                agent = lab.agents[late].pid
                for pid in [agent, *descendants(agent)]:
                    kill(pid, signal.SIGKILL)
                lab.wait(lambda: lab.events(early, "peers-not-finished"), "that it is told")
                assert lab.end(early) == Exit.PEERS_LOST, "no group can form, and it is not done"
            else:
                assert lab.agents[early].poll() is None, "the other script still runs"
                lab.tell("end-0")
                assert [lab.end("node-0"), lab.end("node-1")] == [0, 0], "in less than 600 s"
    api.stop()


def test_a_permanent_failure_keeps_its_cause_though_the_api_server_refuses(tmp_path: Path) -> None:
    api = ApiServer(tmp_path / "account", tls=True)
    with Lab(tmp_path, rendezvous="kubernetes:ml/store") as lab:
        lab.start("node-0", **api.environment())
        lab.stepping(1, world=1)
        with api.failing(401, for_ever=True):
            lab.wait(lambda: lab.events("node-0", "rendezvous-refused"), "that it notices")
            lab.tell("raise-0")
            lab.end("node-0")
        record = lab.record("node-0")
        assert (record["cause"], "bad sample" in record["message"]) == ("user_code", True)
    api.stop()
