"""What a job is made of goes with its workload, but for what it resumes from: its ConfigMap and the
claim.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kdist.errors import Code
from tests.cli.cluster.api import Api, Asked
from tests.cli.cluster.objects import Store
from tests.cli.conftest import Kdist
from tests.cli.deploy.conftest import CORE, PLACES

STAYS = {f"{CORE}/configmaps/digits", f"{CORE}/persistentvolumeclaims/digits-checkpoints"}


def owners(document: dict[str, Any]) -> list[str]:
    return [each["uid"] for each in document["metadata"].get("ownerReferences") or []]


def collect(store: Store) -> None:
    """What the garbage collector does with objects none of whose owners is there any more."""
    uids = {each["metadata"].get("uid") for each in store.objects.values()}
    for path, each in list(store.objects.items()):
        if owners(each) and not uids & set(owners(each)):
            del store.objects[path]


@pytest.mark.parametrize("backend", PLACES)
def test_all_but_the_config_map_and_the_claim_goes_with_the_workload_and_the_run_goes_on(
    api: Api, store: Store, file: Path, kdist: Kdist, backend: str
) -> None:
    sent = ("apply", str(file), "--set", f"spec.backend={backend}")
    assert kdist(*sent).exit_code == Code.OK
    made = set(store.objects)
    run = store.objects[f"{CORE}/configmaps/digits"]["metadata"]["annotations"]["kdist.dev/run-id"]
    assert kdist(*sent, "--error-unchanged").exit_code == Code.UNCHANGED, (
        "sending it again leaves the owners as they are"
    )
    del store.objects[PLACES[backend]]
    collect(store)
    assert set(store.objects) == STAYS
    assert kdist(*sent).exit_code == Code.OK
    assert set(store.objects) == made
    assert (
        store.objects[f"{CORE}/configmaps/digits"]["metadata"]["annotations"]["kdist.dev/run-id"]
        == run
    )


def test_what_was_the_old_workloads_is_the_new_ones_and_never_about_to_go(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    kdist("apply", str(file))
    made, answer = set(store.objects), api.answer
    del store.objects[PLACES["job"]]

    def collecting(asked: Asked) -> Any:
        reply = answer(asked)
        if asked.path == PLACES["job"] and asked.method == "PATCH" and "dryRun" not in asked.query:
            store.objects[asked.path]["metadata"]["uid"] = "another"
            collect(store)
        return reply

    api.answer = collecting
    assert kdist("apply", str(file)).exit_code == Code.OK
    assert set(store.objects) == made
    owned = {path: owners(each) for path, each in store.objects.items() if path not in STAYS}
    assert owned == {PLACES["job"]: []} | {
        each: ["another"] for each in made - STAYS - {PLACES["job"]}
    }


@pytest.mark.parametrize(
    ("api_version", "kind", "name"),
    [("v1", "ConfigMap", "release"), ("batch.volcano.sh/v1alpha1", "Job", "digits")],
)
def test_an_owner_that_somebody_else_gave_stays(
    api: Api, store: Store, file: Path, kdist: Kdist, api_version: str, kind: str, name: str
) -> None:
    kdist("apply", str(file))
    theirs = {"apiVersion": api_version, "kind": kind, "name": name, "uid": "r"}
    store.objects[f"{CORE}/services/digits"]["metadata"]["ownerReferences"] = [theirs]
    assert kdist("apply", str(file)).exit_code == Code.OK
    assert owners(store.objects[f"{CORE}/services/digits"]) == ["r", PLACES["job"]]


def test_pods_that_save_have_what_they_meet_by_until_they_are_gone(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    kdist("apply", str(file))
    answer = api.answer
    seen: list[str] = []

    def collecting(asked: Asked) -> Any:
        reply = answer(asked)
        if asked.method == "DELETE" and asked.path == PLACES["job"]:
            collect(store)
            seen.extend(store.objects)
        return reply

    api.answer = collecting
    assert kdist("delete", "digits").exit_code == Code.OK
    assert f"{CORE}/configmaps/digits-rendezvous" in seen
    assert set(store.objects) == {f"{CORE}/persistentvolumeclaims/digits-checkpoints"}


def test_a_restart_takes_nothing_from_under_the_new_workload(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    kdist("apply", str(file))
    made, answer = set(store.objects), api.answer
    store.objects[PLACES["job"]]["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}

    def collecting(asked: Asked) -> Any:
        reply = answer(asked)
        if asked.method == "DELETE":
            collect(store)
        return reply

    api.answer = collecting
    assert kdist("restart", "digits", "--no-wait").exit_code == Code.OK
    assert set(store.objects) == made
    assert all(
        owners(each) for path, each in store.objects.items() if path not in {*STAYS, PLACES["job"]}
    )
