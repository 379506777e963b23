"""Detects that another node is lost, such as by a power cut: it has fallen silent, and the workers
of this node wait for it.

A closed connection raises at once. A silent node closes none, so that a collective waits for its
timeout, and torch's connect for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kdist_trainer.agent.generation import Generation
from kdist_trainer.agent.hang_detection import Watchdog
from kdist_trainer.agent.survivors import can_keep_workers
from kdist_trainer.config import TrainConfig
from kdist_trainer.rendezvous.handler import SILENCE_SECONDS
from kdist_trainer.rendezvous.state import RendezvousStatus

WAIT_SECONDS = 5.0
"""How long all ranks of this node must have waited in one collective before a silent node counts as
lost: an agent may pause, or be cut off from the store, while its ranks run.
"""
SILENT_SECONDS = 2.0
"""How long a node must have missed its keep-alives, in addition, before it counts as lost."""
SCRIPT_SILENT_SECONDS = 30.0
"""The same for scripts: their ranks may wait in a barrier for minutes on purpose."""
_WAIT_FACTOR = 2.0
"""How much longer the wait must be than the longest completed one."""


class NodeLossDetector:
    """Watches the other nodes of one generation.

    Args:
        config: The configuration of the job.
        generation: The generation.
        watchdog: Knows how long the ranks of this node have been waiting.
        has_silent_members: Whether a member is silent, by the members' connections. It counts only
            if the others can continue in place without it: then a node that was only slow returns
            at little cost.
    """

    def __init__(
        self,
        config: TrainConfig,
        generation: Generation,
        watchdog: Watchdog,
        has_silent_members: Callable[[], bool],
    ) -> None:
        self._watchdog = watchdog
        self._least_seconds = SILENT_SECONDS if config.train is not None else SCRIPT_SILENT_SECONDS
        self._hang_seconds = config.hang_timeout_seconds
        fewest, _ = generation.bounds
        self._can_do_without = can_keep_workers(config) and fewest < len(generation.nodes)
        self._has_silent_members = has_silent_members
        self._silent_since: float | None = None

    def is_lost(self, status: RendezvousStatus) -> bool:
        """Whether a node is lost, given the latest state of the rendezvous."""
        is_silent = self._can_do_without and self._has_silent_members()
        if is_silent and self._has_waited(SILENCE_SECONDS):
            return True
        now, watchdog = time.monotonic(), self._watchdog
        missing = status.silent or status.left
        self._silent_since = (self._silent_since or now) if missing else None
        if self._silent_since is None:
            return False
        silent = now - self._silent_since
        if silent > self._hang_seconds and watchdog.has_no_heartbeats():
            return True
        return silent > self._least_seconds and self._has_waited(WAIT_SECONDS)

    def _has_waited(self, seconds: float) -> bool:
        """Whether the ranks of this node have waited so long in one collective."""
        least = max(seconds, _WAIT_FACTOR * self._watchdog.longest_wait)
        return self._watchdog.waited_seconds() > least
