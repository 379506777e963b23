"""The exchange of a round admits who has the job's key, and nobody who can only read the
ConfigMap; agents that lack it, or have another one, exchange through the ConfigMap.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import threading
from base64 import b64decode
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistNetworkError

from kdist_trainer.rendezvous.configmap_client import Copy
from kdist_trainer.rendezvous.exchange import (
    KEY_FILE,
    NO_KEY,
    ExchangeHost,
    ExchangeKey,
    ExchangeServer,
    ExchangeStore,
)
from kdist_trainer.rendezvous.state import KEYS_ATTRIBUTE, open_key, read_state
from kdist_trainer.rendezvous.stores import FileStore, KubernetesStore, encode_key
from tests.patience import soon
from tests.trainer.rendezvous.api_server import ApiServer
from tests.trainer.rendezvous.keys import KEY, KEY_TEXT
from tests.trainer.rendezvous.test_relay import Agent, meet, open_agent


class Evil:
    """An object whose pickle runs a shell command when it is read."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.proof}",))


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Agent]]:
    """Agents that are closed in the end."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # all share this process
    agents: list[Agent] = []
    yield agents
    for agent in agents:
        agent.rendezvous.leave()
        agent.rendezvous._server.close()


def use_key(agent: Agent, key: ExchangeKey) -> None:
    """Have the agent's pod have another Secret mounted, or none."""
    agent.rendezvous._server.key = agent.rendezvous._state_holder.key = key


def run_round(agents: list[Agent]) -> None:
    meet(agents)
    assert [agent.info is not None for agent in agents] == [True] * len(agents)
    for agent in agents:
        assert agent.info is not None
        agent.info.store.set(f"hello/{agent.info.rank}", "x")
    for agent in agents:
        assert agent.info is not None
        for rank in range(len(agents)):
            assert agent.info.store.get(f"hello/{rank}") == b"x"


def public_state(api: ApiServer) -> Any:
    """The rendezvous state, as whoever reads ConfigMaps sees it."""
    store = KubernetesStore(api.config_map(), run_id="run")
    return read_state(b64decode(store.get("torch.rendezvous.run")))


def test_who_reads_the_config_map_cannot_write_into_the_exchange(
    api: ApiServer, keep: list[Agent], tmp_path: Path
) -> None:
    """The way by which the role `view` once ran code in the pods, step by step."""
    keep += [open_agent(api, index, 2) for index in range(2)]
    run_round(keep)
    assert all(agent.rendezvous.exchange is not None for agent in keep)
    proof = tmp_path / "ran"
    state = public_state(api)
    *_, port, nonce, _ = vars(state)[ExchangeHost.ATTRIBUTE]
    own = KubernetesStore(api.config_map(), run_id="run")
    copy = own.fetch()
    evil = pickle.dumps(Evil(proof))
    metadata = {**copy.document["metadata"], "resourceVersion": "999999999"}
    forged = replace(
        copy,
        values={**copy.values, encode_key("torch.rendezvous.run"): evil},
        document={**copy.document, "metadata": metadata},
    )
    for token in (nonce, "", KEY.fingerprint() or ""):
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            request = {"set": {"relay/copy": forged.to_json().decode()}}
            opening = replace(keep[0].rendezvous.exchange.host, token=token).opening  # type: ignore[union-attr]
            with suppress(ConnectionError):
                connection.sendall(opening + json.dumps(request).encode() + b"\n")
                assert connection.makefile("rb").readline() == b"", "refused without a word"
    for agent in keep:
        relay = agent.rendezvous._relay
        assert relay is not None
        assert soon(relay.latest, seconds=20.0)
        agent.rendezvous.status()
        latest: Copy | None = relay.latest()
        assert latest is None or latest.version < 999999999
    assert not proof.exists()
    text = json.dumps(copy.document) + str(copy.values)
    assert KEY_TEXT not in text
    assert all(agent.rendezvous.exchange.host.token not in text for agent in keep)  # type: ignore[union-attr]


@pytest.mark.parametrize("other", [NO_KEY, ExchangeKey(lambda: b"another" * 8)])
def test_a_round_with_a_node_of_another_key_or_none_exchanges_through_the_config_map(
    other: ExchangeKey, api: ApiServer, keep: list[Agent]
) -> None:
    keep += [open_agent(api, index, 3) for index in range(3)]
    use_key(keep[1], other)
    run_round(keep)
    assert [agent.rendezvous.exchange for agent in keep] == [None] * 3
    assert ExchangeHost.named_in(public_state(api), KEY) is None


def test_a_round_without_any_key_exchanges_through_the_config_map(
    api: ApiServer, keep: list[Agent]
) -> None:
    (api.account / KEY_FILE).unlink()
    keep += [open_agent(api, index, 2) for index in range(2)]
    run_round(keep)
    assert [agent.rendezvous.exchange for agent in keep] == [None] * 2
    assert vars(public_state(api))[KEYS_ATTRIBUTE] == {}


def test_a_key_that_is_mounted_late_serves_from_then_on_and_does_not_change(
    tmp_path: Path,
) -> None:
    file = tmp_path / KEY_FILE
    key = ExchangeKey(file.read_bytes)
    assert key.token("x") is None
    file.write_text("short")
    assert key.token("x") is None, "anybody could guess it"
    file.write_text(KEY_TEXT + "\n")
    token = key.token("x")
    assert token == KEY.token("x") != KEY.token("y")
    assert key.token("x") != key.fingerprint()
    file.unlink()
    assert key.token("x") == token


def test_a_token_of_one_place_admits_to_no_other() -> None:
    server = ExchangeServer("127.0.0.1", key=KEY, nodes=lambda: 8)
    host = server.offer(0, 0)
    assert host is not None
    try:
        moved = ExchangeHost.from_public((0, "10.0.0.9", host.port, host.nonce, 0), KEY)
        assert moved is not None
        assert moved.token != host.token
        stranger = replace(host, token=moved.token)
        with pytest.raises(DistNetworkError):
            ExchangeStore(stranger, timeout_seconds=1).set("a", "b")
        assert ExchangeServer("127.0.0.1", key=NO_KEY, nodes=lambda: 8).offer(0, 0) is None
    finally:
        server.close()


def test_agents_of_one_folder_make_one_key_that_nobody_else_can_read(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    found: list[str | None] = []
    threads = [
        threading.Thread(target=lambda: found.append(open_key(FileStore(folder)).fingerprint()))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({*found}) == 1
    assert None not in found
    assert folder.stat().st_mode & 0o077 == 0
    files = [path for path in folder.iterdir() if path.name.startswith("=")]
    assert [oct(path.stat().st_mode & 0o777) for path in files] == ["0o600"]
