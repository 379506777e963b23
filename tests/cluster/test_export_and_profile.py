"""What comes out of a job in the cluster to this machine: its weights, and a profile of its next
steps.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cluster.conftest import Job
from tests.cluster.namespace import Namespace

pytestmark = [pytest.mark.e2e, pytest.mark.wide]


def test_weights_and_traces_of_a_running_job_come_to_this_machine(
    namespace: Namespace, job: Job, tmp_path: Path
) -> None:
    namespace.apply(
        job(
            train={
                "epochs": None,
                "steps": 100_000,
                "emaDecay": 0.9,
                "checkpoint": {"every": {"steps": 20}},
            }
        )
    )
    namespace.kdist("wait", "digits", "--for=checkpoint")
    target = tmp_path / "model.safetensors"
    assert "8 of them averages" in namespace.kdist(
        "checkpoints", "export", "digits", "--ema", "-o", str(target)
    )
    assert load_file(target)["0.weight"].shape == (32, 1, 3, 3)
    assert "COLLECTIVES" in namespace.kdist(
        "profile", "digits", "--steps", "3", "-o", str(tmp_path / "traces")
    )
    traces = sorted((tmp_path / "traces").iterdir())
    assert [path.name for path in traces] == ["rank-0.trace.json.gz", "rank-1.trace.json.gz"]
    assert all(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] for path in traces)
