"""Where the events of a run are: in the ledger next to its checkpoints, or, of a run without them,
in the rendezvous store.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Final, Protocol

from kdist_trainer.agent.coordination import AgentStore, Document
from kdist_trainer.checkpoint.group import BoundedCalls
from kdist_trainer.checkpoint.ledger import RunLedger

_KEPT_EVENTS: Final = 1000


class EventLog(Protocol):
    """The storage of a run's events."""

    def append(self, event: str, **fields: Any) -> None: ...

    def events(self) -> list[dict[str, Any]]: ...

    def write_late(self) -> bool:
        """Write what could not be written before; returns whether there was anything. Raises
        `OSError`.
        """
        ...


class FolderEventLog:
    """Events of a run with checkpoints, in their folder. A folder that does not answer is not
    waited for, and what it refuses is written with the next event that it takes: the numbers of the
    generations, which the lock of the folder knows, must not be given twice.
    """

    def __init__(self, ledger: RunLedger, calls: BoundedCalls) -> None:
        self._ledger = ledger
        self._calls = calls
        self._late: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_KEPT_EVENTS)

    def append(self, event: str, **fields: Any) -> None:
        """Append an event. Raises `OSError`."""
        self._late.append((event, {"time": round(time.time(), 3), **fields}))
        self.write_late()

    def write_late(self) -> bool:
        """See `EventLog`."""
        if not self._late:
            return False
        self._calls.call(self._write)
        return True

    def events(self) -> list[dict[str, Any]]:
        """All events that were written. Raises `OSError`."""
        return self._calls.call(self._ledger.events)

    def _write(self) -> None:
        while self._late:
            event, fields = self._late[0]
            self._ledger.append(event, **fields)
            self._late.popleft()


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

    def write_late(self) -> bool:
        """See `EventLog`."""
        return False
