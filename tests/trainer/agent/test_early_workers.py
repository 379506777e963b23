"""Workers that are started before they have a group: where that is not possible, nothing changes.

`tests/faults` has the trainings in which it is.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from kdist_trainer.rendezvous.handler import Rendezvous, open_rendezvous
from kdist_trainer.rendezvous.stores import FileStore
from tests.patience import soon
from tests.trainer.agent.lab import Lab, kill


def open_node(folder: Path, index: int) -> Rendezvous:
    return open_rendezvous(
        FileStore(folder),
        run_id="run",
        min_nodes=2,
        max_nodes=3,
        address="127.0.0.1",
        index=index,
        timeout_seconds=60,
    )


def test_a_group_runs_once_its_round_is_complete(tmp_path: Path) -> None:
    nodes = [open_node(tmp_path, index) for index in range(3)]
    joining = [threading.Thread(target=node.next_rendezvous, daemon=True) for node in nodes[:2]]
    joining[0].start()
    assert soon(lambda: nodes[2].count_members() == 1)
    assert nodes[2].count_running() == 0, "a node that comes now can join it"
    joining[1].start()
    for thread in joining:
        thread.join(60)
    assert soon(lambda: nodes[2].count_running() == 2)
    assert nodes[0].count_running() == 0, "it is in this group"
    for node in nodes[:2]:
        node.leave()


@pytest.mark.processes
def test_a_standby_that_is_of_no_use_is_reported_and_not_started(tmp_path: Path) -> None:
    with Lab(tmp_path, standby="warm", procsPerNode=2) as lab:
        lab.start("node-0")
        before = lab.stepping(1, world=2)
        (warning,) = lab.events("node-0", "standby-unavailable")
        assert "only where ranks recover in place" in warning["message"]
        kill(before[1]["pid"], signal.SIGKILL)
        lab.stepping(2, world=2)
        lab.tell("finish")
        assert lab.end("node-0") == 0
        assert not lab.events("node-0", "standby-ready")
