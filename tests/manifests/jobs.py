"""Jobs to render: the examples, and one that says something in every field."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, Literal

from kdist import backends
from kdist.job_file import load_file, load_text
from kdist.manifest import Manifest
from kdist.render import Placement, render
from kdist.spec import TrainingJob
from tests.house.tree import ROOT

IMAGE = "registry.example.com/team/trainer:1.0"
EXAMPLES = {
    str(path.relative_to(ROOT / "examples")).removesuffix(".yaml").replace("/", "-"): path
    for path in sorted((ROOT / "examples").rglob("*.yaml"))
}
CODE = {"train.py": b"print('hello')\n", "lib/blob.bin": b"\xff\x00"}

FULL: dict[str, Any] = {
    "apiVersion": "kdist.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {
        "name": "full",
        "namespace": "ml",
        "labels": {"team": "vision"},
        "annotations": {"note": "all of it"},
    },
    "spec": {
        "backend": "auto",
        "image": IMAGE,
        "nodes": {"min": 2, "max": 3, "standby": 1},
        "procsPerNode": 2,
        "threadsPerRank": 2,
        "resources": {"cpu": "3", "memory": "8Gi", "gpu": 2},
        "code": "src",
        "data": [
            {"claim": "images", "path": "here", "mountPath": "/data/images"},
            {
                "url": "s3://team-data/labels",
                "mountPath": "/data/labels",
                "endpoint": "https://minio.example.com:9000",
                "region": "eu-central-1",
                "secret": "store",
                "size": "2048Gi",
                "sha256": "0123456789abcdef" * 4,
            },
        ],
        "checkpoints": {
            "size": "10Gi",
            "class": "fast",
            "accessMode": "ReadWriteOnce",
            "reclaimPolicy": "Retain",
        },
        "env": [
            {"name": "MODE", "value": "fast"},
            {"name": "TOKEN", "secret": {"name": "tokens", "key": "wandb"}},
        ],
        "maxRestarts": 7,
        "queue": "team-a",
        "rendezvous": "auto",
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [
            {
                "key": "gpu",
                "operator": "Equal",
                "value": "yes",
                "effect": "NoExecute",
                "tolerationSeconds": 5,
            },
        ],
        "imagePullSecrets": ["registry"],
        "priorityClass": "high",
        "activeDeadlineSeconds": 36_000,
        "memorySnapshot": "on",
        "terminationGracePeriodSeconds": 90,
        "ttlSecondsAfterFinished": 600,
        "rendezvousTimeoutSeconds": 500,
        "joinWindowSeconds": 5,
        "collectiveTimeoutSeconds": 200,
        "hangTimeoutSeconds": 250,
        "finalScrapeTimeoutSeconds": 20,
        "logs": {"keep": "128Mi"},
        "compileCache": "/cache",
        "restart": {
            "deviceFaults": 20,
            "rules": [{"action": "Ignore", "onErrors": ["mypkg.Away"]}],
        },
        "preflight": {
            "allReduce": {"minBusBandwidth": "10G", "size": "32Mi"},
            "command": ["/opt/checks/node.sh"],
            "timeoutSeconds": 90,
        },
        "podTemplate": {
            "spec": {"containers": [{"name": "trainer", "env": [{"name": "EXTRA", "value": "1"}]}]}
        },
        "train": {
            "workload": "digits",
            "epochs": 2,
            "globalBatch": 60,
            "init": {"url": "hf://owner/model@v1", "secret": "hub-token"},
        },
    },
}


def make(changes: dict[str, Any] | None = None, **spec: Any) -> TrainingJob:
    """A small job with these fields of its spec; `changes` are laid over the top of the file."""
    document = {
        "apiVersion": "kdist.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "digits"},
        "spec": {"image": IMAGE, "nodes": 2, "train": {"workload": "digits", "epochs": 1}, **spec},
        **(changes or {}),
    }
    return load_text(json.dumps(document), source="test")


def full() -> dict[str, Any]:
    """A copy of the job that says something in every field."""
    return copy.deepcopy(FULL)


def load(document: dict[str, Any]) -> TrainingJob:
    """The job of a document. Raises `InvalidJobError` if it is none."""
    return load_text(json.dumps(document), source="test")


def example(path: Path) -> TrainingJob:
    """An example with the image that a cluster needs."""
    return load_file(path, overrides=[f"spec.image={IMAGE}"])


def place(
    job: TrainingJob,
    backend: str = "job",
    rendezvous: Literal["kubernetes", "c10d"] = "kubernetes",
    *,
    suspended: bool = False,
    take_over: bool = False,
) -> list[Manifest]:
    """The job's objects for this workload kind."""
    code = CODE if job.spec.code is not None and job.spec.code.path is not None else None
    return render(
        job,
        Placement(
            backend, rendezvous, "c0ffee00", suspended=suspended, take_over=take_over, code=code
        ),
    )


def workload(manifests: list[Manifest], backend: str) -> dict[str, Any]:
    """The document of the workload among them."""
    return next(
        each.document
        for each in manifests
        if backends.find(each.api_version, each.kind) is backends.get(backend)
    )
