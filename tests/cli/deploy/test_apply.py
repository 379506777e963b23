"""A new job is there whole or not at all: what is refused, by whomever and whenever, leaves nothing
behind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kdist.errors import Code
from tests.cli.cluster.api import Api, Asked, refusal
from tests.cli.cluster.objects import Store
from tests.cli.conftest import Kdist
from tests.cli.deploy.conftest import CORE, PLACES

INSECURE = 'PodSecurity "restricted:latest": hostNetwork != false (pod must not set hostNetwork)'


@pytest.mark.parametrize("backend", PLACES)
@pytest.mark.parametrize("command", [("apply",), ("apply", "--dry-run=server"), ("diff",)])
def test_what_pod_security_will_refuse_is_refused_before_anything_is_made(
    api: Api, store: Store, file: Path, kdist: Kdist, backend: str, command: tuple[str, ...]
) -> None:
    store.insecure = INSECURE
    refused = kdist(*command, str(file), "--set", f"spec.backend={backend}")
    assert refused.exit_code == (Code.USAGE if command == ("diff",) else Code.ERROR)
    assert (
        "namespace ml enforces Pod Security `restricted`, which rejects the job's pods: hostNetwork"
        in refused.stderr
    )
    assert "Next: kdist explain spec.podTemplate" in refused.stderr
    assert store.objects == {}


@pytest.mark.parametrize("saves", [True, False])
def test_a_change_that_the_workload_refuses_names_the_fields_of_the_file(
    api: Api, store: Store, file: Path, kdist: Kdist, saves: bool
) -> None:
    more = () if saves else ("--set", "spec.checkpoints=null")
    assert kdist("apply", str(file), *more).exit_code == Code.OK
    answer = api.answer

    def refuse(asked: Asked) -> Any:
        if asked.path == PLACES["job"] and asked.method == "PATCH":
            return refusal(422, "spec.template: Invalid value: field is immutable", "Invalid")
        return answer(asked)

    api.answer = refuse
    edits = ("--set", "spec.image=registry.example.com/trainer:2", "--set", "spec.train.epochs=9")
    refused = kdist("apply", str(file), *more, *edits)
    assert refused.exit_code == Code.ERROR
    assert "changed in the job file: spec.image, spec.train.epochs\n" in refused.stderr
    assert ("keeps the checkpoints" in refused.stderr) == saves
    assert ("it has no checkpoints" in refused.stderr) != saves


@pytest.mark.parametrize(
    ("level", "code"), [("restricted", Code.ERROR), ("baseline", Code.OK), (None, Code.OK)]
)
def test_who_may_not_create_pods_is_reported_by_the_warnings_of_the_workload(
    api: Api, store: Store, file: Path, kdist: Kdist, level: str | None, code: Code
) -> None:
    store.insecure = INSECURE
    store.may_not = {"create pods"}
    if level is not None:
        labels = {"pod-security.kubernetes.io/enforce": level}
        store.put(
            "/api/v1/namespaces/ml",
            {"kind": "Namespace", "metadata": {"name": "ml", "labels": labels}},
        )
    before = set(store.objects)
    sent = kdist("apply", str(file))
    assert sent.exit_code == code, sent.stderr
    assert "hostNetwork" in sent.stderr
    assert (set(store.objects) == before) == (code == Code.ERROR)


def test_a_namespace_that_cannot_be_read_leaves_it_at_the_warning(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    store.insecure = INSECURE
    store.may_not = {"create pods"}
    answer, space = api.answer, "/api/v1/namespaces/ml"
    api.answer = lambda asked: refusal(400, "no") if asked.path == space else answer(asked)
    sent = kdist("apply", str(file))
    assert sent.exit_code == Code.OK, sent.stderr
    assert "hostNetwork" in sent.stderr
    assert space in [asked.path for asked in api.asked]
    assert PLACES["job"] in store.objects


def test_what_was_made_before_an_error_is_deleted_again(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    """A webhook may let a rehearsal pass and refuse the object itself."""
    theirs = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web", "uid": "w"}}
    store.put(f"{CORE}/services/web", theirs)
    answer = api.answer

    def refuse(asked: Asked) -> Any:
        if asked.path == PLACES["job"] and asked.method == "PATCH" and "dryRun" not in asked.query:
            return refusal(
                403, 'admission webhook "vjob.kb.io" denied the request: not today', "Forbidden"
            )
        return answer(asked)

    api.answer = refuse
    refused = kdist("apply", str(file))
    assert refused.exit_code == Code.ERROR
    assert "not today" in refused.stderr
    assert (
        "deleted again: poddisruptionbudget.policy/digits, networkpolicy.networking.k8s.io/digits"
        in refused.stderr
    )
    assert list(store.objects) == [f"{CORE}/services/web"]


def test_an_object_that_somebody_makes_between_the_look_and_the_apply_is_not_adopted(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    answer, path = api.answer, f"{CORE}/services/digits"

    def race(asked: Asked) -> Any:
        if (
            asked.path == path
            and asked.method == "PATCH"
            and "dryRun" not in asked.query
            and path not in store.objects
        ):
            metadata = {"name": "digits", "uid": "theirs"}
            store.put(
                path,
                {
                    "apiVersion": "v1",
                    "kind": "Service",
                    "metadata": metadata,
                    "spec": {"type": "LoadBalancer"},
                },
            )
        return answer(asked)

    api.answer = race
    refused = kdist("apply", str(file))
    assert refused.exit_code == Code.ERROR
    assert "service/digits does not belong to job digits" in refused.stderr
    assert store.objects[path]["spec"] == {"type": "LoadBalancer"}
    assert list(store.objects) == [path], "what the apply had made is deleted again"
