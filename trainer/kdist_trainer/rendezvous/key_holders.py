"""Which nodes have the key of the job's exchanges, as the rendezvous state tells it.

A node's key is a file that may be missing, come late or be another one than that of the others, as
a Secret that was made again. So each node that writes the state leaves the fingerprint of its key
there. A round gets an exchange only if all of its members have the same one; otherwise none of them
looks for one, and all exchange through the store of the rendezvous.
"""

from __future__ import annotations

import secrets

from torch.distributed.distributed_c10d import Store

from kdist_trainer.rendezvous.exchange_key import KEY_FILE, ExchangeKey
from kdist_trainer.rendezvous.kubernetes_store import KubernetesStore
from kdist_trainer.rendezvous.torch_internals import Node, State

ATTRIBUTE = "kdist_exchange_keys"
"""Where the rendezvous state has the fingerprints, by node."""

_KEY = "kdist/exchange-key"
_KEY_BYTES = 32


def open_key(store: Store) -> ExchangeKey:
    """The key of the exchanges of a job with this store. A ConfigMap is read by many, so the key is
    mounted next to the token; any other store has a random one, as only agents can read it.
    """
    if isinstance(store, KubernetesStore):
        return ExchangeKey((store.config_map.server.account / KEY_FILE).read_bytes)
    return ExchangeKey(lambda: store.compare_set(_KEY, "", secrets.token_hex(_KEY_BYTES)))


def name_key(state: State, node: Node | None, key: ExchangeKey) -> None:
    """Put the fingerprint of a node's key into a rendezvous state, and forget dead nodes'."""
    known = state.last_heartbeats.keys() | state.participants.keys()
    found = {each: text for each, text in _fingerprints(state).items() if each in known}
    if node is not None:
        found.pop(node, None)
        if (fingerprint := key.fingerprint()) is not None:
            found[node] = fingerprint
    vars(state)[ATTRIBUTE] = found


def all_have_key(state: State, key: ExchangeKey) -> bool:
    """Whether all participants of the round have this key."""
    fingerprint = key.fingerprint()
    held = _fingerprints(state)
    return fingerprint is not None and all(
        held.get(node) == fingerprint for node in state.participants
    )


def are_valid_keys(fields: object) -> bool:
    """Whether a rendezvous state may have these fields as the fingerprints."""
    return fields is None or (
        type(fields) is dict
        and all(type(node) is Node for node in fields)
        and all(type(text) is str for text in fields.values())
    )


def _fingerprints(state: State) -> dict[Node, str]:
    found: dict[Node, str] = vars(state).get(ATTRIBUTE) or {}
    return found
