"""`helm upgrade` from the chart of version 0.1.0 with jobs running: CRD, roles and the controller
change under them, and they train on and end as they would have.
"""

from __future__ import annotations

import subprocess
import tarfile
from functools import partial
from io import BytesIO
from pathlib import Path

import pytest

from tests.charts.rules import CHART
from tests.cluster.conftest import Job
from tests.cluster.controller import find_leader, patch, remove, send, wait_for, write_values
from tests.cluster.helm import call_helm
from tests.cluster.namespace import Namespace
from tests.cluster.test_scale_and_suspend import world_of
from tests.house.tree import ROOT

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.disruptive,
    pytest.mark.needs("helm", "whole-cluster", "shared-volumes"),
    pytest.mark.timeout(1500),
]

# The last commit of 0.1.0: documents without a format number are of it.
OLD = "2204c254"
TAG = "upgrade-from"
STEPS = 2400  # of a twentieth of a second


@pytest.fixture
def old_tree(tmp_path: Path) -> Path:
    """The sources of version 0.1.0."""
    done = subprocess.run(["git", "archive", OLD], cwd=ROOT, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"this clone has no commit {OLD}: {done.stderr.decode().strip()}")
    folder = tmp_path / "old"
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def old(namespace: Namespace, old_tree: Path) -> Namespace:
    """The namespace of a user of version 0.1.0: its images are on the nodes."""
    build = [str(old_tree / "tests" / "cluster" / "cluster"), "image", TAG]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    used = Namespace(namespace.name, namespace.home, namespace.environment)
    for variable in ("KDIST_IMAGE", "KDIST_CONTROLLER_IMAGE"):
        used.environment[variable] = f"{used.environment[variable].rpartition(':')[0]}:{TAG}"
    return used


def test_a_running_job_outlives_the_upgrade_and_ends_right_and_its_next_pods_are_the_new_ones(
    namespace: Namespace, old: Namespace, old_tree: Path, calm: Job
) -> None:
    document = calm(nodes={"min": 1, "max": 2}, train={"steps": STEPS})
    document["spec"]["image"] = old.environment["KDIST_IMAGE"]
    try:
        call_helm(old, "install", str(old_tree / CHART.relative_to(ROOT)), *write_values(old))
        send(namespace, document)
        before = namespace.until("two nodes train", partial(world_of, namespace, 2))
        assert before
        pods = {pod["metadata"]["uid"] for pod in namespace.pods("digits")}
        generation = namespace.get("trainingjob", "digits")["metadata"]["generation"]

        call_helm(namespace, "upgrade", str(CHART), *write_values(namespace))
        namespace.until("the new controller leads", lambda: find_leader(namespace))
        after = namespace.until(
            "they train on", partial(world_of, namespace, 2, int(before["step"]) + 40)
        )
        assert after
        assert after["generation"] == before["generation"], "no new group formed"
        assert {pod["metadata"]["uid"] for pod in namespace.pods("digits")} == pods
        found = namespace.get("trainingjob", "digits")
        assert found["metadata"]["generation"] == generation
        held = {each["type"]: each["status"] for each in found["status"]["conditions"]}
        assert held["Accepted"] == "True"
        assert namespace.status("digits")["phase"] == "Running"

        namespace.kubectl("scale", "trainingjob/digits", "--replicas=1")
        alone = namespace.until("one node trains", partial(world_of, namespace, 1))
        assert alone
        assert {pod["metadata"]["uid"] for pod in namespace.pods("digits")} <= pods

        patch(
            namespace,
            image=namespace.environment["KDIST_IMAGE"],
            replicas=2,
            restartedAt="2026-11-27T12:00:00Z",
        )
        again = partial(world_of, namespace, 2, int(alone["step"]))
        assert namespace.until("two nodes with the new image train on", again)
        images = {
            pod["spec"]["containers"][0]["image"].rpartition(":")[2]
            for pod in namespace.pods("digits")
        }
        assert TAG not in images
        wait_for(namespace, "Complete", 400)
        steps = [each["step"] for each in namespace.volume("digits")["steps"]]
        assert steps == list(range(1, STEPS + 1)), "every step was done once, in its order"
    finally:
        remove(namespace)
