"""The store in a ConfigMap: what torch expects of a store, from many writers at once, whatever the
API server does.
"""

from __future__ import annotations

import json
import threading
import time
from base64 import b64decode
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from kdist_trainer.errors import ConfigError
from kdist_trainer.rendezvous import configmap_client
from kdist_trainer.rendezvous.stores import KubernetesStore, decode_key, encode_key, prune
from tests.trainer.rendezvous.api_server import CUT, LOST_ANSWER, ApiServer


def open_store(
    api: ApiServer, *, retry_seconds: float = 10.0, seconds: float = 5.0, **places: str
) -> KubernetesStore:
    config_map = api.config_map(retry_seconds=retry_seconds, **places)
    return KubernetesStore(config_map, run_id="run", timeout_seconds=seconds, poll_seconds=0.02)


def test_a_reader_gets_the_value_as_soon_as_somebody_writes_it(api: ApiServer) -> None:
    writer, reader = open_store(api), open_store(api)
    threading.Timer(0.2, writer.set, args=("late", "value")).start()
    assert reader.get("late") == b"value"


def test_nothing_of_the_object_is_touched_but_the_binary_values(api: ApiServer) -> None:
    api.document["data"] = {"note": "of somebody else"}
    labels = api.document["metadata"]["labels"]
    open_store(api).set("a/b c", b"\x00\xff")
    assert api.document["data"] == {"note": "of somebody else"}
    assert api.document["metadata"]["labels"] == labels
    assert b64decode(api.document["binaryData"]["a_2fb_20c"]) == b"\x00\xff"


@pytest.mark.sampled
def test_of_many_writers_each_change_is_made_once_even_if_answers_are_lost(api: ApiServer) -> None:
    def count(store: KubernetesStore) -> None:
        for _ in range(10):
            store.add("n", 1)
            store.append("text", "x")

    with api.failing(None, LOST_ANSWER, None, 500, None, None, CUT, for_ever=True):
        threads = [
            threading.Thread(target=count, args=(open_store(api, retry_seconds=60),))
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert open_store(api).get("n") == b"60"
    assert len(open_store(api).get("text")) == 60
    assert ("PUT", 409) in api.requests, "nobody met anybody"


def test_one_read_serves_all_keys_that_are_asked_for_at_once(api: ApiServer) -> None:
    store = open_store(api)
    store.multi_set(
        [f"key/{number}" for number in range(64)], [str(number) for number in range(64)]
    )
    before = len(api.requests)
    assert len(store.multi_get([f"key/{number}" for number in range(64)])) == 64
    assert len(api.requests) - before <= 1
    assert [method for method, _ in api.requests].count("PUT") == 1


@pytest.mark.parametrize(
    "faults", [[429, 429], [500], [503, 504, 502], [CUT, CUT], [401], [403, 403], [404], [408]]
)
def test_what_passes_is_ridden_out(api: ApiServer, faults: list[int]) -> None:
    with api.failing(*faults):
        assert open_store(api).add("n", 1) == 1
    assert open_store(api).get("n") == b"1"


def test_an_api_server_that_goes_away_and_comes_back_is_no_change(api: ApiServer) -> None:
    store = open_store(api, retry_seconds=30)
    store.set("key", "old")
    api.stop()
    threading.Timer(1.0, api.start).start()
    assert store.compare_set("key", "old", "new") == b"new"
    assert store.get("key") == b"new"


def test_exhausted_retries_end_in_torchs_own_error(api: ApiServer) -> None:
    store = open_store(api, retry_seconds=0.3)
    store.set("key", "value")
    api.stop()
    began = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="is unavailable for ConfigMap ml/store"):
        store.set("key", "other")
    assert time.monotonic() - began < 30


def test_the_server_is_left_alone_for_as_long_as_it_asks(api: ApiServer) -> None:
    api.retry_after = "1"
    store, began = open_store(api), time.monotonic()
    with api.failing(429):
        store.set("key", "value")
    assert time.monotonic() - began >= 1


def test_a_token_that_was_replaced_is_read_again(api: ApiServer, tmp_path: Path) -> None:
    store = open_store(api)
    store.set("key", "value")
    api.tokens = {"token-2"}
    (tmp_path / "account" / "token").write_text("token-2\n")
    assert store.get("key") == b"value"


@pytest.mark.parametrize(
    ("fault", "words"), [(403, "does not permit the pod to use"), (404, "does not have")]
)
def test_a_refusal_from_the_start_that_lasts_is_a_problem_of_configuration(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch, fault: int, words: str
) -> None:
    monkeypatch.setattr(configmap_client, "REJECTION_SECONDS", 0.2)
    with api.failing(fault, for_ever=True), pytest.raises(ConfigError, match=words):
        open_store(api).set("key", "value")


def test_a_refusal_after_a_success_is_ridden_out_like_an_outage(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configmap_client, "REJECTION_SECONDS", 0.0)
    store = open_store(api, retry_seconds=0.3)
    store.set("key", "value")
    with api.failing(403, for_ever=True), pytest.raises(dist.DistStoreError, match="403"):
        store.set("key", "other")
    assert store.add("n", 1) == 1


def test_a_request_that_is_wrong_is_not_tried_again(api: ApiServer) -> None:
    store = open_store(api)
    with api.failing(422, for_ever=True), pytest.raises(dist.DistStoreError, match="422"):
        store.set("key", "value")
    assert len([one for one in api.requests if one[1] == 422]) == 1


def test_a_store_that_is_full_says_so_and_keeps_what_it_has(api: ApiServer) -> None:
    store = open_store(api)
    store.set("kdist/run/key", b"x" * 600_000)
    with pytest.raises(dist.DistStoreError, match="at most"):
        store.set("kdist/run/more", b"x" * 600_000)
    assert not store.check(["kdist/run/more"])


def test_rounds_long_over_and_in_need_other_runs_make_room(api: ApiServer) -> None:
    store = open_store(api)
    store.set("kdist/other/last", b"x")
    for number in range(20):
        store.set(f"torch.rendezvous.run.{number}/torchelastic/role_info/0", "x")
        store.set(f"kdist/run/generation/{number}", "x")
    kept = [decode_key(key) for key in api.document["binaryData"]]
    expected = "torch.rendezvous.run.18/torchelastic/role_info/0"
    assert min(key for key in kept if "role_info" in key) == expected
    assert min(key for key in kept if "generation" in key) == "kdist/run/generation/18"
    assert store.check(["kdist/other/last"])
    assert list(prune({"kdist/other/x": b"x" * 600_000, "kdist/run/x": b""}, run_id="run")) == [
        "kdist/run/x"
    ]


@given(st.text(min_size=1, max_size=60))
def test_every_key_becomes_one_that_a_config_map_holds_and_back(key: str) -> None:
    try:
        encoded = encode_key(key)
    except ValueError:  # surrogates, or too long
        return
    assert encoded.replace("-", "").replace("_", "").replace(
        ".", ""
    ).isalnum() or not encoded.strip("-_.")
    assert encoded.isascii()
    assert decode_key(encoded) == key


def test_the_environment_of_a_pod_names_the_server_and_nothing_else_does() -> None:
    server = configmap_client.ApiEndpoint.from_environment(
        {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    )
    assert server.host == "fd00::1"
    assert server.port == 443
    assert server.scheme == "https"
    assert str(server.account) == "/var/run/secrets/kdist"
    with pytest.raises(ConfigError):
        configmap_client.ApiEndpoint.from_environment({})


def test_an_answer_that_is_no_config_map_is_refused(api: ApiServer) -> None:
    api.document = json.loads(
        '{"kind": "ConfigMap", "metadata": {"resourceVersion": "1"}, "binaryData": {"a": 5}}'
    )
    with pytest.raises(dist.DistStoreError, match="no ConfigMap"):
        open_store(api).get("a")
