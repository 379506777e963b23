"""What the tests on a real Kubernetes may ask for: the cluster, a namespace of their own, and a small job."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import subprocess
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.namespace import CLUSTER, Namespace

Job = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def cluster() -> Mapping[str, str]:
    """The environment in which kubectl and kdist meet the cluster: `$KUBECONFIG`'s with KDIST_E2E=kubeconfig, else kind's."""
    environment = dict(os.environ, NO_COLOR="1", COLUMNS="200")
    if environment.get("KDIST_E2E") == "kubeconfig":
        if "KDIST_IMAGE" not in environment:
            pytest.fail("KDIST_E2E=kubeconfig needs KDIST_IMAGE, the trainer's image in a registry that the cluster can reach")
    else:
        printed = subprocess.run([CLUSTER, "env"], check=True, capture_output=True, text=True).stdout
        for word in shlex.split(printed.removeprefix("export ")):
            name, _, value = word.partition("=")
            environment[name] = value.replace("$PATH", os.environ.get("PATH", ""))
    ready = subprocess.run(["kubectl", "get", "--raw", "/readyz"], env=environment, capture_output=True, text=True, check=False)
    if ready.stdout != "ok":
        pytest.fail(f"no cluster answers ({ready.stderr.strip()}): `{CLUSTER} all` starts one")
    return environment


@pytest.fixture
def namespace(cluster: Mapping[str, str], tmp_path: Path) -> Iterator[Namespace]:
    """A fresh namespace that admits restricted pods only; it is deleted with all that is in it."""
    space = Namespace(f"e2e-{secrets.token_hex(4)}", tmp_path, cluster)
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    document = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": space.name, "labels": labels}}
    space.kubectl("create", "-f", "-", stdin=json.dumps(document))
    yield space
    space.kubectl("delete", "namespace", space.name, "--wait=false")
    if cluster.get("KDIST_E2E") != "kubeconfig":
        subprocess.run([CLUSTER, "volumes"], check=False, capture_output=True)


@pytest.fixture
def job(cluster: Mapping[str, str]) -> Job:
    """Make the document of a small job: `job(backend="job", nodes=2, train={"epochs": 3})`."""

    def make(*, train: Mapping[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
        training = {"workload": "digits", "epochs": 6, "globalBatch": 128, **(train or {})}
        settings = {
            "backend": "job",
            "nodes": 2,
            "resources": {"cpu": 0.5, "memory": "1Gi"},
            "checkpoints": {"size": "1Gi"},
            "graceSeconds": 20,
        }
        return {
            "apiVersion": "kdist.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "digits"},
            "spec": {
                "image": cluster["KDIST_IMAGE"],
                **{name: value for name, value in {**settings, **spec}.items() if value is not None},
                **({} if "script" in spec else {"train": {name: value for name, value in training.items() if value is not None}}),
            },
        }

    return make


@pytest.fixture
def calm(job: Job) -> Job:
    """Make the document of a job that takes a twentieth of a second a step and little of the cores, for 300 steps."""

    def make(*, train: Mapping[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
        training = {
            "workload": "calm:Calm",
            "epochs": None,
            "steps": 300,
            "checkpoint": {"every": {"steps": 20}},
            **(train or {}),
        }
        return job(train=training, **{"code": "./src", "resources": {"cpu": 0.4, "memory": "1Gi"}, **spec})

    return make


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show beside a failure what was in the test's namespace, while it is still there."""
    report = yield
    space = getattr(item, "funcargs", {}).get("namespace")
    if call.when == "call" and report.failed and isinstance(space, Namespace):
        report.sections.append((f"namespace {space.name}", space.look()))
    return report
