"""The store in a ConfigMap of a real API server, with no more rights than a pod has."""

from __future__ import annotations

import threading
import urllib.error
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from kdist_trainer.errors import ConfigError
from kdist_trainer.rendezvous import configmap_client
from kdist_trainer.rendezvous.configmap_client import ConfigMap
from kdist_trainer.rendezvous.stores import KubernetesStore
from tests.trainer.rendezvous.control_plane import NAME, NAMESPACE, ControlPlane

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("plane")) as plane:
        yield plane


def open_store(plane: ControlPlane, *, retry_seconds: float = 60.0) -> KubernetesStore:
    return KubernetesStore(
        plane.config_map(retry_seconds=retry_seconds),
        run_id="run",
        timeout_seconds=30,
        poll_seconds=0.05,
    )


@pytest.mark.sampled
def test_many_writers_lose_nothing_and_change_nothing_but_the_values(plane: ControlPlane) -> None:
    def count(store: KubernetesStore) -> None:
        for _ in range(10):
            store.add("n", 1)

    path = f"/api/v1/namespaces/{NAMESPACE}/configmaps/{NAME}"
    before = plane.request("GET", path)
    threads = [threading.Thread(target=count, args=(open_store(plane),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = plane.request("GET", path)
    assert open_store(plane).get("n") == b"40"
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert set(after) - {"binaryData"} == set(before) - {"binaryData"}


def test_applying_the_manifest_again_keeps_what_agents_have_written_and_they_go_on(
    plane: ControlPlane,
) -> None:
    path = f"/api/v1/namespaces/{NAMESPACE}/configmaps/{NAME}?fieldManager=kdist"
    manifest = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": NAME, "labels": {"kdist.dev/job": "digits"}},
    }
    store = open_store(plane)
    for value in ("1", "2", "3"):
        plane.request("PATCH", path, manifest, media_type="application/apply-patch+yaml")
        store.set("key", value)
    document = plane.request("PATCH", path, manifest, media_type="application/apply-patch+yaml")
    assert open_store(plane).get("key") == b"3"
    assert document["metadata"]["labels"] == {"kdist.dev/job": "digits"}
    assert {one["manager"] for one in document["metadata"]["managedFields"]} >= {
        "kdist",
        "kdist-trainer",
    }


def test_every_key_that_agents_use_is_taken_and_a_full_mebibyte_is_not_reached(
    plane: ControlPlane,
) -> None:
    store = open_store(plane)
    store.multi_set(
        ["torch.rendezvous.run.0/torchelastic/role_info/0", "kdist/run/generation/1", "ü _"],
        ["a", "b", b"\x00"],
    )
    assert open_store(plane).multi_get(["kdist/run/generation/1", "ü _"]) == [b"b", b"\x00"]
    store.set("kdist/run/large", b"x" * 990_000)
    with pytest.raises(dist.DistStoreError, match="at most"):
        store.set("kdist/run/more", b"x" * 20_000)
    store.set("kdist/run/large", b"")


def test_a_pod_may_read_and_replace_its_config_map_and_nothing_else(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configmap_client, "REJECTION_SECONDS", 0.5)
    with pytest.raises(ConfigError, match="does not permit the pod to use"):
        ConfigMap(plane.server(), NAMESPACE, "another", retry_seconds=lambda: 30.0).read()
    path = f"/api/v1/namespaces/{NAMESPACE}/configmaps/{NAME}"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        plane.request("DELETE", path, token="pod-token")  # noqa: S106


@pytest.mark.sampled
def test_an_api_server_that_is_killed_and_comes_back_is_no_change(plane: ControlPlane) -> None:
    store = open_store(plane, retry_seconds=100.0)
    store.set("key", "old")
    plane.stop()
    returning = threading.Timer(0.5, plane.start)
    returning.start()
    assert store.compare_set("key", "old", "new") == b"new"
    returning.join()
    assert open_store(plane).get("key") == b"new"
