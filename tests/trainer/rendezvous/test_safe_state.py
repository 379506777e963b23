"""A rendezvous state that somebody else has written runs nothing in an agent, whichever way it
comes.
"""

from __future__ import annotations

import os
import pickle
import random
import zlib
from base64 import b64encode
from collections.abc import Callable
from dataclasses import astuple, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
)

from kdist_trainer.formats.allow_list import UnsafePickleError
from kdist_trainer.rendezvous.exchange import ExchangeHost
from kdist_trainer.rendezvous.many_nodes import Gatherer
from kdist_trainer.rendezvous.state import (
    KEYS_ATTRIBUTE,
    RendezvousState,
    RendezvousTimings,
    pack_state,
    read_state,
)
from kdist_trainer.rendezvous.stores import FileStore, KubernetesStore, encode_key
from kdist_trainer.rendezvous.torch_internals import Node, State
from kdist_trainer.torch_internals import HashStore, TCPStore
from tests.trainer.rendezvous.api_server import ApiServer

KEY = "torch.rendezvous.run"


class Evil:
    """An object whose pickle runs a shell command when it is read."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.proof}",))


def full_state() -> State:
    """A state with everything that agents write."""
    state = State()
    nodes = [Node(f"10.0.0.{index}", index, 100 + index) for index in range(4)]
    state.participants = {node: rank for rank, node in enumerate(nodes[:2])}
    state.wait_list, state.redundancy_list = {nodes[2]}, {nodes[3]}
    state.last_heartbeats = dict.fromkeys(nodes, datetime.now(UTC))
    state.deadline = datetime.now(UTC) + timedelta(seconds=5)
    ExchangeHost(0, "10.0.0.1", 7, "token", 0).name_in(state)
    Gatherer(0, "10.0.0.1", 7, "token", 0).name_in(state)
    return state


def open_state(store: Store) -> RendezvousState:
    settings = RendezvousSettings("run", 1, 2, RendezvousTimeout(), timedelta(seconds=5), 3)
    timings = RendezvousTimings.for_nodes(2, remote=False)
    return RendezvousState(C10dRendezvousBackend(store, "run"), settings, timings)


def as_stored(state: object) -> str:
    return b64encode(pickle.dumps(state)).decode()


def file_store(folder: Path, _: ApiServer) -> Store:
    return FileStore(folder / "store")


def hash_store(_: Path, __: ApiServer) -> Store:
    return HashStore()


def tcp_store(_: Path, __: ApiServer) -> Store:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def config_map(_: Path, api: ApiServer) -> Store:
    return KubernetesStore(api.config_map(), run_id="run")


@pytest.mark.parametrize("make", [file_store, hash_store, tcp_store, config_map])
def test_an_evil_state_in_a_store_runs_nothing_and_is_refused(
    make: Callable[[Path, ApiServer], Store], tmp_path: Path, api: ApiServer
) -> None:
    proof = tmp_path / "ran"
    store = make(tmp_path, api)
    state = open_state(store)
    state.sync()
    hidden = full_state()
    vars(hidden)[ExchangeHost.ATTRIBUTE] = Evil(proof)
    for evil in (Evil(proof), hidden):
        store.set(KEY, as_stored(evil))
        state.expire()
        with pytest.raises(RendezvousStateError, match="system"):
            state.sync()
        state.mark_dirty()  # torch reads what others have written when its own write conflicts
        with pytest.raises(RendezvousStateError, match="system"):
            state.sync()
        state.discard()
    assert not proof.exists()
    store.set(KEY, as_stored(full_state()))
    state.sync()
    assert state.state.participants == full_state().participants, "the agent goes on"


def test_an_evil_copy_of_a_relay_or_a_gatherer_runs_nothing(tmp_path: Path, api: ApiServer) -> None:
    proof = tmp_path / "ran"
    store = KubernetesStore(api.config_map(), run_id="run")
    state = open_state(store)
    state.sync()
    copy = store.fetch()
    document = {
        **copy.document,
        "metadata": {**copy.document["metadata"], "resourceVersion": "999"},
    }
    values = {**copy.values, encode_key(KEY): as_stored(Evil(proof)).encode()}
    store.offer(replace(copy, values=values, document=document))
    state.expire()
    with pytest.raises(RendezvousStateError, match="system"):
        state.sync()
    assert not proof.exists()


def test_a_state_is_read_as_it_was_written() -> None:
    written = full_state()
    assert vars(read_state(pickle.dumps(written))) == vars(written)


def state_of_many(nodes: int) -> State:
    """A complete round of that many nodes."""
    state, now = full_state(), datetime.now(UTC)
    keys = vars(state)[KEYS_ATTRIBUTE] = {}
    for number in range(nodes):
        node = Node(f"10.0.{number >> 8}.{number & 255}", 7, number)
        state.participants[node] = number
        state.last_heartbeats[node] = now + timedelta(microseconds=137 * number)
        keys[node] = "9f86d081884c7d65"
    return state


def test_the_state_of_as_many_nodes_as_a_job_may_have_is_a_tenth_of_a_configmap() -> None:
    state = state_of_many(4096)
    packed = pack_state(pickle.dumps(state))
    assert vars(read_state(packed)) == vars(state)
    assert len(b64encode(packed)) < (1 << 20) / 10 < (1 << 20) / 4 < len(pickle.dumps(state))


def test_agents_that_know_no_compressed_state_read_that_of_few_nodes() -> None:
    data = pickle.dumps(state_of_many(500))
    assert pack_state(data) == data


def test_a_state_that_is_large_only_when_it_is_decompressed_is_refused() -> None:
    with pytest.raises(UnsafePickleError, match="more than 4,194,304 bytes"):
        read_state(zlib.compress(pickle.dumps(bytes(1 << 24))))
    with pytest.raises(UnsafePickleError, match="damaged"):
        read_state(pack_state(pickle.dumps(state_of_many(1000)))[:1] + b"no stream")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("round", "0"),
        ("round", True),
        ("complete", 1),
        ("closed", None),
        ("deadline", datetime(2026, 1, 1)),
        ("participants", {"10.0.0.1": 0}),
        ("participants", {Node("10.0.0.1", 0, 1): "0"}),
        ("wait_list", [Node("10.0.0.1", 0, 1)]),
        ("redundancy_list", {1}),
        ("last_heartbeats", {Node("10.0.0.1", 0, 1): 5.0}),
        (ExchangeHost.ATTRIBUTE, (0, "10.0.0.1", "7", "token", 0)),
        (Gatherer.ATTRIBUTE, (0, "10.0.0.1")),
        ("more", 1),
    ],
)
def test_a_state_with_a_field_of_another_type_is_refused(name: str, value: object) -> None:
    state = full_state()
    vars(state)[name] = value
    with pytest.raises(UnsafePickleError):
        read_state(pickle.dumps(state))


def nested_key() -> Any:
    """A key that takes hours to hash: each level is twice the one below."""
    key: Any = ()
    for _ in range(60):
        key = (key, key)
    return key


class Unhashed(dict[Any, Any]):
    """Pickled as a dict with a key that nobody has hashed."""

    def __init__(self, key: Any) -> None:
        super().__init__()
        self.key = key

    def packed(self) -> bytes:
        """The pickle: an empty dict, the key, a value, SETITEM."""
        inner = pickle.dumps(self.key, protocol=2)[2:-1]
        return b"\x80\x02}" + inner + b"N" + pickle.SETITEM + pickle.STOP


def test_a_key_that_takes_for_ever_to_hash_is_refused_at_once() -> None:
    for key in (nested_key(), [1]):
        with pytest.raises(UnsafePickleError, match="as a key"):
            read_state(Unhashed(key).packed())


@pytest.mark.parametrize("seed", range(4))
def test_a_state_with_bytes_changed_at_random_is_read_or_refused(seed: int) -> None:
    draw = random.Random(seed)
    whole = pickle.dumps(full_state())
    refused = 0
    for _ in range(500):
        changed = bytearray(whole)
        for _ in range(draw.randint(1, 6)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        try:
            state = read_state(bytes(changed))
        except UnsafePickleError:
            refused += 1
        else:
            assert all(type(node) is Node for node in state.participants)
            assert all(astuple(node) for node in state.wait_list)
    assert refused > 100
