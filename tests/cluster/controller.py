"""The controller of the chart on a real cluster, and what kubectl does to its jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.charts.rules import CHART
from tests.cluster.helm import call_helm
from tests.cluster.namespace import Namespace

CRD = "customresourcedefinition/trainingjobs.kdist.dev"
SELECTOR = "app.kubernetes.io/component=controller"


def write_values(namespace: Namespace, **controller: Any) -> tuple[str, ...]:
    """The options of Helm for the controller of this namespace's jobs, with these values."""
    image, _, tag = namespace.environment["KDIST_CONTROLLER_IMAGE"].rpartition(":")
    chosen = {"enabled": True, "image": {"repository": image, "tag": tag}}
    chosen |= {"watchNamespaces": [namespace.name], **controller}
    file = namespace.write({"controller": chosen}, f"values-{len(controller)}.yaml")
    return ("--values", str(namespace.home / file), "--wait", "--timeout", "3m")


@contextmanager
def installed(namespace: Namespace, **controller: Any) -> Iterator[None]:
    """Two replicas of the controller, for this namespace unless these values say otherwise. They
    and TrainingJobs are gone at the end.
    """
    try:
        call_helm(namespace, "install", str(CHART), *write_values(namespace, **controller))
        yield
    finally:
        remove(namespace)


def remove(namespace: Namespace) -> None:
    """Uninstall the chart, and take the CRD away, which it keeps."""
    call_helm(namespace, "uninstall", "--wait", "--ignore-not-found")
    namespace.kubectl("delete", CRD, "--ignore-not-found", "--timeout=120s")
    namespace.kubectl("api-resources")  # kubectl keeps the kinds that it has seen for hours


def send(namespace: Namespace, document: dict[str, Any]) -> None:
    """`kubectl apply -f job.yaml`, with the code in a ConfigMap of its own."""
    namespace.copy_sources()
    code = ("configmap", "code", f"--from-file={namespace.home / 'src'}")
    if not namespace.get("configmap", "code"):
        namespace.kubectl("create", *code)
    spec = {**document["spec"], "code": {"configMap": "code"}}
    namespace.kubectl("apply", "-f", "-", stdin=json.dumps({**document, "spec": spec}))


def wait_for(namespace: Namespace, condition: str, seconds: int = 240) -> None:
    """Wait until the job `digits` has a condition."""
    line = f"--for=condition={condition}"
    namespace.kubectl("wait", "trainingjob/digits", line, f"--timeout={seconds}s")


def patch(namespace: Namespace, **spec: Any) -> None:
    """Change fields of the job `digits`."""
    body = json.dumps({"spec": spec})
    namespace.kubectl("patch", "trainingjob", "digits", "--type=merge", "-p", body)


def find_leader(namespace: Namespace) -> str:
    """The pod of the controller that leads; "" while there is none."""
    holders = [
        str(each["spec"].get("holderIdentity", ""))
        for each in namespace.find("leases.coordination.k8s.io")
        if each["metadata"]["name"].startswith("kdist")
    ]
    pods = [pod["metadata"]["name"] for pod in namespace.find("pods", SELECTOR)]
    return next((pod for pod in pods if any(one.startswith(pod) for one in holders)), "")


def kill_leader(namespace: Namespace) -> str:
    """Kill the controller that leads, without giving it time; returns its pod's name."""
    leader = namespace.until("a controller leads", lambda: find_leader(namespace))
    namespace.kubectl("delete", "pod", leader, "--grace-period=0", "--force")
    return leader
