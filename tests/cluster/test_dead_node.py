"""A node loses power under a job that needs it, and `kdist recover` makes the job whole, with the
weights of a run that nobody disturbed. These tests run alone: what they break is everybody's.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.cluster.conftest import Job
from tests.cluster.kinds import every_kind
from tests.cluster.namespace import CLUSTER, Namespace
from tests.cluster.test_scale_and_suspend import APART, world_of

pytestmark = [pytest.mark.e2e, pytest.mark.disruptive, pytest.mark.timeout(1200)]

STEPS = 400
OPERATORS = ("jobset-system", "kubeflow", "kubeflow-system", "kueue-system")
UNREACHABLE = {"key": "node.kubernetes.io/unreachable", "operator": "Exists"}
NOT_READY = {"key": "node.kubernetes.io/not-ready", "operator": "Exists"}


@pytest.fixture
def doomed(request: pytest.FixtureRequest, cluster: dict[str, str]) -> Iterator[str]:
    """A node without the operators, whose loss would be another test: the last worker, or that of
    the number in the test's parameter. It is back at the end.
    """
    node = sorted(workers(cluster))[getattr(request, "param", -1)]
    kubectl(cluster, "cordon", node)
    try:
        for namespace in OPERATORS:
            here = f"--field-selector=spec.nodeName={node}"
            kubectl(cluster, "-n", namespace, "delete", "pods", here, "--wait=false")
        for namespace in OPERATORS:
            every = ("-n", namespace, "wait", "deployment", "--all", "--timeout=180s")
            kubectl(cluster, *every, "--for=condition=Available")
        kubectl(cluster, "uncordon", node)
        yield node
    finally:
        kubectl(cluster, "uncordon", node)
        subprocess.run([CLUSTER, "return", node], check=True, capture_output=True)


def workers(cluster: dict[str, str]) -> list[str]:
    selector = "!node-role.kubernetes.io/control-plane"
    return (
        kubectl(cluster, "get", "nodes", "-l", selector, "-o", "name").replace("node/", "").split()
    )


def kubectl(cluster: dict[str, str], *args: str) -> str:
    done = subprocess.run(
        ["kubectl", *args], env=cluster, capture_output=True, text=True, check=True
    )
    return done.stdout


def place_bystander(namespace: Namespace, node: str) -> dict[str, Any]:
    """A pod of somebody else on the node, which stays there whatever happens."""
    secure = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": "sleeper",
        "image": namespace.environment["KDIST_IMAGE"],
        "command": ["sleep", "infinity"],
        "securityContext": secure,
    }
    spec = {
        "nodeName": node,
        "containers": [container],
        "tolerations": [UNREACHABLE, NOT_READY],
        "terminationGracePeriodSeconds": 0,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "bystander"}, "spec": spec}
    namespace.kubectl("create", "-f", "-", stdin=json.dumps(pod))
    namespace.kubectl("wait", "pod/bystander", "--for=condition=Ready", "--timeout=120s")
    return namespace.get("pod", "bystander")


def describe_spread_job(calm: Job, kind: str) -> dict[str, Any]:
    """A job of two nodes whose pods are on different ones if possible."""
    wish = {"weight": 100, "podAffinityTerm": APART}
    apart = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [wish]}}
    template = {"spec": {"affinity": apart}}
    return calm(backend=kind, nodes=2, train={"steps": STEPS}, podTemplate=template)


def digest_of_an_undisturbed_run(namespace: Namespace, document: dict[str, Any]) -> str:
    namespace.apply(document)
    namespace.kdist("wait", "digits", "--timeout=6m", timeout=400)
    weights = str(namespace.volume("digits")["done"]["weights"])
    namespace.kdist("delete", "digits", "--purge", "--timeout=3m")
    return weights


@every_kind
def test_a_job_that_needs_a_node_without_power_is_made_whole_and_ends_as_if_nothing_had_been(
    namespace: Namespace,
    calm: Job,
    doomed: str,
    kind: str,
) -> None:
    document = describe_spread_job(calm, kind)
    weights = digest_of_an_undisturbed_run(namespace, document)
    namespace.apply(document)
    reported = namespace.until("two nodes train", partial(world_of, namespace, 2))
    assert reported
    (lost,) = (pod for pod in namespace.pods("digits") if pod["spec"]["nodeName"] == doomed)
    bystander = place_bystander(namespace, doomed)
    subprocess.run([CLUSTER, "lose", doomed], check=True, capture_output=True)

    noticed = ("wait", f"node/{doomed}", "--for=condition=Ready=Unknown", "--timeout=120s")
    namespace.kubectl(*noticed)
    done = json.loads(namespace.kdist("recover", "digits", "--timeout=4m", "-o", "json"))
    (given_up,) = done["pods"]
    assert (given_up["pod"], given_up["node"]) == (lost["metadata"]["name"], doomed)
    assert (given_up["reason"], given_up["marked"]) == ("NodeLost", True)
    assert len(given_up["evidence"]) == 3, "the node, its Lease and the agent that is left"
    again = partial(world_of, namespace, 2, int(reported["step"]))
    namespace.until("two nodes train again, past the step of the cut", again)
    alive = [pod for pod in namespace.pods("digits") if pod["status"]["phase"] != "Failed"]
    assert doomed not in {pod["spec"]["nodeName"] for pod in alive}
    untouched = namespace.get("pod", "bystander")
    assert untouched["metadata"]["uid"] == bystander["metadata"]["uid"]
    assert untouched["status"]["phase"] == "Running"

    subprocess.run([CLUSTER, "return", doomed], check=True, capture_output=True)
    namespace.kdist("wait", "digits", "--timeout=6m", timeout=400)
    volume = namespace.volume("digits")
    assert volume["done"]["weights"] == weights
    assert [each["step"] for each in volume["steps"]] == list(range(1, STEPS + 1))
    gone = lost["metadata"]["uid"]

    def left() -> bool:
        pods = namespace.find("pods", "kdist.dev/job=digits")
        running = [pod for pod in pods if pod["status"]["phase"] == "Running"]
        return gone in {pod["metadata"]["uid"] for pod in running}

    namespace.until("the node that returned has ended the old pod", lambda: not left())
