"""What an API server makes of a TrainingJob by itself: it takes every file that kdist takes,
refuses unknown fields, wrong types and values beyond limits, and shows and scales what the
controller reports.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kdist.crd import definition
from kdist.job_file import load_text
from tests.cli.cluster.api import write_kubeconfig
from tests.cluster.namespace import Namespace
from tests.manifests.jobs import EXAMPLES, IMAGE, full
from tests.trainer.rendezvous.control_plane import BINARIES, ControlPlane

pytestmark = pytest.mark.e2e
NAME = f"{definition.PLURAL}.{definition.GROUP}"
CONDITION = {
    "type": "Running",
    "status": "True",
    "reason": "Training",
    "message": "2 ranks train",
    "lastTransitionTime": "2026-05-01T12:00:00Z",
}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """An API server of its own that knows TrainingJobs: what any other serves decides what `kdist
    apply` sends to it. The environment in which kubectl meets it.
    """
    folder = tmp_path_factory.mktemp("plane")
    with ControlPlane(folder) as plane:
        authority = {"certificate-authority": str(folder / "certificates" / "apiserver.crt")}
        user = {"token": "admin-token"}
        url = f"https://127.0.0.1:{plane.port}"
        write_kubeconfig(folder / "config", url, user=user, cluster=authority)
        path = f"{BINARIES}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "KUBECONFIG": str(folder / "config"), "PATH": path}
        space = Namespace("ml", folder, environment)
        try_to_apply(space, definition.text(), "--server-side")
        space.kubectl("wait", "--for=condition=Established", f"crd/{NAME}", "--timeout=60s")
        yield environment


@pytest.fixture
def resources(plane: Mapping[str, str], tmp_path: Path) -> Namespace:
    """An empty namespace of it."""
    space = Namespace(f"e2e-{secrets.token_hex(4)}", tmp_path, plane)
    space.create()
    return space


def try_to_apply(namespace: Namespace, text: str, *options: str) -> None:
    namespace.kubectl("apply", *options, "-f", "-", stdin=text)


def make(name: str = "digits", **spec: Any) -> dict[str, Any]:
    train = {"workload": "digits", "epochs": 1}
    return {
        "apiVersion": "kdist.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {"image": IMAGE, "train": train, **spec},
    }


def refuse(namespace: Namespace, document: dict[str, Any]) -> str:
    """What the API server says of a document that it does not take."""
    document["metadata"].pop("namespace", None)
    with pytest.raises(AssertionError) as raised:
        try_to_apply(namespace, json.dumps(document), "--dry-run=server")
    return str(raised.value)


def with_image(path: Path) -> str:
    """The text of an example with another image, and otherwise as it is."""
    text, found = re.subn(r"(?m)^  image:.*$", f"  image: {IMAGE}", path.read_text())
    return text if found else re.sub(r"(?m)^spec:$", f"spec:\n  image: {IMAGE}", text)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_taken_as_it_is_but_for_its_image(resources: Namespace, name: str) -> None:
    text = with_image(EXAMPLES[name])
    assert text.count(IMAGE) == 1
    try_to_apply(resources, text, "--dry-run=server")


def test_what_is_stored_is_the_job_of_the_file(resources: Namespace) -> None:
    document = full()
    del document["metadata"]["namespace"]
    try_to_apply(resources, json.dumps(document))
    stored = resources.get("trainingjob", "full")
    stored.pop("status", None)
    stored["metadata"] = document["metadata"]
    assert load_text(json.dumps(stored), source="API server") == load_text(
        json.dumps(document), source="file"
    )
    assert stored["spec"]["train"]["strategy"] == "ddp", "a default is written out"


@pytest.mark.parametrize("nodes", [2, {"min": 1, "max": 4}, {"min": 1, "max": 4, "standby": 1}])
def test_nodes_are_a_number_or_limits(resources: Namespace, nodes: Any) -> None:
    try_to_apply(resources, json.dumps(make(nodes=nodes)))
    assert resources.get("trainingjob", "digits")["spec"]["nodes"] == nodes


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (make(epochs=3), 'unknown field "spec.epochs"'),
        (make(nodes=10_000), "should be less than or equal to 4096"),
        (make(nodes=0), "should be greater than or equal to 1"),
        (make(replicas=0), "should be greater than or equal to 1"),
        (make(suspend="yes"), "must be of type boolean"),
        (make(restartedAt="now"), "should match"),
        (make(image="x\nspec: {}"), "should match"),
        (make(env=[{"name": "A", "value": "x" * 2**20}]), "Too long"),
        (make(env=[{"name": "A", "value": "1"}] * 2), "Duplicate value"),
        (make(env=[{"name": f"A{i}", "value": ""} for i in range(257)]), "at most 256 items"),
        (make(code={"configMap": "x"}, backend="pod"), "Unsupported value"),
        (make("a" * 51), "may not be more than 48 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_can_be_no_job_is_refused(
    resources: Namespace, document: dict[str, Any], reason: str
) -> None:
    assert reason in refuse(resources, document)


def test_kubectl_scales_and_suspends_a_job(resources: Namespace) -> None:
    try_to_apply(resources, json.dumps(make(nodes={"min": 1, "max": 4})))
    resources.kubectl("scale", "trainingjob/digits", "--replicas=3")
    resources.kubectl("patch", "ktj", "digits", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    spec = resources.get("trainingjob", "digits")["spec"]
    assert (spec["replicas"], spec["suspend"], spec["nodes"]) == (3, True, {"min": 1, "max": 4})


def test_kubectl_shows_and_waits_for_what_the_controller_reports(resources: Namespace) -> None:
    try_to_apply(resources, json.dumps(make()))
    status = {
        "phase": "Running",
        "nodes": "2/2",
        "step": 120,
        "progress": "62%",
        "loss": "0.2541",
        "restarts": 1,
        "backend": "job",
        "lastCheckpoint": {"step": 100, "time": "2026-05-01T12:00:00Z"},
        "message": "trains",
        "replicas": 2,
        "selector": "kdist.dev/job=digits",
        "conditions": [CONDITION],
        "unheardOf": 1,
    }
    body = json.dumps({"status": status})
    resources.kubectl("patch", "ktj", "digits", "--subresource=status", "--type=merge", "-p", body)
    header, row = resources.kubectl("get", "trainingjobs", "-o", "wide").splitlines()
    assert header.split() == [
        *("NAME", "PHASE", "NODES", "STEP", "PROGRESS", "LOSS", "RESTARTS", "AGE"),
        *("BACKEND", "CHECKPOINT", "MESSAGE"),
    ]
    assert row.split()[:7] == ["digits", "Running", "2/2", "120", "62%", "0.2541", "1"]
    assert row.split()[-3:] == ["job", "100", "trains"]
    assert "MESSAGE" not in resources.kubectl("get", "trainingjobs")
    assert "trainingjob.kdist.dev/digits" in resources.kubectl("get", "all", "-o", "name")
    resources.kubectl("wait", "--for=condition=Running", "ktj/digits", "--timeout=5s")
    scale = json.loads(
        resources.kubectl("get", "ktj", "digits", "--subresource=status", "-o", "json")
    )
    assert "unheardOf" not in scale["status"]


def test_a_status_cannot_be_applied_with_the_job(resources: Namespace) -> None:
    try_to_apply(resources, json.dumps({**make(), "status": {"phase": "Succeeded"}}))
    assert "phase" not in (resources.get("trainingjob", "digits").get("status") or {})


def test_fields_are_explained_by_kubectl(resources: Namespace) -> None:
    told = subprocess.run(
        ["kubectl", "explain", "trainingjob.spec.train.globalBatch"],
        env=resources.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Samples per optimizer step, over all ranks." in told.stdout
