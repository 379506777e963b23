"""The cluster of the tests is what the other tests take it for."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.cluster.abilities import OPERATORS
from tests.cluster.namespace import CLUSTER, Namespace

SCRATCH = "/tmp"  # noqa: S108 (a folder of its own in every pod)
pytestmark = pytest.mark.e2e


def test_a_namespace_of_the_tests_admits_restricted_pods_only(namespace: Namespace) -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "root"},
        "spec": {"containers": [{"name": "a", "image": "b"}]},
    }
    with pytest.raises(AssertionError, match='violates PodSecurity "restricted'):
        namespace.kubectl("create", "-f", "-", stdin=json.dumps(pod))


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_workload_kind_is_known(namespace: Namespace, operator: str) -> None:
    assert OPERATORS[operator] in namespace.kubectl("get", "crd", "-o", "name")


def test_the_image_runs_as_any_user_on_a_read_only_root(namespace: Namespace) -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "stranger"},
        "spec": {
            "restartPolicy": "Never",
            "securityContext": {
                "runAsUser": 12345,
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "volumes": [{"name": "tmp", "emptyDir": {}}],
            "containers": [
                {
                    "name": "trainer",
                    "image": namespace.environment["KDIST_IMAGE"],
                    "command": ["/usr/bin/tini", "--", "python", "-c", WHO],
                    "volumeMounts": [{"name": "tmp", "mountPath": SCRATCH}],
                    "securityContext": {
                        "readOnlyRootFilesystem": True,
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        },
    }
    namespace.kubectl("create", "-f", "-", stdin=json.dumps(pod))
    phase = namespace.until("the pod ended", lambda: ended(namespace, "stranger"))
    assert phase == "Succeeded"
    expected = {"uid": 12345, "gloo": True, "rows": 1797}
    assert json.loads(namespace.kubectl("logs", "stranger")) == expected


WHO = """
import json, os, getpass, torch, torch.distributed, kdist_trainer.agent.launch
from kdist_trainer.workloads.digits import read_scans
getpass.getuser()
rows = len(read_scans()[1])
print(json.dumps({"uid": os.getuid(), "gloo": torch.distributed.is_gloo_available(), "rows": rows}))
"""


def ended(namespace: Namespace, pod: str) -> str:
    phase = str(namespace.get("pod", pod)["status"].get("phase"))
    return phase if phase in {"Succeeded", "Failed"} else ""


def test_what_a_failure_shows_names_the_objects(namespace: Namespace) -> None:
    namespace.kubectl("create", "configmap", "evidence")
    assert "configmap/evidence" in namespace.look()


def test_the_script_names_its_commands_and_refuses_others() -> None:
    done = subprocess.run([CLUSTER, "fly"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage:" in done.stderr
