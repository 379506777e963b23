"""Every pod of every workload kind: restricted, findable, told everything, and with no power it
does not need.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kdist import backends
from kdist.backends import Placement
from kdist.render import find_pods, render
from kdist.render.overlay import violations
from tests.manifests.jobs import EXAMPLES, FULL, example, load, make, place, workload

KINDS = pytest.mark.parametrize("backend", backends.NAMES)
JOBS = [*map(example, EXAMPLES.values()), load(FULL)]


def find_pod(backend: str = "job", rendezvous: Any = "kubernetes", **spec: Any) -> dict[str, Any]:
    (pod,) = find_pods(workload_or_runtime(backend, rendezvous, **spec))
    return pod


def workload_or_runtime(
    backend: str, rendezvous: Any = "kubernetes", **spec: Any
) -> list[dict[str, Any]]:
    return [each.document for each in place(make(**spec), backend, rendezvous)]


def find_container(
    backend: str = "job", rendezvous: Any = "kubernetes", **spec: Any
) -> dict[str, Any]:
    pod = find_pod(backend, rendezvous, **spec)["spec"]
    return next(
        each for each in pod["containers"] if each["name"] == backends.get(backend).container
    )


@KINDS
def test_every_pod_keeps_the_rules_of_restricted(backend: str) -> None:
    for job in JOBS:
        pods = [pod for each in place(job, backend) for pod in find_pods(each.document)]
        assert len(pods) == 1
        assert violations(pods[0]) == []


BAD: list[dict[str, Any]] = [
    {"hostNetwork": True},
    {"volumes": [{"name": "host", "hostPath": {"path": "/"}}]},
    {
        "securityContext": {"runAsUser": 0},
        "containers": [{"name": "trainer", "securityContext": {"runAsNonRoot": False}}],
    },
    {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}},
    {"securityContext": {"seccompProfile": {"type": "Unconfined"}}},
    *(
        {"containers": [{"name": "trainer", **change}]}
        for change in (
            {"securityContext": {"privileged": True, "allowPrivilegeEscalation": True}},
            {"securityContext": {"allowPrivilegeEscalation": None}},
            {"securityContext": {"runAsNonRoot": False}},
            {"securityContext": {"capabilities": {"drop": ["CHOWN"]}}},
            {"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}},
            {"securityContext": {"seLinuxOptions": {"user": "root"}}},
            {"ports": [{"containerPort": 80, "hostPort": 80}]},
            {"livenessProbe": {"httpGet": {"host": "example.com"}}},
        )
    ),
    {"initContainers": [{"name": "sidecar", "image": "a"}]},
]


@pytest.mark.parametrize("spec", BAD, ids=str)
def test_what_restricted_forbids_is_noticed(spec: dict[str, Any]) -> None:
    assert violations(find_pod(podTemplate={"spec": spec})) != []


def test_the_sysctls_that_1_37_made_safe_are_allowed() -> None:
    names = ("net.ipv4.tcp_notsent_lowat", "net.ipv4.tcp_slow_start_after_idle")
    context = {"sysctls": [{"name": name, "value": "1"} for name in names]}
    assert violations(find_pod(podTemplate={"spec": {"securityContext": context}})) == []


def test_a_pod_for_windows_is_not_asked_for_what_linux_has_and_may_not_be_a_host_process() -> None:
    def judge(**options: Any) -> list[str]:
        container = {"name": "trainer", "securityContext": {"windowsOptions": options}}
        context = {"runAsNonRoot": True}
        return violations(
            {
                "spec": {
                    "os": {"name": "windows"},
                    "securityContext": context,
                    "containers": [container],
                }
            }
        )

    assert judge(runAsUserName="ContainerUser") == []
    assert judge(hostProcess=True) == ["container trainer: hostProcess is not allowed"]


@KINDS
def test_a_pod_is_found_by_the_job_and_reported_which_run_it_belongs_to(backend: str) -> None:
    metadata = find_pod(backend)["metadata"]
    assert metadata["labels"]["kdist.dev/job"] == "digits"
    assert metadata["annotations"] == {
        "kdist.dev/run-id": "c0ffee00",
        "kubectl.kubernetes.io/default-container": backends.get(backend).container,
    }


def test_the_agents_of_what_was_edited_meet_by_themselves_at_any_size() -> None:
    def find(code: dict[str, bytes] | None = None, **spec: Any) -> str:
        more: dict[str, Any] = {"code": "src"} if code else {}
        job = make(**more, **spec)
        manifests = render(job, Placement("statefulset", "kubernetes", "c0ffee00", code=code))
        (pod,) = [pod for each in manifests for pod in find_pods(each.document)]
        return str(pod["spec"]["containers"][0]["args"][2])

    plain, coded = find(), find({"a.py": b"1"})
    assert find(nodes=5) == find(ttlSecondsAfterFinished=7) == find(queue="q") == plain
    assert (
        len(
            {
                plain,
                coded,
                find({"a.py": b"2"}),
                find(resources={"cpu": 1, "memory": "9Gi"}),
                find(maxRestarts=9),
            }
        )
        == 5
    )


@KINDS
def test_the_agent_is_reported_where_everything_is(backend: str) -> None:
    container = find_container(
        backend,
        checkpoints={"claim": "ckpt"},
        code="src",
        data=[{"claim": "c", "mountPath": "/data"}],
    )
    assert "command" not in container
    keep_alive = ["--on-finish=keep-alive"] if backend == "statefulset" else []
    version = container["args"].pop(2)
    workload = r"-\$\(KDIST_WORKLOAD\)" if backend in ("job", "jobset", "trainjob") else ""
    assert re.fullmatch(rf"--rendezvous-id=[0-9a-f]{{10}}{workload}", version)
    assert container["args"] == [
        "--config=/etc/kdist/train.json",
        "--run-id=c0ffee00",
        "--node=$(KDIST_POD)",
        "--address=$(KDIST_POD_IP)",
        "--listen=$(KDIST_POD_IPS)",
        "--scratch=/run/kdist",
        "--rendezvous=kubernetes:$(KDIST_NAMESPACE)/digits-rendezvous",
        "--checkpoints=/checkpoints/digits",
        "--code=/code",
        "--data=/data=/data",
        "--port=9401",
        "--termination-message=/dev/termination-log",
        *keep_alive,
    ]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {"config", "scratch", "tmp", "shm", "token", "checkpoints", "code", "data-0"}


@pytest.mark.parametrize(
    ("backend", "host"),
    [
        ("job", "digits-0.digits"),
        ("statefulset", "digits-0.digits"),
        ("pytorchjob", "digits-worker-0"),
        ("jobset", "digits-node-0-0.digits"),
        ("trainjob", "digits-node-0-0.digits"),
    ],
)
def test_without_a_role_the_agents_meet_at_node_0_and_have_no_token(
    backend: str, host: str
) -> None:
    pod = find_pod(backend, "c10d")["spec"]
    assert f"--rendezvous=c10d:{host}:29400" in find_container(backend, "c10d")["args"]
    assert pod["automountServiceAccountToken"] is False
    assert not [volume for volume in pod["volumes"] if "serviceAccountToken" in json.dumps(volume)]


@KINDS
def test_the_only_token_is_short_lived(backend: str) -> None:
    pod = find_pod(backend)["spec"]
    (token,) = [
        volume["projected"]
        for volume in pod["volumes"]
        if "serviceAccountToken" in json.dumps(volume)
    ]
    assert token["sources"][0] == {
        "serviceAccountToken": {"path": "token", "expirationSeconds": 3600}
    }
    assert pod["automountServiceAccountToken"] is False


@KINDS
def test_only_a_kind_that_never_ends_has_a_readiness_probe(backend: str) -> None:
    container = find_container(backend)
    assert ("readinessProbe" in container) == (backend == "statefulset")
    assert (
        container["livenessProbe"]["httpGet"]["path"]
        == container["startupProbe"]["httpGet"]["path"]
        == "/healthz"
    )


def test_a_pod_leaves_a_lost_node_after_half_a_minute_unless_the_job_says_otherwise() -> None:
    both = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"]
    assert [
        (each["key"], each["tolerationSeconds"]) for each in find_pod()["spec"]["tolerations"]
    ] == [(key, 30) for key in both]
    own = {"key": both[0], "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
    assert find_pod(tolerations=[own])["spec"]["tolerations"] == [
        {"key": both[1], "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30},
        own,
    ]


def test_a_pod_may_use_what_it_asks_for_and_no_more() -> None:
    wanted = {"cpu": "2", "memory": "8Gi", "nvidia.com/gpu": "4"}
    assert find_container(resources={"cpu": 2, "memory": "8Gi", "gpu": 4})["resources"] == {
        "requests": wanted,
        "limits": wanted,
    }
    assert "nvidia.com/gpu" not in find_container()["resources"]["limits"]


def test_shared_memory_is_as_large_as_the_pods_memory() -> None:
    (shm,) = [
        each["emptyDir"]
        for each in find_pod(resources={"memory": "8Gi"})["spec"]["volumes"]
        if each["name"] == "shm"
    ]
    assert shm == {"medium": "Memory", "sizeLimit": "8Gi"}


def test_a_secret_is_named_and_never_carried() -> None:
    secret = {"name": "s", "key": "k"}
    variables = find_container(env=[{"name": "TOKEN", "secret": secret}])["env"]
    assert {"name": "TOKEN", "valueFrom": {"secretKeyRef": secret}} in variables


@pytest.mark.parametrize(
    ("given", "rendered"),
    [
        ("$HOME costs $5", "$HOME costs $5"),
        ("$(KDIST_POD)", "$$(KDIST_POD)"),
        ("$$(A)", "$$$$(A)"),
        ("$(", "$$("),
    ],
)
def test_a_value_reaches_the_container_as_it_is_written(given: str, rendered: str) -> None:
    variables = find_container(env=[{"name": "A", "value": given}])["env"]
    assert {"name": "A", "value": rendered} in variables


def test_a_job_may_set_what_kdist_only_proposes() -> None:
    variables = find_container(env=[{"name": "HOME", "value": "/data"}])["env"]
    assert [each["value"] for each in variables if each["name"] == "HOME"] == ["/data"]


@pytest.mark.parametrize(
    ("image", "policy"),
    [
        ("a/b", "Always"),
        ("a/b:latest", "Always"),
        ("a/b:1", "IfNotPresent"),
        ("registry:5000/a/b", "Always"),
        ("a/b@sha256:" + "0" * 64, "IfNotPresent"),
    ],
)
def test_a_tag_that_moves_is_pulled_each_time(image: str, policy: str) -> None:
    assert find_container(image=image)["imagePullPolicy"] == policy


def test_the_checkpoints_of_another_run_are_taken_only_on_demand() -> None:
    (taking,) = find_pods(workload(place(make(), take_over=True), "job"))
    assert "--take-over" in taking["spec"]["containers"][0]["args"]
    assert "--take-over" not in find_container()["args"]
