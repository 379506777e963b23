"""Every kind of object that a job has x whose it may be: no command changes or deletes what is not
the job's, and each says so.

Pods need not run: the objects are all that this is about.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kdist import deploy
from kdist.errors import Code
from kdist.job_file import load_file
from kdist.manifest import find_owner
from tests.cluster.conftest import Job
from tests.cluster.kinds import RESOURCE
from tests.cluster.namespace import Namespace

pytestmark = pytest.mark.e2e

IDLE: dict[str, Any] = {"nodeSelector": {"kdist.dev/none": "such"}}
OURS = {"kdist.dev/job": "digits", "app.kubernetes.io/managed-by": "kdist"}
WHOSE = ("of that name", "with our labels", "of another job")
KINDS = "serviceaccount,role,rolebinding,pvc,configmap,service,networkpolicy,pdb"
# What a smaller job of the same name no longer asks for, so that an apply would prune it.
SMALLER = ("rendezvous=c10d", "nodes=1", "code=null", "serviceAccountName=default")
DROPPED = {"ServiceAccount", "Role", "RoleBinding", "PodDisruptionBudget"}
KEPT = {"PersistentVolumeClaim", "ConfigMap", "Service", "NetworkPolicy"}


def matrix(first: Callable[[int], int]) -> pytest.MarkDecorator:
    """Each kind of workload x whose its objects are; CI takes case `first(place)` of the kind at
    that place.
    """
    cases = []
    for place, backend in enumerate(RESOURCE):
        for number in range(3):
            marks = [] if number == first(place) else [pytest.mark.wide]
            name = f"{backend}-{WHOSE[number].replace(' ', '-')}"
            cases.append(pytest.param(backend, number, marks=marks, id=name))
    return pytest.mark.parametrize(("backend", "shift"), cases)


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
    """What of an object only those change who mean to: not its status, nor what controllers note on
    it.
    """
    found = namespace.get(kind, name)
    assert found, f"{kind}/{name} is gone"
    metadata = {
        key: value for key, value in found["metadata"].items() if key in ("name", "uid", "labels")
    }
    metadata["marks"] = {
        key: value
        for key, value in (found["metadata"].get("annotations") or {}).items()
        if "kdist" in key
    }
    assert "deletionTimestamp" not in found["metadata"], f"{kind}/{name} is being deleted"
    return {
        **{key: value for key, value in found.items() if key not in ("metadata", "status")},
        "metadata": metadata,
    }


def replace(
    namespace: Namespace, documents: list[tuple[dict[str, Any], str]]
) -> dict[tuple[str, str], dict[str, Any]]:
    """Put others' objects in the place of the job's; returns them as they are then."""
    for document, _ in documents[::-1]:
        kind, name = document["kind"].lower(), document["metadata"]["name"]
        namespace.kubectl("delete", kind, name, "--cascade=background", "--ignore-not-found")
    items = [make_foreign(document, whose) for document, whose in documents]
    for late in (
        False,
        True,
    ):  # a TrainJob is sent alone, since what is there cannot be created again
        if some := [each for each in items if (each["kind"] == "TrainJob") is late]:
            text = json.dumps({"apiVersion": "v1", "kind": "List", "items": some})
            namespace.send("create", stdin=text)
    names = [(document["kind"].lower(), document["metadata"]["name"]) for document, _ in documents]
    return {(kind, name): look(namespace, kind, name) for kind, name in names}


def all_of(namespace: Namespace, kinds: str) -> list[dict[str, Any]]:
    """The job's objects of these kinds, in one order."""
    items: list[dict[str, Any]] = json.loads(
        namespace.kubectl("get", kinds, "-l", "kdist.dev/job=digits", "-o", "json")
    )["items"]
    ours = [each for each in items if find_owner(each) == "digits"]
    return sorted(ours, key=lambda each: (each["metadata"]["name"], each["kind"]))


def type_all(
    namespace: Namespace, *commands: tuple[str, ...]
) -> list[subprocess.CompletedProcess[str]]:
    """These commands at once: each is refused, so none can be in another's way."""
    with ThreadPoolExecutor(len(commands)) as pool:
        return list(pool.map(lambda command: namespace.type_kdist(*command), commands))


@pytest.mark.sampled
@matrix(lambda place: 0 if place == 0 else -1)
def test_no_command_touches_what_stands_next_to_a_job(
    namespace: Namespace, job: Job, backend: str, shift: int
) -> None:
    namespace.copy_sources()
    file = namespace.write(job(backend=backend, nodes={"min": 1, "max": 3}, code="./src", **IDLE))
    namespace.kdist("apply", file)
    dependents = [
        each
        for each in all_of(namespace, KINDS)
        if (each["kind"], each["metadata"]["name"]) != ("ConfigMap", "digits")
    ]
    assert {each["kind"] for each in dependents} >= DROPPED | KEPT
    foreign = [(each, WHOSE[(place + shift) % 3]) for place, each in enumerate(dependents)]
    theirs = replace(namespace, foreign)
    own = namespace.get("configmap", "digits")["metadata"]["resourceVersion"]
    scale = ("scale", "digits", "--nodes", "1:2", "--no-wait")
    applied, scaled = type_all(namespace, ("apply", file), scale)
    codes = (applied.returncode, scaled.returncode)
    assert codes == (Code.ERROR, Code.ERROR), applied.stderr + scaled.stderr
    after = namespace.get("configmap", "digits")["metadata"]["resourceVersion"]
    assert after == own, "they stopped before they changed anything"
    assert [name for _, name in theirs if f"/{name} in namespace" not in applied.stderr] == []
    deleted = namespace.type_kdist("delete", "digits", "--purge")
    assert deleted.returncode == Code.OK, deleted.stderr
    for (kind, name), before in theirs.items():
        assert look(namespace, kind, name) == before
        reported = f"/{name} stays: it does not belong to job digits" in deleted.stderr
        assert reported or not before["metadata"].get("labels"), deleted.stderr
    assert namespace.get(RESOURCE[backend], "digits") == {}
    assert namespace.get("configmap", "digits") == {}


@pytest.mark.sampled
@matrix(lambda place: 1 if place == 0 else -1)
def test_no_apply_prunes_what_only_looks_like_the_jobs(
    namespace: Namespace, job: Job, backend: str, shift: int
) -> None:
    namespace.copy_sources()
    file = namespace.write(job(backend=backend, nodes={"min": 1, "max": 3}, code="./src", **IDLE))
    smaller = ("apply", file, *(word for each in SMALLER for word in ("--set", f"spec.{each}")))
    planned = deploy.make_plan(None, load_file(str(namespace.home / file)), base=namespace.home)
    rendered = [each.document for each in planned.manifests]
    dropped = [
        each
        for each in rendered
        if each["kind"] in DROPPED
        or each["metadata"]["name"].startswith(("digits-rend", "digits-code-"))
    ]
    for each in dropped:  # no render knows the namespace
        for subject in each.get("subjects", []):
            subject["namespace"] = namespace.name
    foreign = [(each, WHOSE[(place + shift) % 3]) for place, each in enumerate(dropped)]
    theirs = replace(namespace, foreign)
    namespace.kdist(*smaller)
    assert "pruned" not in namespace.kdist(*smaller, "--error-unchanged", code=Code.UNCHANGED)
    for (kind, name), before in theirs.items():
        assert look(namespace, kind, name) == before


@pytest.mark.sampled
@matrix(lambda place: place + 1 if place < 2 else -1)
def test_no_command_touches_a_workload_or_a_job_of_somebody_else(
    namespace: Namespace, job: Job, backend: str, shift: int
) -> None:
    file = namespace.write(job(backend=backend, **IDLE))
    namespace.kdist("apply", file)
    kinds = f"{RESOURCE[backend]}{',trainingruntime' if backend == 'trainjob' else ''}"
    # before a TrainJob its runtime
    workload = sorted(all_of(namespace, kinds), key=lambda each: str(each["kind"]), reverse=True)
    assert len(workload) == len(kinds.split(","))
    theirs: dict[tuple[str, str], dict[str, Any]] = {}
    for foreign in (workload, [namespace.get("configmap", "digits")]):
        theirs |= replace(namespace, [(each, WHOSE[shift]) for each in foreign])
        scale = ("scale", "digits", "--nodes", "1", "--no-wait")
        others = (("restart", "digits"), ("suspend", "digits"))
        for refused in type_all(namespace, ("apply", file), scale, *others):
            assert refused.returncode == Code.ERROR, refused.stderr
            assert f"{foreign[-1]['kind'].lower()}" in refused.stderr.lower()
            assert "does not belong to job digits" in refused.stderr
    deleted = namespace.type_kdist("delete", "digits", "--purge")
    assert deleted.returncode == Code.OK, deleted.stderr
    for (kind, name), before in theirs.items():
        assert look(namespace, kind, name) == before
        assert f"{name} stays: it does not belong to job digits" in deleted.stderr
