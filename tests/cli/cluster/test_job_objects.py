"""What is about to be sent is checked: it is in the job's namespace, of a kind that a job has, and
the job's own.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kdist.cluster import ApiError, ForeignError, JobObjects, JobOwner
from kdist.manifest import Manifest, mark
from tests.cli.cluster.api import Api
from tests.cli.cluster.conftest import Connect, Serve
from tests.cli.cluster.objects import Store

Document = dict[str, Any]
UID = "uid-of-the-trainingjob"
OWNED: dict[str, Any] = {"ownerReferences": [{"kind": "TrainingJob", "name": "digits", "uid": UID}]}


def make(kind: str, name: str = "digits", *, api_version: Any = "v1", **metadata: Any) -> Document:
    """An object that bears the mark of the job `digits`."""
    given = {"name": name, "annotations": {"kdist.dev/owner": mark("digits", kind, name)}}
    return {"apiVersion": api_version, "kind": kind, "metadata": {**given, **metadata}}


@pytest.fixture
def store() -> Store:
    """The objects that the server has."""
    return Store()


@pytest.fixture
def api(store: Store, serve: Serve) -> Api:
    """Its server."""
    return serve(store)


@pytest.fixture
def connect_as(api: Api, connect: Connect) -> Any:
    """Make the door of the job `digits`: `connect_as(uid=…)`."""

    def make_door(**owner: Any) -> JobObjects:
        found = connect(api.url)
        return JobObjects(found, JobOwner(found.namespace, "digits", **owner))

    return make_door


NEVER = {
    "another namespace": make("ConfigMap", namespace="kube-system"),
    "a kind that no job has": make("Deployment", api_version="apps/v1"),
    "the kind of a key, which is created and never changed": make("Secret"),
    "a kind of the whole cluster": make("ClusterRole", api_version="rbac.authorization.k8s.io/v1"),
    "a kind of another version": make("Job", api_version="batch/v2"),
    "a kind of another backend": make("StatefulSet", api_version="apps/v1", **OWNED),
    "no mark": make("ConfigMap", annotations={}),
    "the mark of another job": make(
        "ConfigMap", annotations={"kdist.dev/owner": "other/configmap/digits"}
    ),
    "the mark of another object": make(
        "ConfigMap", annotations={"kdist.dev/owner": "digits/configmap/digits-rendezvous"}
    ),
    "another TrainingJob": make(
        "TrainingJob", "other", api_version="kdist.dev/v1alpha1", annotations={}
    ),
}


@pytest.mark.parametrize("what", NEVER)
def test_nothing_is_sent_that_no_job_may_have(what: str, connect_as: Any, api: Api) -> None:
    door = connect_as(backend="job")
    with pytest.raises(ForeignError, match="not an object of job digits"):
        door.apply(Manifest(NEVER[what]), force=True)
    if what != "the kind of a key, which is created and never changed":
        with pytest.raises(ForeignError):
            door.create(NEVER[what])
    assert api.asked == []


def test_an_object_of_a_trainingjob_names_it_as_its_owner(
    connect_as: Any, api: Api, store: Store
) -> None:
    door = connect_as(uid=UID)
    with pytest.raises(ForeignError, match="without its owner"):
        door.apply(Manifest(make("ConfigMap")), known=None)
    assert api.asked == []
    assert door.apply(Manifest(make("ConfigMap", **OWNED))).verb == "created"


@pytest.mark.parametrize("owner", ["nobody", "an earlier TrainingJob", "another job"])
def test_what_exists_is_changed_and_deleted_only_if_it_is_the_jobs(
    owner: str, connect_as: Any, store: Store
) -> None:
    theirs = make("ConfigMap", uid="theirs")
    if owner == "an earlier TrainingJob":
        theirs["metadata"]["ownerReferences"] = [{"kind": "TrainingJob", "uid": "earlier"}]
    if owner == "another job":
        theirs["metadata"] |= {"annotations": {"kdist.dev/owner": "o/configmap/digits"}, **OWNED}
    store.put("/api/v1/namespaces/ml/configmaps/digits", theirs)
    before = copy.deepcopy(store.objects)
    door = connect_as(uid=UID)
    with pytest.raises(ForeignError, match="configmap/digits does not belong to job digits"):
        door.change("v1", "ConfigMap", "digits", {"data": {"a": "1"}})
    with pytest.raises(ForeignError):
        door.remove("v1", "ConfigMap", "digits")
    with pytest.raises(ForeignError):
        door.apply(Manifest(make("ConfigMap", **OWNED)), force=True)
    with pytest.raises(ForeignError):
        door.change("v1", "ConfigMap", "digits", {"data": {"a": "1"}}, known=theirs)
    assert store.objects == before


def test_a_pod_is_the_jobs_if_a_maker_of_its_pods_controls_it(
    connect_as: Any, store: Store
) -> None:
    path = "/api/v1/namespaces/ml/pods/digits-0"
    reference = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "name": "digits",
        "uid": "workload",
        "controller": True,
    }
    metadata = {"name": "digits-0", "uid": "pod", "ownerReferences": [reference]}
    store.put(path, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata})
    with pytest.raises(ForeignError, match="it belongs to Job/digits"):
        connect_as(makers=frozenset({"another"})).remove("v1", "Pod", "digits-0", grace=0)
    assert path in store.objects
    assert connect_as(makers=frozenset({"workload"})).remove("v1", "Pod", "digits-0", grace=0)
    assert path not in store.objects


def test_only_the_very_object_that_was_checked_is_changed(
    connect_as: Any, api: Api, store: Store
) -> None:
    path = "/api/v1/namespaces/ml/configmaps/digits"
    store.put(path, make("ConfigMap", uid="first"))
    seen = copy.deepcopy(store.objects[path])
    store.put(path, make("ConfigMap", uid="second"))
    door = connect_as()
    with pytest.raises(ApiError, match="has been modified"):
        door.change("v1", "ConfigMap", "digits", {"data": {"a": "1"}}, known=seen)
    assert not door.remove("v1", "ConfigMap", "digits", uid="first")
    assert "data" not in store.objects[path]
    assert door.remove("v1", "ConfigMap", "digits", uid="second")


def test_a_pod_that_nothing_owns_is_deleted_only_as_the_one_that_was_shown(
    store: Store, connect_as: Any
) -> None:
    path, door = "/api/v1/namespaces/ml/pods/left", connect_as()
    pod: Document = {"apiVersion": "v1", "kind": "Pod"}
    metadata = {"name": "left", "uid": "left", "labels": {"kdist.dev/job": "digits"}}
    owners = [{"kind": "Job", "name": "x", "uid": "1"}]
    theirs: list[Document] = [{"ownerReferences": owners}, {"labels": {"kdist.dev/job": "mnist"}}]
    for other in theirs:
        store.put(path, {**pod, "metadata": {**metadata, **other}})
        with pytest.raises(ForeignError, match="not an object of job digits"):
            door.remove_ownerless("left", uid="left")
    store.put(path, {**pod, "metadata": metadata})
    assert not door.remove_ownerless("left", uid="another")
    assert not door.remove_ownerless("gone", uid="left")
    assert path in store.objects
    assert door.remove_ownerless("left", uid="left")
    assert path not in store.objects
