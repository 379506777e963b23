"""While workers run, one agent reads the ConfigMap and sends keep-alives for all of its round, so
that the API server's load does not grow with the number of agents.

The host of the round's exchange publishes its copies of the ConfigMap there, and from time to time
commits the keep-alives that the others leave there, all in one write. A copy is only a read: each
change is still a compare-and-swap in the ConfigMap, which refuses what an old copy led to. An agent
that hears nothing new from the host reads the ConfigMap and sends its keep-alives itself.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousError

from kdist_trainer.rendezvous.configmap_client import Copy
from kdist_trainer.rendezvous.exchange_store import ExchangeStore
from kdist_trainer.threads import OnError, start_thread

_PULSE, _COPY, _BEAT = "relay/pulse", "relay/copy", "relay/beat/"
_MISSED_PULSES = 3


class Relay(ABC):
    """This agent's part of the relay of one round, in a thread that `start` starts.

    Args:
        exchange: The exchange of the round.
        interval: The seconds between two rounds of the thread.
    """

    def __init__(self, exchange: ExchangeStore, *, interval: float) -> None:
        self._exchange = exchange
        self._interval = interval
        self._latest: tuple[Copy, float] | None = None
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start the thread."""
        start_thread(self._run, name="kdist-relay", on_error=OnError.RESTART)

    def stop(self) -> None:
        """Have the thread end after its turn, which may wait for the host or the API server."""
        self._stopped.set()

    def latest(self) -> Copy | None:
        """The newest copy of the ConfigMap; None if the host has said nothing for a while."""
        latest = self._latest
        if latest is None or self._stopped.is_set():
            return None
        copy, heard_at = latest
        return copy if time.monotonic() - heard_at <= _MISSED_PULSES * self._interval else None

    def _run(self) -> None:
        with suppress(DistError, ValueError):  # the host is lost, and with it the relay
            while not self._stopped.wait(self._interval):
                self._take_turn()

    @abstractmethod
    def _take_turn(self) -> None:
        """What the thread does in each interval. Raises `DistError` if the host is lost."""


class RelayHost(Relay):
    """The part of the agent that hosts the exchange.

    Args:
        exchange: The exchange of the round.
        interval: The seconds between two reads of the ConfigMap.
        members: The number of agents of the round.
        read: Reads the ConfigMap.
        commit: Commits keep-alives by group rank; returns whether they were committed.
        commit_seconds: The seconds between two commits.
    """

    def __init__(
        self,
        exchange: ExchangeStore,
        *,
        interval: float,
        members: int,
        read: Callable[[], Copy],
        commit: Callable[[Mapping[int, datetime]], bool],
        commit_seconds: float,
    ) -> None:
        super().__init__(exchange, interval=interval)
        self._keys = [f"{_BEAT}{rank}" for rank in range(members)]
        self._read = read
        self._commit = commit
        self._commit_seconds = commit_seconds
        # the others have left theirs by the second turn
        self._commit_at = time.monotonic() + 2 * interval
        self._published: int | None = None
        self._turns = 0

    def _take_turn(self) -> None:
        try:
            copy = self._read()
        except DistError:
            return  # without a pulse the others find out for themselves
        self._latest = copy, time.monotonic()
        if copy.version != self._published:
            self._exchange.set(_COPY, copy.to_json())
            self._published = copy.version
        self._turns += 1
        self._exchange.set(_PULSE, f"{self._turns} {copy.version}")
        if time.monotonic() >= self._commit_at:
            beats = self._beats()
            with suppress(RendezvousError):  # it is tried again in the next turn
                if self._commit(beats):
                    self._commit_at = time.monotonic() + self._commit_seconds

    def _beats(self) -> dict[int, datetime]:
        """The latest keep-alives by group rank, of the agents that have left one."""
        texts = self._exchange.peek(self._keys)
        return {
            rank: datetime.fromisoformat(text.decode())
            for rank, text in enumerate(texts)
            if text is not None
        }


class RelayMember(Relay):
    """The part of every other agent.

    Args:
        exchange: The exchange of the round.
        interval: The seconds between two keep-alives.
        rank: The group rank of this agent.
    """

    def __init__(self, exchange: ExchangeStore, *, interval: float, rank: int) -> None:
        super().__init__(exchange, interval=interval)
        self._key = f"{_BEAT}{rank}"
        self._copy: Copy | None = None
        self._pulse: bytes | None = None

    def _take_turn(self) -> None:
        self._exchange.set(self._key, datetime.now(UTC).isoformat())
        (pulse,) = self._exchange.peek([_PULSE])
        if pulse is None or pulse == self._pulse:
            return
        if self._copy is None or self._copy.version != int(pulse.split()[1]):
            self._copy = Copy.from_json(self._exchange.get(_COPY))
        self._pulse = pulse
        self._latest = self._copy, time.monotonic()
