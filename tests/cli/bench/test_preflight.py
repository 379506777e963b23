"""`spec.preflight` in a job: refused where it means nothing, and the end of a job whose ranks are
too slow for it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Kdist
from tests.cli.running import Start, write_job


def test_a_preflight_of_a_script_and_a_bandwidth_without_a_unit_are_refused(
    kdist: Kdist, job_file: Path
) -> None:
    demand = "spec.preflight.allReduce.minBusBandwidth"
    assert kdist("validate", str(job_file), "--set", f"{demand}=10G").exit_code == 0
    refused = kdist("validate", str(job_file), "--set", f"{demand}=fast")
    assert refused.exit_code == 2
    assert (
        "must be a whole number with a unit such as `64Mi` or `10G`"
        in refused.stderr + refused.stdout
    )
    job_file.write_text(
        job_file.read_text()
        .replace("train:", "script: {path: train.py}\n  #")
        .split("    workload")[0]
    )
    refused = kdist("validate", str(job_file), "--set", f"{demand}=10G")
    assert refused.exit_code == 2
    assert "belongs to train" in refused.stderr + refused.stdout


@pytest.mark.sampled
@pytest.mark.processes
def test_a_job_that_demands_more_than_there_is_ends_before_its_first_step_and_says_what_there_was(
    start: Start, tmp_path: Path
) -> None:
    job = write_job(tmp_path)
    demand = [
        "--set",
        "spec.preflight.allReduce.minBusBandwidth=900T",
        "--set",
        "spec.preflight.allReduce.size=64k",
    ]
    run = start(job, *demand, "-o", "json")
    report = json.loads(run.wait(10))
    failure = report["failure"]
    assert (failure["cause"], failure["code"], report["restarts"]["total"]) == ("preflight", 64, 0)
    assert "minBusBandwidth demands 900T" in failure["message"]
    assert report["steps"]["reached"] == 0
    assert "900 TB/s demanded" in run.errors()
