"""A user of one namespace who may edit ConfigMaps writes a job into another namespace, as root on
the host: the admin who then scales or restarts her job sees it and sends nothing.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kdist.errors import Code
from tests.cluster.conftest import Job
from tests.cluster.kinds import RESOURCE, every_kind
from tests.cluster.namespace import Namespace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ROOT = {"privileged": True, "runAsUser": 0, "runAsNonRoot": False, "allowPrivilegeEscalation": True}
EVIL: dict[str, Any] = {
    "hostPID": True,
    "containers": [{"name": "trainer", "securityContext": ROOT}],
    "volumes": [{"name": "host", "hostPath": {"path": "/"}}],
    "nodeSelector": {"node-role.kubernetes.io/control-plane": ""},
}
KINDS = "jobs,serviceaccounts,roles,rolebindings,configmaps,persistentvolumeclaims,pods"


def elsewhere(namespace: Namespace, name: str) -> list[Any]:
    """What there is of a job of this name in kube-system."""
    words = ("get", KINDS, "-n", "kube-system", "-l", f"kdist.dev/job={name}", "-o", "json")
    found: list[Any] = json.loads(namespace.kubectl(*words, anywhere=True))["items"]
    return found


@every_kind
def test_an_admin_sends_nothing_that_only_a_config_map_describes(
    namespace: Namespace, job: Job, kind: str
) -> None:
    document = job(backend=kind, nodes={"min": 1, "max": 1})
    name = document["metadata"]["name"] = namespace.name  # kube-system is everybody's
    namespace.apply(document, "--direct")
    scales = kind in ("job", "statefulset", "pytorchjob")
    if scales:  # nothing is asked about what is as it was applied
        namespace.kdist("scale", name, "--nodes", "1:2", "--no-wait")
    again = ("restart", name, "--fresh", "--yes", "--no-wait", "--timeout", "60s")
    stored = json.loads(namespace.get("configmap", name)["data"]["job.json"])
    stored["metadata"]["namespace"] = "kube-system"
    stored["spec"]["podTemplate"] = {"spec": EVIL}
    patch = json.dumps({"data": {"job.json": json.dumps(stored)}})
    namespace.kubectl("patch", "configmap", name, "--type=merge", "-p", patch)
    uid = namespace.get(RESOURCE[kind], name)["metadata"]["uid"]
    for words in [again, *([("scale", name, "--nodes", "3", "--no-wait")] if scales else [])]:
        done = namespace.type_kdist(*words)
        if words[0] == "restart" or kind == "job":  # others keep the pods that they have
            assert done.returncode == Code.USAGE, done.stderr
            assert re.search(r"^\+ +privileged: true$", done.stderr, re.MULTILINE)
            assert "differs from what runs" in done.stderr
        assert "names the namespace kube-system, which is ignored" in done.stderr
        assert elsewhere(namespace, name) == []
        live = namespace.get(RESOURCE[kind], name)
        assert live["metadata"]["uid"] == uid, "nothing was made again"
        assert "hostPath" not in json.dumps(live)
    for pod in namespace.find("pods"):
        assert "hostPath" not in json.dumps(pod["spec"])
