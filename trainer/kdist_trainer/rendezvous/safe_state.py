"""Reads the shared rendezvous state without running code that is in it.

torch keeps the state as a pickle and reads it with `pickle.loads`, wherever it comes from. What
comes from others, over a ConfigMap, a relay, the gatherer or a TCPStore, is read here by an
allow-list and checked, and torch gets what this process has pickled from that.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from kdist_trainer.allow_list import AllowList, UnsafePickleError
from kdist_trainer.rendezvous import key_holders
from kdist_trainer.rendezvous.exchange import ExchangeHost
from kdist_trainer.rendezvous.many_nodes import Gatherer
from kdist_trainer.rendezvous.torch_internals import Node, State

_EXTENSIONS: dict[str, Callable[[object], bool]] = {
    ExchangeHost.ATTRIBUTE: ExchangeHost.is_valid,
    Gatherer.ATTRIBUTE: Gatherer.is_valid,
    key_holders.ATTRIBUTE: key_holders.are_valid_keys,
}
"""What kdist adds to torch's state."""
_MOST_BYTES = 1 << 22  # a ConfigMap holds at most 1 MiB
_STATE: AllowList = AllowList(
    source="the rendezvous state",
    names={
        **{(kind.__module__, kind.__qualname__): kind for kind in (State, Node)},
        **{("datetime", kind.__qualname__): kind for kind in (datetime, timedelta, timezone)},
    },
    records={
        State: [*vars(State()), *_EXTENSIONS],
        Node: Node.__dataclass_fields__,
    },
    keys={Node: {"addr": (str,), "pid": (int,), "local_id": (int,)}},
)


def read_state(data: bytes) -> State:
    """Read a rendezvous state that torch has pickled.

    Raises:
        UnsafePickleError: It is none, or refers to anything else.
    """
    if len(data) > _MOST_BYTES:
        raise UnsafePickleError(f"the rendezvous state has {len(data)} bytes")
    state = _STATE.read(data)
    if type(state) is not State:
        raise UnsafePickleError("the rendezvous state is of another type")
    if wrong := sorted(name for name in vars(State()) if not _is_valid(name, vars(state))):
        raise UnsafePickleError(f"the rendezvous state has no valid {', '.join(wrong)}")
    for name, is_valid in _EXTENSIONS.items():
        if not is_valid(vars(state).get(name)):
            raise UnsafePickleError(f"the rendezvous state has no valid {name}")
    return state


def _is_valid(name: str, fields: dict[str, Any]) -> bool:
    value = fields.get(name, fields)
    match name:
        case "round":
            return type(value) is int
        case "complete" | "closed":
            return type(value) is bool
        case "deadline":
            return value is None or _is_moment(value)
        case "participants":
            return _maps(value) and all(type(rank) is int for rank in value.values())
        case "last_heartbeats":
            return _maps(value) and all(map(_is_moment, value.values()))
        case _:
            return type(value) is set and all(type(node) is Node for node in value)


def _maps(value: object) -> bool:
    return type(value) is dict and all(type(node) is Node for node in value)


def _is_moment(value: object) -> bool:
    return type(value) is datetime and type(value.tzinfo) is timezone


class SafeBackend(RendezvousBackend):
    """A backend of torch's whose state is safe to unpickle.

    Args:
        backend: The backend that has the state.
    """

    def __init__(self, backend: RendezvousBackend) -> None:
        self._backend = backend

    @property
    def name(self) -> str:
        """See base class."""
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        """See base class. Raises `RendezvousStateError` for a state that is not safe."""
        found = self._backend.get_state()
        return None if found is None else (_clean(found[0]), found[1])

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """See base class. Raises `RendezvousStateError` for a state that is not safe."""
        found = self._backend.set_state(state, token)
        if found is None or found[0] == state:  # this process has pickled it
            return found
        return _clean(found[0]), found[1], found[2]


def _clean(data: bytes) -> bytes:
    try:
        return pickle.dumps(read_state(data))
    except UnsafePickleError as error:
        raise RendezvousStateError(str(error)) from error
