"""The cache: newer versions replace older ones, what belongs to no job is not kept, and a watch
goes on after an object that it could not take in.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import pytest

from kdist.cluster import Cluster
from kdist.errors import InvalidJobError
from kdist.spec import API_VERSION, KIND, TrainingJob
from kdist_controller.cache import Cache, Informer, trim
from kdist_controller.node_recovery import NodeCache, trim_node
from kdist_controller.resource import JobKey, Resource

KEY = JobKey("ml", "digits")


def pod(version: int, *, uid: str = "1", node: str = "node-0") -> dict[str, Any]:
    """A pod of the job, trimmed."""
    metadata = {
        "name": "digits-0",
        "namespace": "ml",
        "uid": uid,
        "resourceVersion": str(version),
        "labels": {"kdist.dev/job": "digits"},
        "managedFields": [{"manager": "kubelet"}],
    }
    found = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"nodeName": node}}
    return trim(found)


def test_an_older_version_than_the_known_one_is_no_news() -> None:
    cache = Cache()
    assert cache.put(pod(10)) == {KEY}
    assert cache.put(pod(9)) == set()
    assert cache.put(pod(10)) == set()
    assert cache.put(pod(11)) == {KEY}  # longer as text too, where 9 is greater than 10


def test_the_deletion_of_an_earlier_object_leaves_the_present_one() -> None:
    cache = Cache()
    cache.put(pod(10, uid="2"))
    assert cache.drop(pod(12, uid="1")) == set()
    assert list(cache.read(KEY).pods) == ["digits-0"]
    assert cache.drop(pod(12, uid="2")) == {KEY}
    assert cache.read(KEY).pods == {}


def test_a_list_names_the_jobs_of_what_has_come_and_gone() -> None:
    cache = Cache()
    cache.put(pod(10))
    assert cache.replace("Pod", None, [pod(10)]) == set()
    assert cache.replace("Pod", "other", []) == set()
    assert cache.replace("Pod", "ml", []) == {KEY}


def test_what_nobody_decides_on_is_not_kept() -> None:
    assert "managedFields" not in pod(1)["metadata"]
    other = pod(1)
    other["metadata"]["labels"] = {}
    assert Cache().put(other) == set()


def test_what_an_init_container_fetches_is_kept_and_its_environment_is_not() -> None:
    init = {"name": "fetch-data-0", "args": ["--url=s3://bucket"], "env": [{"name": "A"}]}
    document = {"kind": "Pod", "metadata": {}, "spec": {"initContainers": [init]}}
    kept = {"name": "fetch-data-0", "args": ["--url=s3://bucket"]}
    assert trim(document)["spec"]["initContainers"] == [kept]
    assert "initContainers" not in pod(1)["spec"]


def test_a_node_concerns_the_jobs_with_pods_on_it_when_it_changes() -> None:
    cache = Cache()
    cache.put(pod(10))
    nodes = NodeCache(cache)
    assert nodes.put(_node("node-0", "True")) == set()
    assert nodes.put(_node("node-0", "Unknown")) == {KEY}
    assert list(nodes.find([pod(10)])) == ["node-0"]
    assert nodes.put(_node("node-0", "True")) == {KEY}
    assert nodes.find([pod(10)]) == {}
    assert nodes.put(_node("node-1", "Unknown")) == set()


def _node(name: str, ready: str) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": ready}, {"type": "DiskPressure", "status": "False"}]
    return trim_node({"metadata": {"name": name}, "status": {"conditions": conditions}})


@pytest.mark.parametrize("spec", [{"a": [{"": 0}] * 20_000}, [[]] * 20_000, {"a": [[[]] * 9_999]}])
def test_a_trainingjob_with_more_values_than_any_job_is_refused_and_takes_no_memory(
    spec: Any,
) -> None:
    metadata = {"name": "digits", "namespace": "ml", "uid": "1", "resourceVersion": "1"}
    document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}
    kept = trim(document)
    assert kept["spec"] == {}
    with pytest.raises(InvalidJobError, match="the spec has more than 5000 values"):
        Resource(kept).read_job()
    honest = {**document, "spec": {"nodes": 2}}
    assert trim(honest)["spec"] == {"nodes": 2}


def test_a_trainingjob_is_read_once_while_its_text_stays_whatever_else_of_it_changes() -> None:
    cache = Cache()

    def read() -> TrainingJob:
        found = cache.read(KEY)
        assert found.resource is not None
        return Resource(found.resource, found.results).read_job()

    cache.put(_resource(1, nodes=2))
    first = read()
    cache.put({**_resource(2, nodes=2), "status": {"phase": "Running"}})
    cache.put(pod(3))
    assert read() is first
    cache.put(_resource(4, nodes=3))
    assert (read().spec.nodes.max, first.spec.nodes.max) == (3, 2)
    assert read() is read()


def test_what_was_read_of_a_trainingjob_goes_with_it() -> None:
    cache = Cache()
    cache.put(_resource(1, nodes=2))
    found = cache.read(KEY)
    assert found.resource is not None
    results = weakref.ref(found.results)
    job = weakref.ref(Resource(found.resource, found.results).read_job())
    cache.put(pod(2))
    cache.drop(_resource(3, nodes=2))
    cache.drop(pod(3))
    del found
    assert (results(), job()) == (None, None)


def _resource(version: int, *, nodes: int) -> dict[str, Any]:
    """The job's TrainingJob, trimmed."""
    metadata = {"name": KEY.name, "namespace": KEY.namespace, "uid": "7"}
    metadata["resourceVersion"] = str(version)
    spec = {"image": "digits:1", "nodes": nodes, "train": {"workload": "digits", "steps": 5}}
    return trim({"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec})


_SECONDS = 60.0


class _FailingOnce(Cache):
    """A cache that meets something unforeseen in the first list that it is given."""

    lists = 0

    def replace(
        self, kind: str, namespace: str | None, listed: Iterable[dict[str, Any]]
    ) -> set[JobKey]:
        self.lists += 1
        if self.lists == 1:
            raise TypeError("no list of this shape was foreseen")
        return super().replace(kind, namespace, listed)


def test_a_watch_that_fails_in_an_unforeseen_way_starts_again(connection: Cluster) -> None:
    heard = threading.Event()
    informer = Informer(
        connection,
        _FailingOnce(),
        ("v1", "Pod"),
        namespace=None,
        selector="",
        metadata_only=False,
        notify=lambda _: heard.set(),
    )
    informer.start()
    assert informer.synced.wait(_SECONDS)
    assert heard.wait(_SECONDS)
