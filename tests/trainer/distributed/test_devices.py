"""GPUs that a job asks for are there before its ranks start, or their node says what it has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from kdist_trainer.config import Cause, Exit
from kdist_trainer.distributed import devices
from kdist_trainer.distributed.devices import describe_devices, require_gpus
from kdist_trainer.distributed.world import World
from kdist_trainer.errors import DeviceFaultError
from kdist_trainer.torch_internals import HashStore
from tests.trainer.agent.lab import Lab
from tests.trainer.rendezvous.api_server import ApiServer

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")


@needs_no_gpu
@pytest.mark.processes
@pytest.mark.sampled
def test_an_agent_in_a_pod_without_its_gpu_ends_with_its_nodes_fault(tmp_path: Path) -> None:
    api = ApiServer(tmp_path / "account", tls=True)
    with Lab(tmp_path, rendezvous="kubernetes:ml/store", fresh=True) as lab:
        lab.arguments = ["--gpus", "1"]
        lab.start("node-0", **api.environment())
        assert lab.end("node-0") == 204
        record = lab.record("node-0")
        assert (record["cause"], record["node"]) == ("device", "node-0")
        assert record["message"].startswith(
            "the job asks for 1 GPU on node node-0, and torch sees none: "
        )
        assert not lab.events("node-0", "worker-started")
    api.stop()


@needs_no_gpu
def test_a_rank_that_lost_its_gpu_takes_no_cpu_instead() -> None:
    environment = {"KDIST_GPUS": "2", "KDIST_NODE": "train-1"}
    with pytest.raises(DeviceFaultError, match="2 GPUs on node train-1, and torch sees none"):
        World.from_environment(timeout_seconds=9, environment=environment)


@pytest.mark.parametrize(("found", "seen"), [(7, "only 7"), (0, "none")])
def test_one_of_eight_that_is_gone_is_named_with_what_is_there(
    monkeypatch: pytest.MonkeyPatch, found: int, seen: str
) -> None:
    monkeypatch.setattr(devices, "count_gpus", lambda: found)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6")
    with pytest.raises(DeviceFaultError) as failure:
        require_gpus(8, node="node-3")
    assert (failure.value.cause, failure.value.code) == (Cause.DEVICE, Exit.DEVICE)
    text = str(failure.value)
    assert text.startswith(f"the job asks for 8 GPUs on node node-3, and torch sees {seen}: ")
    assert "CUDA_VISIBLE_DEVICES is '0,1,2,3,4,5,6'" in text
    monkeypatch.setattr(devices, "count_gpus", lambda: 8)
    require_gpus(8, node="node-3")
    assert describe_devices(8, None).startswith("8 x ")


def test_ranks_on_gpus_and_ranks_on_cpus_form_no_group() -> None:
    store = HashStore()

    def rank(number: int, kind: str) -> World:
        device = torch.device(kind)
        return World(number, 2, number, 1, 1, device, "gloo", timedelta(seconds=1))

    rank(0, "cuda")._check_backend(store)
    with pytest.raises(DeviceFaultError, match=r"rank 1 would train on cpu, .* on cuda"):
        rank(1, "cpu")._check_backend(store)
    rank(1, "cuda")._check_backend(store)


@needs_no_gpu
@pytest.mark.sampled
@pytest.mark.processes
def test_a_run_says_on_what_its_ranks_run_and_which_gpus_it_goes_without(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trains')\n")
    job = {
        "apiVersion": "kdist.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "asks"},
        "spec": {"resources": {"gpu": 1}, "script": {"path": "train.py"}},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))

    def run(**environment: str) -> tuple[int, str, dict[str, object]]:
        done = subprocess.run(
            [Path(sys.executable).with_name("kdist"), "run", "job.yaml"],
            env={**os.environ, "KDIST_HOME": str(tmp_path / ".kdist"), **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        report = json.loads((tmp_path / ".kdist" / "asks" / "report.json").read_text())
        return done.returncode, done.stderr + done.stdout, report

    code, text, report = run()
    missing = "the job requests 1 GPU for each node, and this machine has none"
    assert code == 0, text
    assert missing in text.splitlines()[0]
    assert "1 rank on 1 node (CPU), generation 1" in text
    assert report["devices"] == "CPU"
    assert missing in str(report["warnings"])
    code, text, report = run(CUDA_VISIBLE_DEVICES="0")
    assert code == 10, "a GPU that was named is not there"
    assert "failed (device)" in text
    assert "CUDA_VISIBLE_DEVICES is '0'" in text
