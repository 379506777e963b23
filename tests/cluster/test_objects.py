"""Every object that kdist renders, judged by a real API server: its schemas, its webhooks, Pod
Security and its authorizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from kdist import backends, cluster
from kdist.manifest import Manifest
from kdist.render import find_pods, text
from kdist.spec import TrainingJob
from tests.cluster.namespace import Namespace
from tests.manifests.jobs import EXAMPLES, FULL, example, load, make, place
from tests.manifests.test_text import SCALARS, config_map

pytestmark = pytest.mark.e2e

KINDS = pytest.mark.parametrize("backend", backends.NAMES)
NAMES = (*EXAMPLES, "full")
STRICT = ("--dry-run=server", "--validate=strict", "--warnings-as-errors")
DRY = ("--server-side", "--field-manager=kdist", *STRICT, "-o", "json")


def find_job(name: str, namespace: Namespace) -> TrainingJob:
    job = load(FULL) if name == "full" else example(EXAMPLES[name])
    metadata = job.metadata.model_copy(update={"namespace": namespace.name})
    return job.model_copy(update={"metadata": metadata})


def apply(namespace: Namespace, objects: list[Manifest], *options: str) -> list[dict[str, Any]]:
    items = [each.document for each in objects]
    sent = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    document = json.loads(namespace.send("apply", *options, stdin=sent))
    return list(document["items"]) if document["kind"] == "List" else [document]


def missing(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Where the server keeps something else than it was sent; it may add, and order its lists as
    they were sent.
    """
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            if value not in ({}, [], None) or key in theirs:
                yield from missing(value, theirs.get(key), f"{path}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from missing(mine, other, f"{path}[{index}]")
    elif ours != theirs:
        yield f"{path}: sent {ours!r}, kept {theirs!r}"


@KINDS
def test_the_api_server_takes_every_object_of_every_example_as_it_is(
    namespace: Namespace, backend: str
) -> None:
    objects = [each for name in NAMES for each in place(find_job(name, namespace), backend)]
    runtimes = [each for each in objects if each.kind == "TrainingRuntime"]
    # a TrainJob is judged by the runtime that it names, which a rehearsal would not have left
    # behind
    if runtimes:
        apply(namespace, runtimes, "--server-side", "-o", "json")
    kept = apply(namespace, objects, *DRY)
    assert [each["kind"] for each in kept] == [each.kind for each in objects]
    pairs = zip(objects, kept, strict=True)
    assert [
        f"{ours.kind} {ours.name}{line}"
        for ours, theirs in pairs
        for line in missing(ours.document, theirs)
    ] == []


def test_kubectl_reads_every_hostile_scalar_of_rendered_yaml_as_the_text_that_it_is(
    namespace: Namespace,
) -> None:
    # kubectl reads a U+0085 as it is, and sends it bare in JSON, which the server reads as YAML and
    # takes for a folded line.
    scalars = [scalar for scalar in SCALARS if "\x85" not in scalar]
    data = {f"key-{place}": scalar for place, scalar in enumerate(scalars)}
    names = {
        scalar
        for scalar in scalars
        if re.fullmatch(r"[-._A-Za-z0-9]{1,253}", scalar) and scalar not in (".", "..")
    }
    rendered = text.to_yaml([config_map(data | dict.fromkeys(names, "x"))]) + "\n"
    kept = json.loads(namespace.kubectl("apply", *DRY, "-f", "-", stdin=rendered))
    assert kept["data"] == data | dict.fromkeys(names, "x")


def test_kdist_sends_every_hostile_scalar_as_the_text_that_it_is(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", namespace.environment["KUBECONFIG"])
    data = {f"key-{place}": scalar for place, scalar in enumerate([*SCALARS, "\x7f\x80"])}
    connection = cluster.connect(namespace=namespace.name)
    kept = connection.send_apply(config_map(data), dry_run=True, force=False)
    assert kept.document()["data"] == data


@KINDS
def test_pod_security_restricted_admits_the_pods_of_every_example(
    namespace: Namespace, backend: str
) -> None:
    jobs = [place(find_job(name, namespace), backend) for name in NAMES]
    accounts = [each for objects in jobs for each in objects if each.kind == "ServiceAccount"]
    apply(namespace, accounts, "--server-side", "-o", "json")
    pods = []
    for objects in jobs:
        (pod,) = [pod for each in objects for pod in find_pods(each.document)]
        # the cluster has no such class
        spec = {key: value for key, value in pod["spec"].items() if key != "priorityClassName"}
        metadata = {"name": objects[0].name, **pod["metadata"]}
        pods.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    probes = json.dumps({"apiVersion": "v1", "kind": "List", "items": pods})
    reported = namespace.kubectl("create", "--dry-run=server", "-f", "-", stdin=probes)
    assert reported.count("server dry run") == len(NAMES)


@pytest.mark.parametrize("rendezvous", ["kubernetes", "c10d"])
def test_the_account_of_the_pods_may_do_what_its_rendezvous_needs_and_nothing_else(
    namespace: Namespace, rendezvous: Any
) -> None:
    kinds = ("ServiceAccount", "Role", "RoleBinding")
    objects = place(make(), "job", rendezvous)
    account = [each for each in objects if each.kind in kinds]
    apply(namespace, account, "--server-side", "-o", "json")
    namespace.kubectl("create", "serviceaccount", "bystander")

    def rights(account: str) -> set[str]:
        who = f"--as=system:serviceaccount:{namespace.name}:{account}"
        lines = namespace.kubectl("auth", "can-i", "--list", who).splitlines()
        return {" ".join(line.split()) for line in lines}

    allowed = (
        {"configmaps [] [digits-rendezvous] [get update]"} if rendezvous == "kubernetes" else set()
    )
    assert rights("digits") - rights("bystander") == allowed


@pytest.mark.parametrize(
    "backend", [name for name in backends.NAMES if not backends.get(name).scalable]
)
@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 3), ({"min": 1, "max": 3}, 1), ({"min": 1, "max": 3}, {"min": 2, "max": 4})],
)
@pytest.mark.sampled
def test_a_workload_takes_another_number_of_nodes_while_it_is_there(
    namespace: Namespace, backend: str, before: Any, after: Any
) -> None:
    kind = backends.get(backend).kind
    rendered = [place(make(nodes=nodes), backend, suspended=True) for nodes in (before, after)]
    old, new = (each for objects in rendered for each in objects if each.kind == kind)
    (live,) = apply(namespace, [old], "--server-side", "--field-manager=kdist", "-o", "json")
    kept = Manifest(backends.get(backend).keep(new.document, live))
    assert apply(namespace, [kept], *DRY)
