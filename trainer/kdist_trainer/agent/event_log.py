"""Where the events of a run are: in the ledger next to its checkpoints, or, of a run without them,
in the rendezvous store.
"""

from __future__ import annotations

import time
from typing import Any, Final, Protocol

from kdist_trainer.agent.coordination import AgentStore, Document

_KEPT_EVENTS: Final = 1000


class EventLog(Protocol):
    """The storage of a run's events."""

    def append(self, event: str, **fields: Any) -> None: ...

    def events(self) -> list[dict[str, Any]]: ...


class StoreEventLog:
    """Events of a run without checkpoints: kept in the rendezvous store, and lost with it."""

    def __init__(self, agent_store: AgentStore) -> None:
        self._agent_store = agent_store

    def append(self, event: str, **fields: Any) -> None:
        def edit(document: Document) -> None:
            told = {"time": round(time.time(), 3), "event": event, **fields}
            document["events"] = [*document.get("events", []), told][-_KEPT_EVENTS:]

        self._agent_store.change("events", edit)

    def events(self) -> list[dict[str, Any]]:
        return list(self._agent_store.read("events").get("events", []))
