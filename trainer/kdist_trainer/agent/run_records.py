"""What an agent reads and writes next to the checkpoints: `RunRecords`.

The agent supervises ranks that may go on without the folder. So no error of the storage ends it,
and storage that does not answer is not waited for: what was known last counts then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from kdist_trainer import log
from kdist_trainer.agent.coordination import AgentStore
from kdist_trainer.agent.event_log import EventLog, FolderEventLog, StoreEventLog
from kdist_trainer.agent.exit_record import read_done
from kdist_trainer.agent.settings import Settings
from kdist_trainer.checkpoint.group import BoundedCalls
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.lock import Lock
from kdist_trainer.checkpoint.storage import StoragePath

T = TypeVar("T")


class RunRecords:
    """The events, the checkpoints and the end of one run.

    Args:
        agent_store: The documents that agents share.
        checkpoints: The folder; None keeps the events in the store.
    """

    def __init__(self, agent_store: AgentStore, checkpoints: StoragePath | None) -> None:
        self._agent_store = agent_store
        self._checkpoints = checkpoints
        self._committed = 0
        self._known: list[dict[str, Any]] = []
        self._calls = BoundedCalls(f"the checkpoint folder {checkpoints}")
        self._events: EventLog = (
            StoreEventLog(agent_store)
            if checkpoints is None
            else FolderEventLog(RunLedger(checkpoints), self._calls)
        )

    def append_event(self, event: str, **fields: Any) -> bool:
        """Write an event; returns whether it was written. A disk error is logged only, and the
        event is written with the next one.
        """
        try:
            self._events.append(event, **fields)
        except OSError as error:
            log.warn(
                "ledger-write-failed",
                message=f"{event} could not be written to the run ledger: {error}",
            )
            return False
        return True

    def _read(self) -> list[dict[str, Any]]:
        """The events; those that were known last if the storage fails."""
        try:
            self._known = self._events.events()
        except OSError as error:
            log.warn("ledger-unreadable", message=f"the run ledger could not be read: {error}")
        return list(self._known)

    def ask(self, read: Callable[[], T], otherwise: T) -> T:
        """What `read` finds in the checkpoint folder; `otherwise` if that fails, or does not answer
        in time.
        """
        try:
            return self._calls.call(read)
        except OSError:
            return otherwise

    def close(self) -> None:
        """Write what the storage has refused before, if it takes it now."""
        with suppress(OSError):
            self._events.write_late()

    def read_done(self, settings: Settings) -> dict[str, Any] | None:
        """See `exit_record.read_done`; None too if the storage does not answer."""
        root, config = settings.checkpoints, settings.config
        return self.ask(lambda: read_done(root, config, run_id=settings.run_id), None)

    def committed_step(self) -> int:
        """The step of the newest committed checkpoint, 0 if there is none; the one that was known
        last if the storage fails.
        """
        if self._checkpoints is None:
            return 0
        try:
            newest = self._calls.call(Lock(self._checkpoints).find_newest)
        except OSError as error:
            message = f"the checkpoints could not be listed: {error}"
            log.warn("checkpoints-unreadable", message=message)
        else:
            self._committed = newest.step if newest else 0
        return self._committed
