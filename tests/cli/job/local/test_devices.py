"""`kdist run` of a job that requests GPUs which this machine does not have."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kdist.errors import UsageError
from kdist.job.local import describe_missing_gpus, launch
from kdist.job_file import load_text
from kdist.spec import TrainingJob
from tests.cli.conftest import Kdist


@pytest.fixture(autouse=True)
def _only_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_OTHER_DRIVERS", ())


def request(gpu: int, **spec: object) -> TrainingJob:
    """A job that requests GPUs for each node."""
    document = {
        "apiVersion": "kdist.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "gpt"},
        "spec": {"resources": {"gpu": gpu}, "train": {"workload": "gpt", "steps": 3}, **spec},
    }
    return load_text(yaml.safe_dump(document), source="job.yaml")


@pytest.mark.parametrize(
    ("job", "visible", "expected"),
    [
        (request(0), "", ""),
        (request(2), "0,1", ""),
        (request(1, nodes=2), "0,1", ""),
        (
            request(1),
            "",
            "the job requests 1 GPU for each node, and this machine has none: 1 node with 1 rank "
            "on the CPU; --set spec.resources.gpu=0 accepts that",
        ),
        (
            request(8, nodes=2),
            "-1",
            "the job requests 8 GPUs for each node, and this machine has none: 2 nodes with 1 rank "
            "on the CPU; --procs-per-node 8 starts as many ranks as on a cluster",
        ),
        (
            request(4, procsPerNode=4),
            "0",
            "the job requests 4 GPUs for each node, and this machine has 1: 1 node with 4 ranks "
            "on the CPU; --set spec.resources.gpu=0 accepts that",
        ),
        (
            request(4, procsPerNode=2),
            "0,1",
            "the job requests 4 GPUs for each node, and this machine has 2: 1 node with 2 ranks "
            "on GPUs; --set spec.resources.gpu=2 accepts that",
        ),
    ],
)
def test_it_is_said_what_runs_instead_and_what_to_change(
    job: TrainingJob, visible: str, expected: str
) -> None:
    assert describe_missing_gpus(job, {"CUDA_VISIBLE_DEVICES": visible}) == expected


def test_a_gpu_that_only_torch_can_find_is_not_reported_as_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launch, "list_devices", lambda _: [])
    assert describe_missing_gpus(request(1), {})
    monkeypatch.setattr(launch, "_OTHER_DRIVERS", (tmp_path,))
    assert describe_missing_gpus(request(1), {}) == ""


def test_ranks_that_cannot_hold_a_copy_of_the_model_are_refused_before_anything_starts() -> None:
    train = {"workload": "gpt", "steps": 3, "strategy": "tensor", "modelParallel": 4}
    job = request(4, train=train)
    with pytest.raises(UsageError, match="4 ranks share a copy of the model") as refused:
        describe_missing_gpus(job, {"CUDA_VISIBLE_DEVICES": ""})
    assert refused.value.hint == "--procs-per-node 4 starts as many ranks as on a cluster"
    started = request(4, train=train, procsPerNode=4)
    assert "4 ranks on the CPU" in describe_missing_gpus(started, {"CUDA_VISIBLE_DEVICES": ""})


def test_a_run_says_so_at_once(
    kdist: Kdist, job_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("KDIST_HOME", str(tmp_path / "a-file"))
    (tmp_path / "a-file").touch()  # so that nothing is started
    shown = kdist("run", job_file.name, "--set", "spec.resources.gpu=1")
    assert shown.stderr.startswith("Warning: the job requests 1 GPU for each node")
    assert shown.exit_code == 1
