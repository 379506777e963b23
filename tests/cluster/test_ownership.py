"""Every kind of object that a job has x whose it may be: no command changes or deletes what is not the job's, and each says so.

Pods need not run: the objects are all that this is about.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from kdist.errors import Code
from tests.cluster.conftest import Job
from tests.cluster.namespace import Namespace

pytestmark = pytest.mark.e2e

IDLE: dict[str, Any] = {"nodeSelector": {"kdist.dev/none": "such"}}
OURS = {"kdist.dev/job": "digits", "app.kubernetes.io/managed-by": "kdist"}
WHOSE = ("of that name", "with our labels", "of another job")
KINDS = "serviceaccount,role,rolebinding,pvc,configmap,service,networkpolicy,pdb"
WORKLOADS = {
    "job": "job",
    "statefulset": "statefulset",
    "jobset": "jobset",
    "pytorchjob": "pytorchjob",
    "trainjob": "trainingruntime",
}


def make_foreign(document: dict[str, Any], whose: str) -> dict[str, Any]:
    """Somebody else's object of the same kind and name."""
    labels = {} if whose == "of that name" else OURS
    name, kind = document["metadata"]["name"], document["kind"]
    marks = {"kdist.dev/owner": f"other/{kind.lower()}/{name}"} if whose == "of another job" else {}
    metadata = {"name": name, "labels": labels, "annotations": marks}
    rest = {key: value for key, value in document.items() if key not in ("metadata", "status")}
    for field in ("clusterIPs", "volumeName", "ipFamilies", "ipFamilyPolicy", "runtimePatches"):
        rest.get("spec", {}).pop(field, None)
    if kind == "Job":  # a selector that the server gave
        rest["spec"].pop("selector", None)
        rest["spec"]["template"]["metadata"]["labels"] = {"theirs": "yes"}
    return {**rest, "metadata": metadata}


def look(namespace: Namespace, kind: str, name: str) -> dict[str, Any]:
    """What of an object only those change who mean to: not its status, nor what controllers note on it."""
    found = namespace.get(kind, name)
    assert found, f"{kind}/{name} is gone"
    metadata = {key: value for key, value in found["metadata"].items() if key in ("name", "uid", "labels")}
    metadata["marks"] = {key: value for key, value in (found["metadata"].get("annotations") or {}).items() if "kdist" in key}
    assert "deletionTimestamp" not in found["metadata"], f"{kind}/{name} is being deleted"
    return {**{key: value for key, value in found.items() if key not in ("metadata", "status")}, "metadata": metadata}


def replace(namespace: Namespace, documents: list[tuple[dict[str, Any], str]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Put others' objects in the place of the job's; returns them as they are then."""
    for document, _ in documents:
        namespace.kubectl("delete", document["kind"].lower(), document["metadata"]["name"], "--cascade=background")
    items = [make_foreign(document, whose) for document, whose in documents]
    namespace.kubectl("create", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    names = [(document["kind"].lower(), document["metadata"]["name"]) for document, _ in documents]
    return {(kind, name): look(namespace, kind, name) for kind, name in names}


def all_of(namespace: Namespace, kinds: str) -> list[dict[str, Any]]:
    """The job's objects of these kinds, in one order."""
    items: list[dict[str, Any]] = json.loads(namespace.kubectl("get", kinds, "-l", "kdist.dev/job=digits", "-o", "json"))["items"]
    return sorted(
        (each for each in items if not each["metadata"].get("ownerReferences")), key=lambda each: each["metadata"]["name"]
    )


@pytest.mark.parametrize("shift", [0, *(pytest.param(shift, marks=pytest.mark.wide) for shift in (1, 2))])
def test_no_command_touches_what_stands_beside_a_job(namespace: Namespace, job: Job, shift: int) -> None:
    namespace.copy_sources()
    file = namespace.write(job(backend="job", nodes={"min": 1, "max": 3}, code="./src", **IDLE))
    namespace.kdist("apply", file)
    beside = [each for each in all_of(namespace, KINDS) if (each["kind"], each["metadata"]["name"]) != ("ConfigMap", "digits")]
    assert {each["kind"] for each in beside} >= {"ServiceAccount", "Role", "RoleBinding", "PersistentVolumeClaim", "ConfigMap"}
    theirs = replace(namespace, [(each, WHOSE[(place + shift) % 3]) for place, each in enumerate(beside)])
    own = namespace.get("configmap", "digits")["metadata"]["resourceVersion"]
    for command in (("apply", file), ("scale", "digits", "--nodes", "1:2", "--no-wait")):
        refused = namespace.type_kdist(*command)
        assert refused.returncode == Code.ERROR, refused.stderr
        assert namespace.get("configmap", "digits")["metadata"]["resourceVersion"] == own, "it stopped before it changed anything"
        named = [name for _, name in theirs if f"/{name} in namespace" in refused.stderr]
        assert command[0] == "scale" or len(named) == len(theirs), refused.stderr
    deleted = namespace.type_kdist("delete", "digits", "--purge")
    assert deleted.returncode == Code.OK, deleted.stderr
    for (kind, name), before in theirs.items():
        assert look(namespace, kind, name) == before
        labelled = before["metadata"].get("labels")
        assert f"/{name} stays: it is not of job digits" in deleted.stderr or not labelled, deleted.stderr
    assert namespace.get("job", "digits") == {}
    assert namespace.get("configmap", "digits") == {}


@pytest.mark.parametrize("whose", [WHOSE[1], *(pytest.param(each, marks=pytest.mark.wide) for each in (WHOSE[0], WHOSE[2]))])
@pytest.mark.parametrize("backend", ["job", *(pytest.param(each, marks=pytest.mark.wide) for each in list(WORKLOADS)[1:])])
def test_no_command_touches_a_workload_or_a_job_of_somebody_else(
    namespace: Namespace, job: Job, backend: str, whose: str
) -> None:
    file = namespace.write(job(backend=backend, **IDLE))
    namespace.kdist("apply", file)
    kinds = f"{WORKLOADS[backend]},configmap"
    foreign = [each for each in all_of(namespace, kinds) if each["metadata"]["name"] == "digits"]
    theirs = replace(namespace, [(each, whose) for each in foreign])
    for command in (("apply", file), ("scale", "digits", "--nodes", "1", "--no-wait"), ("restart", "digits"), ("stop", "digits")):
        refused = namespace.type_kdist(*command)
        assert refused.returncode == Code.ERROR, refused.stderr
        assert "is not of job digits" in refused.stderr
    deleted = namespace.type_kdist("delete", "digits", "--purge")
    assert deleted.returncode == Code.OK, deleted.stderr
    for (kind, name), before in theirs.items():
        assert look(namespace, kind, name) == before
        assert f"{name} stays: it is not of job digits" in deleted.stderr
