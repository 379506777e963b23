"""The connection to a real API server and kubelet: commands in a pod, forwarded ports, logs and
watches.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from kdist import cluster
from kdist.cluster import ApiError, ApiNotFoundError, Cluster
from kdist.errors import Code, KdistError
from tests.cluster.namespace import Namespace

pytestmark = pytest.mark.e2e

SERVE = """
import http.server, sys
print("ready", flush=True)
print("a line on stderr", file=sys.stderr, flush=True)
http.server.HTTPServer(("", 8000), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
SAID = {"ready", "a line on stderr"}  # two streams, which may come in either order


@pytest.fixture
def connection(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A connection of this process, in the namespace."""
    monkeypatch.setenv("KUBECONFIG", namespace.environment["KUBECONFIG"])
    return cluster.connect(namespace=namespace.name)


@pytest.fixture
def pod(namespace: Namespace, connection: Cluster) -> Iterator[str]:
    """A pod that serves its root folder on port 8000 and has said that it is ready."""
    document = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "server", "labels": {"who": "server"}},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "trainer",
                    "image": namespace.environment["KDIST_IMAGE"],
                    "command": ["python", "-c", SERVE],
                    "workingDir": "/etc",
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        },
    }
    connection.send_create(document)
    for _, each in connection.watch("v1", "Pod", selector="who=server", timeout=120):
        if (each.get("status") or {}).get("phase") == "Running":
            break
    printed: set[str] = set()
    for line in connection.logs("server", follow=True):
        printed.add(line)
        if printed == SAID:
            break
    yield "server"
    assert connection.send_delete("v1", "Pod", "server", grace=0)


def test_a_command_in_a_pod_gives_its_output_and_its_exit_code(
    connection: Cluster, pod: str
) -> None:
    assert connection.run(pod, ["python", "-c", "print('x' * 200_000); raise SystemExit(7)"]) == (
        7,
        b"x" * 200_000 + b"\n",
    )
    printed: list[bytes] = []
    code = connection.exec(
        pod,
        ["python", "-c", "import sys; sys.stderr.write('why')"],
        out=printed.append,
        err=printed.append,
    )
    assert (code, printed) == (0, [b"why"])
    with pytest.raises(KdistError, match="executable file not found"):
        connection.run(pod, ["no-such-program"])
    with pytest.raises(KdistError, match="has not ended after 1 s") as raised:
        connection.run(pod, ["python", "-c", "import time; time.sleep(60)"], timeout=1)
    assert raised.value.code == Code.TIMEOUT
    with pytest.raises(ApiNotFoundError):
        connection.run("nobody", ["true"])


def test_a_forwarded_port_carries_many_connections_at_once(connection: Cluster, pod: str) -> None:
    found: list[int] = []

    def ask(port: int) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/passwd", timeout=30) as answer:
            found.append(len(answer.read()))

    with connection.forward(pod, 8000) as port:
        threads = [threading.Thread(target=ask, args=(port,)) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(set(found)) == 1
    assert len(found) == 5
    assert b"root" in connection.proxy(pod, 8000, "/passwd")
    with pytest.raises(ApiError) as raised:
        connection.proxy(pod, 9, "/passwd")
    assert raised.value.status == 503


def test_a_log_is_read_from_its_end_and_from_a_moment_on(connection: Cluster, pod: str) -> None:
    stamps, lines = zip(
        *(line.split(" ", 1) for line in connection.logs(pod, timestamps=True, tail=2)), strict=True
    )
    assert set(lines) == SAID
    assert list(connection.logs(pod, since="2000-01-01T00:00:00Z")) == list(lines)
    assert list(connection.logs(pod, since=stamps[1]))[-1] == lines[1]
    with pytest.raises(ApiNotFoundError):
        list(connection.logs("nobody"))


def test_a_watch_sees_what_others_do(namespace: Namespace, connection: Cluster) -> None:
    seen: list[tuple[str, str]] = []
    begun = threading.Event()

    def look() -> None:
        for change, each in connection.watch("v1", "ConfigMap", selector="w=x", timeout=60):
            seen.append((change, (each.get("data") or {}).get("a", "")))
            begun.set()
            if change == "DELETED":
                return

    made = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "w", "labels": {"w": "x"}},
        "data": {"a": "1"},
    }
    namespace.kubectl("create", "-f", "-", stdin=json.dumps(made))
    thread = threading.Thread(target=look)
    thread.start()
    assert begun.wait(60)
    namespace.kubectl("patch", "configmap", "w", "-p", json.dumps({"data": {"a": "2"}}))
    namespace.kubectl("delete", "configmap", "w")
    thread.join(60)
    assert seen == [("ADDED", "1"), ("MODIFIED", "2"), ("DELETED", "2")]


@pytest.mark.needs("jobset")
def test_rights_and_kinds_are_the_servers_own_word(connection: Cluster) -> None:
    assert {
        ("v1", "Pod"),
        ("batch/v1", "Job"),
        ("jobset.x-k8s.io/v1alpha2", "JobSet"),
    } <= connection.kinds()
    assert connection.can_i("create", "v1", "Pod", subresource="exec")
    assert connection.whoami()
    assert connection.version()["gitVersion"].startswith("v1.")
