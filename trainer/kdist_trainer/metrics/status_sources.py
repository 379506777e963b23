"""What the agent tells of itself in `/status`, in addition to its ranks: each field has a function
that returns its present value and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class StatusSources:
    """The functions, which the agent sets.

    Attributes:
        peers: The other agents; None while this one cannot tell.
        refused: The connections that the exchange has closed, by reason.
        is_refused: Whether the API server refuses this agent the rendezvous.
        refusal: How it refuses it, in a sentence; empty if it does not.
        has_key: Whether the key of the exchange is mounted; None where agents need none.
        activity: What the ranks do, by local rank.
        last_failure: The failure that ended the latest worker group; None without one.
        full: The folders that have no room, in a sentence; empty if all have.
        room: The room of the folder of the checkpoints, in a sentence.
        waiting_for: What the agent waits for before it tries again, in a sentence; empty if for
            nothing.
        devices: What the ranks of this node run on; empty before it is known.
        slow_start: That starting takes longer than the time between losses, in a sentence, while
            the ranks start; empty if it does not.
    """

    peers: Callable[[], dict[str, Any] | None] = lambda: None
    refused: Callable[[], Mapping[str, int]] = dict
    is_refused: Callable[[], bool] = bool
    refusal: Callable[[], str] = str
    has_key: Callable[[], bool | None] = lambda: None
    activity: Callable[[], Mapping[int, Mapping[str, Any]]] = dict
    last_failure: Mapping[str, Any] | None = None
    full: Callable[[], str] = str
    room: Callable[[], str] = str
    waiting_for: str = ""
    devices: str = ""
    slow_start: str = ""

    def fields(self, *, ended: bool, has_begun: bool, failed_saves: int) -> dict[str, Any]:
        """Fields of `/status`; `ended` is whether the agent's work is over, `has_begun` whether the
        ranks have come to a step, `failed_saves` the number of checkpoints that could not be saved
        since the last one.
        """
        return {
            "peers": None if ended else self.peers(),
            "rendezvous_refused": not ended and self.is_refused(),
            "rendezvous_refusal": None if ended else self.refusal() or None,
            "exchange_key": None if ended else self.has_key(),
            "last_failure": None if self.last_failure is None else self._show_failure(ended=ended),
            "devices": self.devices or None,
            "failed_saves": failed_saves,
            "checkpoint_room": self.room() if failed_saves and not ended else None,
            "waiting_for": None if ended else self.waiting_for or None,
            "slow_start": None if ended or has_begun else self.slow_start or None,
        }

    def _show_failure(self, *, ended: bool) -> dict[str, Any]:
        """The last failure, and whether folders that were full then have no room now either."""
        failure = dict(self.last_failure or {})
        is_known = not ended and bool(failure.get("full"))
        return {**failure, "is_full": bool(self.full()) if is_known else None}
