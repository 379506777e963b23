"""How the agents of a round tell each other that their scripts are done: in the generation's
document, and over the exchange of the round, which works where the API server refuses some of them
or all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from torch.distributed import DistError

from kdist_trainer.rendezvous.handler import Rendezvous

_FINISHED, _SEEN = "finished/", "finish-seen/"
_PAUSE_SECONDS = 1.0
_SEEN_SECONDS = 10.0
"""How long agents wait for each other to see that all are done: one of them is the host."""


class FinishExchange:
    """What the agents of the latest round have said over its exchange.

    Args:
        rendezvous: Has the exchange, or none.
        node: This node.
        nodes: All nodes of the round.
    """

    def __init__(self, rendezvous: Rendezvous, node: str, nodes: Sequence[str]) -> None:
        self._rendezvous = rendezvous
        self._node = node
        self._nodes = nodes
        self._asked_at = 0.0
        self._say(_FINISHED)

    def all_finished(self) -> bool:
        """Whether all nodes are done, and know it of each other; asks at most once a second."""
        if len(self._nodes) == 1:
            return True
        now = time.monotonic()
        if now - self._asked_at < _PAUSE_SECONDS:
            return False
        self._asked_at = now
        if not self._all(_FINISHED):
            return False
        self._say(_SEEN)
        while time.monotonic() < now + _SEEN_SECONDS and not self._all(_SEEN):
            if self._is_alone():
                break
            time.sleep(_PAUSE_SECONDS / 10)
        return True

    def has_lost_members(self) -> bool:
        """Whether a node has gone before all were done, or there is no exchange that could tell."""
        return self._is_alone() and not self._all(_FINISHED)

    def _is_alone(self) -> bool:
        """Whether a node has gone, or there is no exchange."""
        exchange = self._rendezvous.exchange
        try:
            self._rendezvous.check_connections()
            return exchange is None or not exchange.peek([self._node])
        except DistError:
            return True

    def _say(self, what: str) -> None:
        if self._rendezvous.exchange is not None:
            with suppress(DistError):  # the host is gone: who waits notices
                self._rendezvous.exchange.set(f"{what}{self._node}", "1")

    def _all(self, what: str) -> bool:
        exchange = self._rendezvous.exchange
        try:
            return exchange is not None and exchange.check([f"{what}{one}" for one in self._nodes])
        except DistError:
            return False
