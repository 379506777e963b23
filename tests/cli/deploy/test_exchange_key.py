"""`kdist apply` makes the key of a job's exchange once, as a Secret that nobody needs to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kdist.errors import Code
from tests.cli.cluster.api import Api
from tests.cli.cluster.objects import Store
from tests.cli.conftest import Kdist
from tests.cli.deploy.conftest import CORE, PLACES


def mounted(store: Store, backend: str) -> list[dict[str, Any]]:
    """What the pods mount of Secrets, wherever the kind keeps its pod template."""

    def find(value: Any) -> list[dict[str, Any]]:
        if isinstance(value, dict):
            inner = [each for one in value.values() for each in find(one)]
            return inner + ([value["secret"]] if isinstance(value.get("secret"), dict) else [])
        return [each for one in value for each in find(one)] if isinstance(value, list) else []

    place = PLACES[backend]
    if backend == "trainjob":
        place = place.replace("/trainjobs/", "/trainingruntimes/")
    return find(store.objects[place])


@pytest.mark.parametrize("backend", PLACES)
def test_the_key_is_random_belongs_to_the_job_and_is_mounted_if_it_exists(
    api: Api, store: Store, file: Path, kdist: Kdist, backend: str
) -> None:
    assert kdist("apply", str(file), "--set", f"spec.backend={backend}").exit_code == Code.OK
    ((path, secret),) = store.secrets.items()
    source = {"name": path.rpartition("/")[2], "optional": True}
    assert mounted(store, backend) == [
        {**source, "items": [{"key": "key", "path": "exchange.key"}]}
    ]
    assert len(secret["stringData"]["key"]) == 64
    assert secret["immutable"]
    (owner,) = secret["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("ConfigMap", "digits")
    assert owner["uid"] == store.objects[f"{CORE}/configmaps/digits"]["metadata"]["uid"]
    held = str(store.objects)
    assert secret["stringData"]["key"] not in held


def test_a_job_that_is_applied_again_keeps_its_key(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    assert kdist("apply", str(file)).exit_code == Code.OK
    before = dict(store.secrets)
    assert kdist("apply", str(file)).exit_code == Code.OK
    assert store.secrets == before


def test_a_new_run_gets_a_key_of_its_own(api: Api, store: Store, file: Path, kdist: Kdist) -> None:
    for _ in range(2):
        assert kdist("apply", str(file)).exit_code == Code.OK
        store.objects.clear()  # as by `kdist delete`; the garbage collector is late
    first, second = store.secrets.values()
    assert first["stringData"] != second["stringData"]


def test_who_may_not_create_secrets_is_told_what_the_job_does_without(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    store.may_not = {"create secrets"}
    applied = kdist("apply", str(file))
    assert applied.exit_code == Code.OK
    assert "exchange through the ConfigMap alone" in " ".join(applied.stderr.split())
    assert store.secrets == {}
    assert PLACES["job"] in store.objects


@pytest.mark.parametrize("words", [("render",), ("apply", "--dry-run=server"), ("diff",)])
def test_what_is_only_shown_has_no_key_and_makes_none(
    api: Api, store: Store, file: Path, kdist: Kdist, words: tuple[str, ...]
) -> None:
    shown = kdist(*words, str(file))
    assert "kind: Secret" not in shown.stdout
    assert store.secrets == {}


def test_a_job_whose_agents_share_a_tcp_store_needs_no_key(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    assert kdist("apply", str(file), "--set", "spec.rendezvous=c10d").exit_code == Code.OK
    assert store.secrets == {}
    assert mounted(store, "job") == []
