"""`kdist why` tells several stuck jobs of one namespace apart, also where a second symptom stands
next to the cause.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.cluster.conftest import Job
from tests.cluster.namespace import Namespace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

LITTLE = {"cpu": 0.02, "memory": "128Mi"}  # so that all of them have room next to other tests
MOUNT = {
    "volumes": [{"name": "extra", "secret": {"secretName": "nowhere"}}],
    "containers": [{"name": "trainer", "volumeMounts": [{"name": "extra", "mountPath": "/extra"}]}],
}
CONFIG = {"containers": [{"name": "trainer", "envFrom": [{"configMapRef": {"name": "nowhere"}}]}]}
KEYS = {
    "volumes": [{"name": "extra", "configMap": {"name": "nowhere"}}],
    "containers": [{"name": "trainer", "volumeMounts": [{"name": "extra", "mountPath": "/extra"}]}],
}
TOKEN = {"name": "TOKEN", "secret": {"name": "wandb", "key": "token"}}
MISSING = "no-such-tag"

STUCK: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "image": ({}, "image-missing", [MISSING]),
    "cpu": ({"resources": {"cpu": 500, "memory": "1Gi"}}, "unschedulable", ["cpu"]),
    "claim": ({"checkpoints": {"claim": "nowhere"}}, "claim-missing", ["nowhere"]),
    "class": (
        {"checkpoints": {"size": "1Gi", "class": "nowhere"}},
        "claim-pending",
        ["nowhere"],
    ),
    "gpu": (
        {"resources": {**LITTLE, "gpu": 8}},
        "unschedulable",
        ["8 nvidia.com/gpu", "no node has any"],
    ),
    "selector": (
        {"nodeSelector": {"disk": "golden"}},
        "unschedulable",
        ["no node: no node has the labels of spec.nodeSelector (disk=golden)"],
    ),
    "secret": (
        {"env": [TOKEN]},
        "secret-missing",
        ["Secret wandb does not exist", "kubectl create secret generic wandb"],
    ),
    "priority": (
        {"priorityClass": "golden"},
        "no-priority-class",
        ["golden", "kubectl get priorityclasses"],
    ),
    # A volume is mounted before an image is pulled: the image that is not there either is not what
    # keeps the pod.
    "mount": (
        {"podTemplate": {"spec": MOUNT}, "image": "localhost:5000/typo:1"},
        "mount",
        ["Secret nowhere does not exist"],
    ),
    "configmap": (
        {"podTemplate": {"spec": CONFIG}},
        "configmap-missing",
        ["ConfigMap nowhere", "kubectl create configmap"],
    ),
    "keys": ({"podTemplate": {"spec": KEYS}}, "mount", ["ConfigMap nowhere does not exist"]),
    "classless": (
        {"checkpoints": {"claim": "classless"}},
        "claim-pending",
        ["names no storage class", "checkpoints.class"],
    ),
}
PENDING = ("image", "cpu", "claim", "class")
# A claim that wants a volume of no class, of which there are none.
CLASSLESS = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "classless"},
    "spec": {
        "storageClassName": "",
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "1Pi"}},
    },
}


@pytest.mark.sampled
def test_each_of_several_stuck_jobs_is_reported_its_own_cause(
    namespace: Namespace, job: Job
) -> None:
    (namespace.home / "jobs").mkdir()
    namespace.kubectl("create", "-f", "-", stdin=json.dumps(CLASSLESS))
    # Another tag of an image that is there, so that its registry is one that answers.
    image = re.sub(r"(@sha256)?:[^:/]*$", f":{MISSING}", namespace.environment["KDIST_IMAGE"])
    for name, (spec, _, _) in STUCK.items():
        document = job(backend="job", checkpoints=None, resources=LITTLE)
        document["spec"] |= {"image": image} if name == "image" else spec
        namespace.write(document | {"metadata": {"name": name}}, f"jobs/{name}.yaml")
    namespace.kdist("apply", "jobs")
    for name, (_, cause, words) in STUCK.items():
        answers: list[dict[str, Any]] = []

        def is_named(
            name: str = name, cause: str = cause, answers: list[dict[str, Any]] = answers
        ) -> bool:
            answers.append(json.loads(namespace.kdist("why", name, "-o", "json")))
            return bool(answers[-1]["cause"] == cause)

        namespace.until(f"the cause of {name} is {cause}", is_named)
        reported = json.dumps(answers[-1])
        assert [word for word in words if word not in reported] == []
        assert answers[-1]["severity"] == "blocked"
        assert answers[-1]["commands"]
    for name in PENDING:
        assert namespace.status(name)["phase"] == "Pending"
