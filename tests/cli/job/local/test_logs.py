"""The log of a run that is kept next to its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import Kdist
from tests.cli.running import Start, write_job, write_script

SCRIPT = """
import os
import sys

import torch.distributed as dist

dist.init_process_group()
generation, token = os.environ["KDIST_GENERATION"], os.environ["TOKEN"]
print(f"rank {dist.get_rank()} of generation {generation} has {token}", flush=True)
dist.barrier()
if generation == "1":
    os.kill(os.getpid(), 9)
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def _runs_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster, and runs in a folder of this test's."""
    monkeypatch.setenv("KDIST_HOME", str(tmp_path / "runs"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))


@pytest.mark.sampled
@pytest.mark.processes
def test_the_log_of_each_generation_is_kept_without_secrets(
    tmp_path: Path, start: Start, kdist: Kdist, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "hf_marked")
    (tmp_path / "src").mkdir()
    write_script(tmp_path / "src", SCRIPT)
    spec: dict[str, Any] = {
        "code": "./src",
        "script": {"path": "script.py"},
        "nodes": 2,
        "procsPerNode": 1,
        "maxRestarts": 10,
    }
    spec["env"] = [{"name": "TOKEN", "secret": {"name": "hub", "key": "token"}}]
    document: dict[str, Any] = {"apiVersion": "kdist.dev/v1alpha1", "kind": "TrainingJob"}
    document |= {"metadata": {"name": "digits"}, "spec": spec}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(document))
    run = start("job.yaml")
    run.wait(0)
    first = kdist("logs", "digits", "--generation", "1").stdout
    second = kdist("logs", "digits", "--generation", "2").stdout
    for rank in (0, 1):
        assert f"rank {rank} of generation 1 has ***" in first
        assert f"rank {rank} of generation 2 has ***" in second
    assert "generation 2" not in first
    only = kdist("logs", "digits", "--generation", "2", "--rank", "1", "--pod", "1").stdout
    assert ("rank 1" in only, "rank 0 of" in only) == (True, False)
    kept = list((run.folder("digits") / "checkpoints").rglob("*.log"))
    assert len(kept) >= 4
    assert not any(b"hf_marked" in file.read_bytes() for file in kept)

    missing = kdist("logs", "digits", "--generation", "9")
    assert missing.exit_code == 4
    assert "no log of generation 9 of digits is kept; there are those of" in missing.stderr
    refused = kdist("logs", "digits", "--generation", "1", "--follow")
    assert (refused.exit_code, "--generation cannot be combined" in refused.stderr) == (2, True)


@pytest.mark.sampled
@pytest.mark.processes
def test_a_job_may_keep_no_logs(tmp_path: Path, start: Start, kdist: Kdist) -> None:
    run = start(write_job(tmp_path, nodes=1, steps=4, logs={"keep": "none"}))
    run.wait(0)
    assert not (run.folder("digits") / "checkpoints" / "logs").exists()
    refused = kdist("logs", "digits", "--generation", "1")
    assert (refused.exit_code, "Next: kdist explain spec.logs" in refused.stderr) == (4, True)
