"""What the tests of sending and removing may ask for: a server with a store of objects, and a job
that becomes many of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.cli.cluster.api import Api, write_kubeconfig
from tests.cli.cluster.conftest import Serve, serve
from tests.cli.cluster.objects import Store

__all__ = ["serve"]

CORE = "/api/v1/namespaces/ml"
PLACES = {
    "job": "/apis/batch/v1/namespaces/ml/jobs/digits",
    "jobset": "/apis/jobset.x-k8s.io/v1alpha2/namespaces/ml/jobsets/digits",
    "trainjob": "/apis/trainer.kubeflow.org/v1alpha1/namespaces/ml/trainjobs/digits",
    "pytorchjob": "/apis/kubeflow.org/v1/namespaces/ml/pytorchjobs/digits",
    "statefulset": "/apis/apps/v1/namespaces/ml/statefulsets/digits",
}


@pytest.fixture
def store() -> Store:
    """The objects that the server has."""
    return Store()


@pytest.fixture
def api(store: Store, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Api:
    """A server that the kubeconfig leads to."""
    served = serve(store)
    write_kubeconfig(tmp_path / "config", served.url)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    return served


@pytest.fixture
def file(tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job.yaml that becomes an object of every kind that jobs have."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "mine.py").write_text("answer = 41\n")
    document = yaml.safe_load(job)
    document["spec"] |= {
        "image": "registry.example.com/trainer:1",
        "backend": "job",
        "nodes": {"min": 2, "max": 3},
        "code": "./src",
        "checkpoints": {"size": "1Gi"},
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return path
