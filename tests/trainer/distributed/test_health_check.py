"""Nodes check their health before they join: those that fail leave the job to the others."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from kdist_trainer.agent.agent import ElasticAgent
from kdist_trainer.distributed import health_check
from kdist_trainer.errors import DeviceFaultError, NodeFaultError
from kdist_trainer.formats.machine_faults import EXCLUDED, FAULT, list_machine_faults
from tests.trainer.agent.lab import Lab

ELASTIC = {"min": 1, "max": 2}
_CHECK = (
    "yes checked | head -n 999; echo the fan is off; "
    'test "$KDIST_MACHINE" != gpu-8 || { echo DIMM 3 fails; exit 4; }'
)


def read_status(lab: Lab, node: str) -> dict[str, Any]:
    port = json.loads((lab.folder / node / "agent.json").read_text())["port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=60) as response:
        found: dict[str, Any] = json.load(response)
        return found


@pytest.mark.sampled
@pytest.mark.processes
def test_a_node_that_fails_the_check_does_not_join_and_the_others_train(tmp_path: Path) -> None:
    with Lab(tmp_path, nodes=ELASTIC, preflight={"command": ["sh", "-c", _CHECK]}) as lab:
        lab.start("node-1", KDIST_MACHINE="gpu-8")
        assert lab.end("node-1") == 205
        record = lab.record("node-1")
        assert (record["cause"], record["fault"], record["machine"]) == ("node", "node", "gpu-8")
        assert record["message"] == (
            "the health check of node node-1 ended with exit code 4: checked | checked | checked | "
            "the fan is off | DIMM 3 fails"
        )
        (told,) = lab.events("node-1", "node-excluded")
        assert told["message"] == record["message"]
        lab.start("node-0", KDIST_MACHINE="gpu-7")
        lab.stepping(1, world=1)
        (faults,) = read_status(lab, "node-0")["machine_faults"]
        assert (faults["machine"], faults["faults"], faults["cause"]) == ("gpu-8", 1, "node")
        lab.start("node-1", KDIST_MACHINE="gpu-8")
        assert lab.end("node-1") == 205

        def is_told() -> bool:
            (faults,) = read_status(lab, "node-0")["machine_faults"]
            return bool(faults["faults"] == 2)

        lab.wait(is_told, "a fault while the others train")
        lab.tell("finish")
        assert lab.end("node-0") == 0


@pytest.mark.processes
def test_a_check_that_takes_too_long_is_ended_with_all_that_it_has_started(tmp_path: Path) -> None:
    command = ["sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/child; wait"]
    with Lab(tmp_path, preflight={"command": command, "timeoutSeconds": 2}) as lab:
        lab.start("node-0")
        assert lab.end("node-0") == 205
        assert lab.record("node-0")["message"].endswith("of node node-0 took longer than 2 s")
        child = Path("/proc", (tmp_path / "child").read_text().strip())
        lab.wait(lambda: not child.exists(), "the end of what the check has started")


@pytest.mark.processes
@pytest.mark.parametrize("command", [["/no/such/check"], ["sh", "-c", "/no/such/check"]])
def test_a_check_that_does_not_exist_is_the_jobs_own_fault(
    command: list[str], tmp_path: Path
) -> None:
    with Lab(tmp_path, preflight={"command": command}) as lab:
        lab.start("node-0")
        assert lab.end("node-0") == 64
        assert "spec.preflight.command cannot be run" in lab.record("node-0")["message"]


@pytest.mark.processes
@pytest.mark.sampled
def test_a_node_is_checked_again_after_a_fault_of_its_gpu_which_is_shown_meanwhile(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nerror = torch.AcceleratorError('CUDA error: uncorrectable ECC error')\n"
        "error.error_code = 214\nraise error\n"
    )
    wait = f"while ! test -e {tmp_path}/go; do sleep 0.1; done"
    check = f"cd {tmp_path}; test ! -e seen || {{ touch again; {wait}; exit 1; }}; touch seen"
    preflight = {"command": ["sh", "-c", check]}
    with Lab(tmp_path, maxRestarts=1, preflight=preflight, script={"path": str(script)}) as lab:
        lab.start("node-0", KDIST_MACHINE="gpu-8")
        lab.wait(lambda: (tmp_path / "again").exists(), "the second check")
        (faults,) = read_status(lab, "node-0")["machine_faults"]
        assert (faults["machine"], faults["faults"], faults["cause"]) == ("gpu-8", 1, "device")
        lab.tell("go")
        assert lab.end("node-0") == 205
        assert len(lab.ledger("failure")) == 0, "the group that would record it did not form"
        told = [one for name in (FAULT, EXCLUDED) for one in lab.ledger(name)]
        assert [(one["cause"], one["fault"]) for one in told] == [("device",) * 2, ("node",) * 2]


def test_kept_ranks_keep_their_gpus_and_are_saved_before_the_node_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []

    def check(*_: object, gpus: int, **__: object) -> None:
        asked.append(gpus)
        raise NodeFaultError("it failed")

    monkeypatch.setattr("kdist_trainer.agent.agent.check_node", check)
    agent: Any = ElasticAgent.__new__(ElasticAgent)
    for name in ("_settings", "_stop", "_ledger", "_telemetry", "_agent_store"):
        setattr(agent, name, Mock())
    agent._settings.gpus, agent._stop.interruptible = 8, nullcontext
    agent._termination = SimpleNamespace(leave_and_save=lambda: asked.append("saved"))
    for kept in ({}, {0: 7}):
        agent._survivors = SimpleNamespace(kept=kept)
        with pytest.raises(NodeFaultError):
            agent._next_generation()
    assert asked == [8, 0, "saved"]


def test_used_memory_and_an_image_for_other_gpus_are_no_faults_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image = "CUDA error: no kernel image is available for execution on the device"
    memory = torch.OutOfMemoryError("CUDA out of memory. Tried")
    errors = iter([memory, RuntimeError(image), RuntimeError("Xid 79")])

    def multiply(_: object) -> None:
        raise next(errors)

    monkeypatch.setattr(health_check, "multiply", multiply)
    health_check.main()
    health_check.main()
    with pytest.raises(RuntimeError, match="Xid"):
        health_check.main()


def test_a_fault_that_was_written_twice_counts_once() -> None:
    event = {"event": "failure", "fault": "device", "machine": "gpu-8", "generation": 3, "time": 9}
    events = [{**event, "event": FAULT}, event, event, {**event, "generation": 4}]
    assert [each["faults"] for each in list_machine_faults(events)] == [2]


def test_products_of_matrices_that_differ_are_a_fault_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert health_check.multiply(["cpu", "cpu"], seconds=0.05, size=64) > 1
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    with pytest.raises(DeviceFaultError, match="cpu returns different results"):
        health_check.multiply(["cpu"], seconds=0.05, size=8)


@pytest.mark.processes
@pytest.mark.sampled
def test_the_check_of_gpus_passes_where_there_are_none() -> None:
    command = [sys.executable, "-m", "kdist_trainer.distributed.health_check"]
    assert subprocess.run(command, timeout=120).returncode == 0
