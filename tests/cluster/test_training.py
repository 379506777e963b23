"""One job file trains on every workload kind, to the end, and the model that its end tells of is in
the volume.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.abilities import Abilities
from tests.cluster.conftest import BURST
from tests.cluster.kinds import RESOURCE, operated_kind
from tests.cluster.namespace import Namespace
from tests.house.tree import ROOT

EXAMPLE = ROOT / "examples" / "digits.yaml"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@operated_kind
@pytest.mark.needs("shared-volumes")
def test_the_example_reaches_97_percent_and_leaves_its_model_in_the_volume(
    namespace: Namespace, abilities: Abilities, kind: str
) -> None:
    image = namespace.environment["KDIST_IMAGE"]
    choices = [
        f"spec.backend={kind}",
        f"spec.image={image}",
        "spec.resources.cpu=0.5",
        "spec.checkpoints.size=1Gi",
    ]
    choices += [f"spec.podTemplate.spec.containers={json.dumps([BURST])}"]
    choices += (
        [f"spec.checkpoints.class={abilities.storage_class}"] if abilities.storage_class else []
    )
    settings = [word for choice in choices for word in ("--set", choice)]
    namespace.kdist("apply", str(EXAMPLE), *settings)
    namespace.kdist("wait", "digits", "--for=first-step", "--timeout=3m")

    assert (
        namespace.get(RESOURCE[kind], "digits")["metadata"]["labels"]["kdist.dev/job"] == "digits"
    )
    pods = namespace.pods("digits")
    assert len(pods) == 2
    for pod in pods:
        assert "kdist_" in namespace.read_metrics(pod["metadata"]["name"])
    reported = namespace.status("digits")
    assert reported["backend"] == kind
    assert reported["worldSize"] == 2

    namespace.kdist("wait", "digits", "--timeout=5m", timeout=320)
    assert namespace.status("digits")["phase"] == "Succeeded"
    volume = namespace.volume("digits", export=True)
    assert volume["done"]["outcome"] == "done"
    assert volume["done"]["metrics"]["accuracy"] >= 0.97
    assert {each["state"] for each in volume["checkpoints"]} == {"verified"}
    assert volume["exported"] == volume["done"]["weights"], (
        "DONE is about another model than the checkpoint"
    )
    assert config_of(namespace.find("configmaps", "kdist.dev/job=digits")) == rendered(
        namespace, kind, settings
    )


@pytest.mark.sampled
def test_the_same_file_trains_here_with_the_same_settings(
    namespace: Namespace, tmp_path: Path
) -> None:
    environment = {**os.environ, "KDIST_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "kdist", "run", str(EXAMPLE), "-o", "json"]
    done = subprocess.run(
        command,
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"]["accuracy"] >= 0.97
    here = json.loads((tmp_path / "digits" / "train.json").read_text())
    for kind in RESOURCE:
        assert (
            rendered(
                namespace, kind, ["--set", f"spec.image={namespace.environment['KDIST_IMAGE']}"]
            )
            == here
        )


def rendered(namespace: Namespace, kind: str, settings: list[str]) -> dict[str, Any]:
    """What the ranks are told by what `kdist apply` would send."""
    line = ["apply", str(EXAMPLE), *settings, f"--backend={kind}", "--dry-run=client", "-o", "json"]
    objects = json.loads(namespace.kdist(*line))
    return config_of(objects["items"] if isinstance(objects, dict) else objects)


def config_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """`train.json` of these objects, with the nodes that stand apart."""
    data = {
        name: text
        for each in objects
        if each["kind"] == "ConfigMap"
        for name, text in each.get("data", {}).items()
    }
    return {**json.loads(data["train.json"]), "nodes": json.loads(data["nodes.json"])}
