"""Who reaches a pod of a job, and whom it reaches: the rendered policy on a real network, where the
network enforces policies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.cluster.namespace import Namespace
from tests.manifests.jobs import make, place

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

METRICS, RANKS = 9401, 29_500
JOB, OTHER = {"kdist.dev/job": "digits"}, {"kdist.dev/job": "mnist"}
PROMETHEUS = {"app.kubernetes.io/name": "prometheus"}

SERVE = """
import socket, threading
def serve(port):
    for listening in [socket.create_server(("", port), backlog=64)]:
        while True:
            listening.accept()[0].close()
for port in (9401, 29500):
    threading.Thread(target=serve, args=(port,)).start()
"""
# Prints for each HOST:PORT whether a connection comes about.
TRY = """
import json, socket, sys
def opens(host, port):
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
    except OSError:
        return False
    return True
print(json.dumps([opens(*each.split(":")) for each in sys.argv[1:]]))
"""

# (who asks, whom, at which port, whether it is to come through)
TABLE = [
    ("peer", "rank", RANKS, True),
    ("peer", "rank", METRICS, True),
    ("other", "rank", RANKS, False),
    ("other", "rank", METRICS, False),
    ("prometheus", "rank", RANKS, False),
    ("prometheus", "rank", METRICS, True),
    ("foreign", "rank", RANKS, False),
    ("foreign", "rank", METRICS, False),
    ("rank", "foreign", RANKS, False),
    ("rank", "other", METRICS, False),
    ("foreign", "other", RANKS, True),
]
LABELS: dict[str, Mapping[str, str]] = {
    "rank": JOB,
    "peer": JOB,
    "other": OTHER,
    "prometheus": PROMETHEUS,
    "foreign": {},
}


def start(namespace: Namespace, pods: Mapping[str, Mapping[str, str]]) -> None:
    """Start pods with these labels that listen on both ports, and wait until they do."""
    items = [
        _pod(name, labels, namespace.environment["KDIST_IMAGE"]) for name, labels in pods.items()
    ]
    namespace.kubectl(
        "create", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    )
    names = [f"pod/{name}" for name in pods]
    namespace.kubectl("wait", "--for=condition=Ready", "--timeout=120s", *names)


def _pod(name: str, labels: Mapping[str, str], image: str) -> dict[str, Any]:
    container = {
        "name": "serve",
        "image": image,
        "command": ["python", "-c", SERVE],
        "readinessProbe": {"tcpSocket": {"port": RANKS}, "periodSeconds": 1},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec = {
        "terminationGracePeriodSeconds": 0,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {**labels, "who": name}},
        "spec": spec,
    }


def reaches(namespace: Namespace, who: str, *whom: tuple[str, int]) -> list[bool]:
    """Whether a connection from one pod to each of these pods' ports comes about."""
    wanted = [f"{namespace.get('pod', name)['status']['podIP']}:{port}" for name, port in whom]
    answer: list[bool] = json.loads(
        namespace.kubectl("exec", who, "--", "python", "-c", TRY, *wanted)
    )
    return answer


def skip_unless_policies_bite(namespace: Namespace) -> None:
    """Shut a pod off by a policy of its own; where it can still be reached, the network enforces
    none.
    """
    start(namespace, {"shut": {}, "probe": {}})
    assert reaches(namespace, "probe", ("shut", RANKS)) == [True]
    spec = {"podSelector": {"matchLabels": {"who": "shut"}}, "policyTypes": ["Ingress"]}
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "shut"},
        "spec": spec,
    }
    namespace.kubectl("create", "-f", "-", stdin=json.dumps(policy))
    if not namespace.wait_until(
        lambda: reaches(namespace, "probe", ("shut", RANKS)) == [False], seconds=10
    ):
        pytest.skip(
            "the cluster's network does not enforce network policies: a pod that one "
            "shuts off was reached"
        )


@pytest.mark.sampled
def test_the_truth_table_of_who_reaches_whom(namespace: Namespace) -> None:
    skip_unless_policies_bite(namespace)
    start(namespace, LABELS)
    policies = [each.document for each in place(make(), "job") if each.kind == "NetworkPolicy"]
    namespace.kubectl("create", "-f", "-", stdin=json.dumps(policies[0]))
    namespace.until(
        "the job's policy bites",
        lambda: reaches(namespace, "foreign", ("rank", RANKS)) == [False],
        seconds=30,
    )
    wrong = [
        f"{who} -> {whom}:{port} {'came through' if came else 'was kept out'}"
        for who, whom, port, wanted in TABLE
        for came in reaches(namespace, who, (whom, port))
        if came is not wanted
    ]
    assert wrong == []
    # The kubelet's probes always pass: a container that restarts under the policy becomes ready.
    namespace.kubectl("delete", "pod", "rank")
    start(namespace, {"rank": JOB})
