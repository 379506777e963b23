"""A job with a queue waits until Kueue has room for it, and says so; then it trains, and sending it
again changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.cluster.conftest import Job
from tests.cluster.namespace import Namespace

# a ClusterQueue is in no namespace
pytestmark = [pytest.mark.e2e, pytest.mark.needs("kueue", "whole-cluster")]

API = "kueue.x-k8s.io/v1beta2"


@pytest.fixture
def queue(namespace: Namespace) -> Iterator[str]:
    """A queue of this namespace without room."""
    name = namespace.name
    send(namespace, {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": name}})
    set_room(namespace, "0")
    send(
        namespace,
        {
            "apiVersion": API,
            "kind": "LocalQueue",
            "metadata": {"name": "team"},
            "spec": {"clusterQueue": name},
        },
    )
    yield "team"
    namespace.kubectl("delete", "clusterqueue", name, "--wait=false")
    namespace.kubectl("delete", "resourceflavor", name, "--wait=false")


def send(namespace: Namespace, document: dict[str, object]) -> None:
    namespace.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(document))


def set_room(namespace: Namespace, cores: str) -> None:
    quota = [{"name": "cpu", "nominalQuota": cores}, {"name": "memory", "nominalQuota": "8Gi"}]
    groups = [
        {
            "coveredResources": ["cpu", "memory"],
            "flavors": [{"name": namespace.name, "resources": quota}],
        }
    ]
    selector = {"matchLabels": {"kubernetes.io/metadata.name": namespace.name}}
    spec = {"namespaceSelector": selector, "resourceGroups": groups}
    send(
        namespace,
        {
            "apiVersion": API,
            "kind": "ClusterQueue",
            "metadata": {"name": namespace.name},
            "spec": spec,
        },
    )


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["job", "jobset", "trainjob"])
def test_a_job_waits_in_its_queue_and_trains_when_there_is_room(
    namespace: Namespace, queue: str, job: Job, backend: str
) -> None:
    file = namespace.write(job(backend=backend, queue=queue, nodes={"min": 1, "max": 2}))
    namespace.kdist("apply", file)
    namespace.until("the job is queued", lambda: namespace.status("digits")["phase"] == "Queued")
    assert namespace.pods("digits") == []
    set_room(namespace, "2")
    namespace.until("Kueue lets the pods start", lambda: len(namespace.pods("digits")) == 2)
    assert " configured" not in namespace.kdist("apply", file)
    namespace.kdist("wait", "digits", "--timeout", "200s")
