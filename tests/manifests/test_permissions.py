"""Who may do what and reach whom: the account's exact rights, the network policy's truth table, the
disruption budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kdist import backends
from kdist.render import find_pods
from tests.manifests.jobs import make, place

KINDS = pytest.mark.parametrize("backend", backends.NAMES)
RIGHTS = ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")


def find(
    kind: str, backend: str = "job", rendezvous: Any = "kubernetes", **spec: Any
) -> list[dict[str, Any]]:
    return [each.document for each in place(make(**spec), backend, rendezvous) if each.kind == kind]


@KINDS
def test_the_account_may_read_and_write_one_config_map_and_nothing_else(backend: str) -> None:
    (account,) = find("ServiceAccount", backend)
    (role,) = find("Role", backend)
    (binding,) = find("RoleBinding", backend)
    assert account["automountServiceAccountToken"] is False
    assert role["rules"] == [
        {
            "apiGroups": [""],
            "resources": ["configmaps"],
            "resourceNames": ["digits-rendezvous"],
            "verbs": ["get", "update"],
        }
    ]
    expected = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "digits"}
    assert binding["roleRef"] == expected
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "digits"}]
    assert find("ClusterRole", backend) == find("ClusterRoleBinding", backend) == []


@KINDS
def test_an_account_of_the_users_is_used_as_it_is_and_may_meet_its_peers(backend: str) -> None:
    assert find("ServiceAccount", backend, serviceAccountName="cloud") == []
    (binding,) = find("RoleBinding", backend, serviceAccountName="cloud")
    assert [each["name"] for each in binding["subjects"]] == ["cloud"]
    workload = [
        each.document
        for each in place(make(serviceAccountName="cloud"), backend)
        if each.kind not in RIGHTS
    ]
    (pod,) = [pod["spec"] for each in workload for pod in find_pods(each)]
    assert pod["serviceAccountName"] == "cloud"
    assert "automountServiceAccountToken" not in pod, "that is for the account to say"
    sources = [
        (volume["name"], each)
        for volume in pod["volumes"]
        for each in volume.get("projected", {}).get("sources", [])
    ]
    assert [name for name, each in sources if "serviceAccountToken" in each] == ["token"]
    assert find("ServiceAccount", backend, "c10d", serviceAccountName="cloud") == []


@KINDS
def test_with_another_rendezvous_the_account_may_do_nothing(backend: str) -> None:
    assert [kind for kind in RIGHTS if find(kind, backend, "c10d")] == []


def test_the_state_of_the_rendezvous_is_never_overwritten_by_sending_the_job_again() -> None:
    (store,) = [
        each for each in find("ConfigMap") if each["metadata"]["name"] == "digits-rendezvous"
    ]
    assert set(store) == {"apiVersion", "kind", "metadata"}


Labels = Mapping[str, str]
JOB: Labels = {"kdist.dev/job": "digits"}
OTHER: Labels = {"kdist.dev/job": "another"}
NONE: Labels = {}
HERE = {"kubernetes.io/metadata.name": "ml"}
THERE = {"kubernetes.io/metadata.name": "web"}
MONITORING = {"kubernetes.io/metadata.name": "monitoring"}
MARKED = {"kubernetes.io/metadata.name": "metrics", "kdist.dev/monitoring": "true"}
PROMETHEUS: Labels = {"app.kubernetes.io/name": "prometheus"}
RANKS, METRICS = 29_500, 9401


def matches(selector: Mapping[str, Any], labels: Labels) -> bool:
    assert set(selector) <= {"matchLabels"}, "this reader of policies knows no other form"
    wanted: Labels = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()


def admits(peer: Mapping[str, Any], pod: Labels | None, namespace: Labels) -> bool:
    """Whether a peer of a policy means this pod; `pod` None is something with an address and no
    pod, such as a node.
    """
    assert set(peer) <= {"podSelector", "namespaceSelector"}
    if pod is None:
        return False
    near = (
        matches(peer["namespaceSelector"], namespace)
        if "namespaceSelector" in peer
        else namespace is HERE
    )
    return near and matches(peer.get("podSelector", {}), pod)


def allows(
    rules: list[Mapping[str, Any]],
    side: str,
    pod: Labels | None,
    namespace: Labels,
    port: int,
    protocol: str,
) -> bool:
    for rule in rules:
        ports = [(each["port"], each["protocol"]) for each in rule.get("ports", [])]
        peers = rule.get(side)
        if (not ports or (port, protocol) in ports) and (
            peers is None or any(admits(each, pod, namespace) for each in peers)
        ):
            return True
    return False


INTO = [
    # who, its labels (None: no pod), its namespace, may reach the ranks, may read the metrics
    ("the same job", JOB, HERE, True, True),
    ("another job", OTHER, HERE, False, False),
    ("a job of that name in another namespace", JOB, THERE, False, False),
    ("a foreign pod", NONE, HERE, False, False),
    ("a foreign pod of another namespace", NONE, THERE, False, False),
    ("a pod of the namespace monitoring", NONE, MONITORING, False, True),
    ("a pod of a namespace marked for monitoring", NONE, MARKED, False, True),
    ("Prometheus next to the job", PROMETHEUS, HERE, False, True),
    ("a pod that calls itself Prometheus elsewhere", PROMETHEUS, THERE, False, False),
    ("the control plane, whose proxy is no pod", None, HERE, False, False),
    ("another node", None, HERE, False, False),
]


@pytest.mark.parametrize(
    ("labels", "namespace", "ranks", "metrics"),
    [case[1:] for case in INTO],
    ids=[case[0] for case in INTO],
)
@KINDS
def test_who_may_reach_a_pod_of_the_job(
    backend: str, labels: Labels | None, namespace: Labels, ranks: bool, metrics: bool
) -> None:
    (policy,) = find("NetworkPolicy", backend)
    spec = policy["spec"]
    assert spec["podSelector"] == {"matchLabels": {"kdist.dev/job": "digits"}}
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert allows(spec["ingress"], "from", labels, namespace, RANKS, "TCP") is ranks
    assert allows(spec["ingress"], "from", labels, namespace, METRICS, "TCP") is metrics


OUT_OF = [
    ("its own job", JOB, HERE, RANKS, "TCP", True),
    ("names", NONE, THERE, 53, "UDP", True),
    ("the API server", None, THERE, 6443, "TCP", True),
    ("storage over HTTPS", None, THERE, 443, "TCP", True),
    ("another job", OTHER, HERE, RANKS, "TCP", False),
    ("a database", NONE, THERE, 5432, "TCP", False),
    ("the credentials of the machine", None, THERE, 80, "TCP", False),
    ("a kubelet", None, THERE, 10_250, "TCP", False),
]


@pytest.mark.parametrize(
    ("labels", "namespace", "port", "protocol", "allowed"),
    [case[1:] for case in OUT_OF],
    ids=[case[0] for case in OUT_OF],
)
def test_whom_a_pod_of_the_job_may_reach(
    labels: Labels | None, namespace: Labels, port: int, protocol: str, allowed: bool
) -> None:
    (policy,) = find("NetworkPolicy")
    assert allows(policy["spec"]["egress"], "to", labels, namespace, port, protocol) is allowed


@pytest.mark.parametrize(
    ("nodes", "kept"),
    [
        ({"min": 1, "max": 3}, 1),
        ({"min": 2, "max": 3}, 2),
        ({"min": 3, "max": 3}, 2),
        (2, 1),
        (1, None),
    ],
)
def test_a_drain_leaves_enough_nodes_and_is_never_stopped_for_good(
    nodes: Any, kept: int | None
) -> None:
    found = find("PodDisruptionBudget", nodes=nodes)
    assert [each["spec"]["minAvailable"] for each in found] == ([] if kept is None else [kept])


def test_names_resolve_before_anything_is_ready() -> None:
    (service,) = find("Service")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"kdist.dev/job": "digits"}
