"""A user who may edit ConfigMaps writes whatever she likes into that of a job; then somebody with
more rights uses kdist. No command acts outside of the job's namespace, and none sends what only the
ConfigMap describes, unless the user has seen it and agreed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kdist.errors import Code
from tests.cli.cluster.api import Api, Asked
from tests.cli.cluster.objects import Store
from tests.cli.cluster.roles import VERBS, Verb
from tests.cli.conftest import Kdist
from tests.cli.deploy.conftest import CORE, PLACES

ELSEWHERE, EVIL = "kube-system", "registry.example.com/evil:1"
CONFIG_MAP, JOB = f"{CORE}/configmaps/digits", PLACES["job"]
PRIVILEGED = {
    "spec": {
        "hostPID": True,
        "containers": [
            {
                "name": "trainer",
                "securityContext": {"privileged": True, "allowPrivilegeEscalation": True},
            }
        ],
        "volumes": [{"name": "host", "hostPath": {"path": "/"}}],
    }
}


def go_elsewhere(document: dict[str, Any]) -> None:
    document["metadata"]["namespace"] = ELSEWHERE
    document["spec"]["image"] = EVIL


def take_a_name(document: dict[str, Any]) -> None:
    document["metadata"] |= {"name": "evil", "namespace": ELSEWHERE}


def become_root(document: dict[str, Any]) -> None:
    document["spec"] |= {"podTemplate": PRIVILEGED, "serviceAccountName": "evil"}
    document["spec"]["checkpoints"] = {"claim": "evil"}


HOSTILE: dict[str, Callable[[dict[str, Any]], None]] = {
    "elsewhere": go_elsewhere,
    "another name": take_a_name,
    "root": become_root,
}
RUBBISH = ["[" * 100_000, "null", '{"metadata": "evil", "spec": ["evil"]}', ""]


def place_pod(store: Store, phase: str) -> None:
    metadata: dict[str, Any] = {"name": "p", "namespace": "ml", "uid": "pod"}
    metadata["labels"] = {"kdist.dev/job": "digits"}
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "digits", "controller": True}
    metadata["ownerReferences"] = [{**owner, "uid": store.objects[JOB]["metadata"]["uid"]}]
    state = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    status = {"phase": phase, "containerStatuses": [{"name": "trainer", "state": state}]}
    container = {"name": "trainer", "image": "registry.example.com/trainer:1"}
    spec = {"containers": [container], "nodeName": "n"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status}
    store.put(f"{CORE}/pods/p", pod)


@pytest.fixture
def applied(api: Api, store: Store, file: Path, kdist: Kdist) -> dict[str, Any]:
    """The objects of a job that runs, and of a suspended one."""
    for name in ("other", "suspended"):
        document = yaml.safe_load(file.read_text())
        document["metadata"]["name"] = name
        (file.parent / f"{name}.yaml").write_text(yaml.safe_dump(document))
    assert kdist("apply", "job.yaml").exit_code == Code.OK
    assert kdist("apply", "suspended.yaml").exit_code == Code.OK
    assert kdist("suspend", "suspended", "--no-wait").exit_code == Code.OK
    return copy.deepcopy(store.objects)


def list_changes(api: Api) -> Iterator[Asked]:
    """The requests that change something."""
    for asked in api.asked:
        reviews = "authorization.k8s.io" in asked.path or "authentication.k8s.io" in asked.path
        if asked.method == "GET" or reviews or (asked.body or {}).get("dryRun"):
            continue
        if "dryRun" not in asked.query:
            yield asked


def run(kdist: Kdist, verb: Verb) -> Any:
    command, *words = verb.words.split()
    return kdist(command, "-n", "ml", "--timeout", "0.2", *words)


def check(api: Api, verb: Verb, result: Any) -> None:
    assert "internal error" not in result.stderr, f"{verb.words}: {result.stderr}"
    for asked in api.asked:
        inside = asked.path.startswith(("/api/v1/namespaces/ml", "/apis/")) or asked.method == "GET"
        assert inside, f"{verb.words}: {asked.method} {asked.path}"
        assert ELSEWHERE not in asked.path or asked.method == "GET", verb.words
    for asked in list_changes(api):
        body = json.dumps(asked.body)
        for word in ("evil", ELSEWHERE, "hostPath", '"privileged": true'):
            assert word not in body, f"{verb.words}: {asked.method} {asked.path} sends {word}"


@pytest.mark.sampled
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: f"{verb.words} pods={verb.pods}")
def test_no_command_does_what_only_a_config_map_says(
    api: Api, store: Store, applied: dict[str, Any], kdist: Kdist, verb: Verb
) -> None:
    for how, change in HOSTILE.items():
        for runs in (True, False):
            store.objects = copy.deepcopy(applied)
            for name in ("digits", "suspended"):
                data = store.objects[f"{CORE}/configmaps/{name}"]["data"]
                document = json.loads(data["job.json"])
                change(document)
                data["job.json"] = json.dumps(document)
            if runs and verb.pods:
                place_pod(store, "Running")
            if not runs:  # as after its TTL
                del store.objects[JOB]
            api.asked.clear()
            check(api, verb, run(kdist, verb))
            assert how
    for text in RUBBISH:
        store.objects = copy.deepcopy(applied)
        store.objects[CONFIG_MAP]["data"] |= {"job.json": text, "code.json": text}
        api.asked.clear()
        check(api, verb, run(kdist, verb))
