"""What a cluster that is not ours can do: it may lack operators or shared volumes, and only our own
namespaces in it are ours.

On the cluster that `tests/cluster/cluster` starts nothing may be lacking: there every test runs,
and fails where something is.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.namespace import Namespace

# What a test may need, and the CRD that a cluster then has.
OPERATORS = {
    "jobset": "jobsets.jobset.x-k8s.io",
    "pytorchjob": "pytorchjobs.kubeflow.org",
    "trainjob": "trainjobs.trainer.kubeflow.org",
    "kueue": "clusterqueues.kueue.x-k8s.io",
}
_SECONDS = 120.0  # that a volume may take to be made
_PULLS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName")


class Abilities:
    """Asks the cluster once for each thing. `storage_class` is the class that volumes are asked of,
    "" the default one.
    """

    def __init__(self, environment: Mapping[str, str], home: Path) -> None:
        self._environment = environment
        self._home = home
        self.ours = environment.get("KDIST_E2E") != "kubeconfig"
        self.storage_class = environment.get("KDIST_E2E_CLASS", "")

    def lack(self, need: str) -> str:
        """Why the cluster cannot do that; "" if it can. `need`: an operator, `shared-volumes`,
        `helm` or `whole-cluster`.
        """
        if self.ours:
            return ""
        if need in OPERATORS:
            return "" if OPERATORS[need] in self._kinds else f"the cluster has no {OPERATORS[need]}"
        if need == "shared-volumes":
            return self._no_shared_volumes
        if need == "helm":
            return (
                ""
                if shutil.which("helm", path=self._environment["PATH"])
                else "helm is not installed"
            )
        assert need == "whole-cluster", need
        return "changes what belongs to the whole cluster, and this one is not ours"

    @cached_property
    def _kinds(self) -> set[str]:
        line = ["kubectl", "get", "crd", "-o", "jsonpath={.items[*].metadata.name}"]
        done = subprocess.run(
            line, env=dict(self._environment), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return set(done.stdout.split())

    @cached_property
    def _no_shared_volumes(self) -> str:
        """What came of a pod that mounts a claim which many nodes may write; "" if it ran."""
        space = Namespace(f"e2e-{secrets.token_hex(4)}", self._home, self._environment)
        space.create()
        try:
            objects = _probe(self._environment["KDIST_IMAGE"], self.storage_class)
            space.kubectl("create", "-f", "-", stdin=json.dumps(objects))
            ended = space.wait_until(lambda: self._judge(space), seconds=_SECONDS)
            if ended == "ran":
                return ""
            reported = [
                each["message"]
                for each in space.find("events")
                if each["involvedObject"]["kind"] != "Pod"
            ]
            return (
                "no volume that several nodes may write (KDIST_E2E_CLASS names a class): "
                f"{(reported or ['no word on why'])[-1]}"
            )
        finally:
            space.remove()

    @staticmethod
    def _judge(space: Namespace) -> str:
        """`ran` or `refused`, once it is known; a KDIST_IMAGE that cannot be had fails every test
        that asks.
        """
        pod = space.get("pod", "probe")
        waiting = [
            each["state"].get("waiting") or {}
            for each in pod["status"].get("containerStatuses") or []
        ]
        for each in waiting:
            assert each.get("reason") not in _PULLS, f"KDIST_IMAGE: {each.get('message')}"
        if pod["status"].get("phase") == "Succeeded":
            return "ran"
        failures = [
            each
            for each in space.find("events")
            if each["reason"] in ("ProvisioningFailed", "FailedBinding")
        ]
        # A class that makes no volumes may have some already, to which the claim is bound a moment
        # later.
        bound = space.get("pvc", "probe")["status"].get("phase") == "Bound"
        return (
            "refused"
            if failures and not bound and sum(each.get("count") or 1 for each in failures) > 1
            else ""
        )


def skip_without(abilities: Abilities, *needs: str) -> None:
    """Skip the test that runs if the cluster lacks one of these, and say why."""
    for need in needs:
        if why := abilities.lack(need):
            pytest.skip(why)


def describe_claim(name: str, storage_class: str) -> dict[str, Any]:
    """A claim that pods of all nodes write to."""
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "1Gi"}},
    }
    if storage_class:
        spec["storageClassName"] = storage_class
    kind = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}}
    return {**kind, "spec": spec}


def _probe(image: str, storage_class: str) -> dict[str, Any]:
    container = {
        "name": "probe",
        "image": image,
        "command": ["python", "-c", "open('/probe/a', 'w').close()"],
        "volumeMounts": [{"name": "probe", "mountPath": "/probe"}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec = {
        "restartPolicy": "Never",
        "containers": [container],
        "securityContext": {
            "runAsNonRoot": True,
            "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [{"name": "probe", "persistentVolumeClaim": {"claimName": "probe"}}],
    }
    items = [
        describe_claim("probe", storage_class),
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe"}, "spec": spec},
    ]
    return {"apiVersion": "v1", "kind": "List", "items": items}
