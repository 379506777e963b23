"""What the tests on a real Kubernetes may ask for: the cluster, a namespace of their own, and a
small job.
"""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.abilities import OPERATORS, Abilities, skip_without
from tests.cluster.controller import installed
from tests.cluster.namespace import CLUSTER, Namespace

Job = Callable[..., dict[str, Any]]

BURST: dict[str, Any] = {
    "name": "trainer",
    "resources": {"requests": {"cpu": "50m"}, "limits": {"cpu": "1"}},
}
"""Ask for little, so that the pods of several tests find room, and allow a core: torch's import
takes seconds of one.
"""


@pytest.fixture(scope="session")
def cluster() -> Mapping[str, str]:
    """The environment in which kubectl and kdist meet the cluster: `$KUBECONFIG`'s with
    KDIST_E2E=kubeconfig, else kind's.
    """
    environment = dict(os.environ, NO_COLOR="1", COLUMNS="200")
    if environment.get("KDIST_E2E") == "kubeconfig":
        if "KDIST_IMAGE" not in environment:
            pytest.fail(
                "KDIST_E2E=kubeconfig needs KDIST_IMAGE, the trainer's image in a "
                "registry that the cluster can reach"
            )
    else:
        printed = subprocess.run(
            [CLUSTER, "env"], check=True, capture_output=True, text=True
        ).stdout
        for word in shlex.split(printed.removeprefix("export ")):
            name, _, value = word.partition("=")
            environment[name] = value.replace("$PATH", os.environ.get("PATH", ""))
    ready = subprocess.run(
        ["kubectl", "get", "--raw", "/readyz"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if ready.stdout != "ok":
        pytest.fail(f"no cluster answers ({ready.stderr.strip()}): `{CLUSTER} all` starts one")
    return environment


@pytest.fixture(scope="session")
def abilities(cluster: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Abilities:
    """What the cluster can do, where it is not ours."""
    return Abilities(cluster, tmp_path_factory.mktemp("abilities"))


@pytest.fixture(autouse=True)
def _met_needs(request: pytest.FixtureRequest) -> None:
    """Skip, with the reason, what the cluster cannot do: by the marks `needs` and `disruptive`, and
    by the kind of workload.
    """
    marked = [need for mark in request.node.iter_markers("needs") for need in mark.args]
    disruptive = ["whole-cluster"] if request.node.get_closest_marker("disruptive") else []
    chosen = getattr(request.node, "callspec", None)
    kinds = [
        kind
        for kind in (chosen.params.values() if chosen else ())
        if isinstance(kind, str) and kind in OPERATORS
    ]
    if needs := [*disruptive, *marked, *kinds]:
        skip_without(request.getfixturevalue("abilities"), *needs)


@pytest.fixture
def namespace(cluster: Mapping[str, str], tmp_path: Path) -> Iterator[Namespace]:
    """A fresh namespace that admits restricted pods only; it is deleted with all that is in it."""
    space = Namespace(f"e2e-{secrets.token_hex(4)}", tmp_path, cluster)
    space.create()
    yield space
    space.remove()
    if cluster.get("KDIST_E2E") != "kubeconfig":
        subprocess.run([CLUSTER, "volumes"], check=False, capture_output=True)


@pytest.fixture
def job(cluster: Mapping[str, str], abilities: Abilities) -> Job:
    """Make the document of a small job: `job(backend="job", nodes=2, train={"epochs": 3})`; skips
    where the cluster cannot.
    """

    def make(*, train: Mapping[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
        training = {"workload": "digits", "epochs": 6, "globalBatch": 128, **(train or {})}
        settings: dict[str, Any] = {
            "backend": "job",
            "nodes": 2,
            "resources": {"cpu": 0.5, "memory": "1Gi"},
            "checkpoints": {
                "size": "1Gi",
                **({"class": abilities.storage_class} if abilities.storage_class else {}),
            },
            "terminationGracePeriodSeconds": 20,
        }
        settings |= spec
        # no node has what these tests select
        stores = "size" in (settings["checkpoints"] or {}) and "nodeSelector" not in spec
        needs = [settings["backend"]] if settings["backend"] in OPERATORS else []
        skip_without(
            abilities,
            *needs,
            *(["shared-volumes"] if stores else []),
            *(["kueue"] if "queue" in spec else []),
        )
        return {
            "apiVersion": "kdist.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "digits"},
            "spec": {
                "image": cluster["KDIST_IMAGE"],
                **{name: value for name, value in settings.items() if value is not None},
                **(
                    {}
                    if "script" in spec
                    else {
                        "train": {
                            name: value for name, value in training.items() if value is not None
                        }
                    }
                ),
            },
        }

    return make


@pytest.fixture
def calm(job: Job) -> Job:
    """Make the document of a job that takes a twentieth of a second a step and little of the cores,
    for 300 steps.

    What `podTemplate` says comes on top of what lets its pods start soon.
    """

    def make(*, train: Mapping[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
        training = {
            "workload": "calm:Calm",
            "epochs": None,
            "steps": 300,
            "checkpoint": {"every": {"steps": 20}},
            **(train or {}),
        }
        inside = {"containers": [BURST], **spec.pop("podTemplate", {}).get("spec", {})}
        resources = {"cpu": 0.4, "memory": "1Gi"}
        burst = {"podTemplate": {"spec": inside}}
        return job(train=training, **{"code": "./src", "resources": resources, **burst, **spec})

    return make


@pytest.fixture
def controller(namespace: Namespace) -> Iterator[None]:
    """The controller of the chart, for the jobs of this namespace."""
    with installed(namespace):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show next to a failure what was in the test's namespace, while it is still there."""
    report = yield
    space = getattr(item, "funcargs", {}).get("namespace")
    if call.when == "call" and report.failed and isinstance(space, Namespace):
        report.sections.append((f"namespace {space.name}", space.look()))
    return report
