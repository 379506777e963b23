"""Agreement of all ranks on when to save and when to stop: a rank that stops or saves alone leaves
the others waiting in their next collective.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from kdist_trainer import log
from kdist_trainer.checkpoint.group import CheckpointGroup
from kdist_trainer.checkpoint.interval import EVENT
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.save_clock import SaveClock
from kdist_trainer.signals import StopCounter

_AGREE_SECONDS = 0.5
_MAX_CALLS = 1000


class SaveAgreement:
    """Exchanges stop requests, and whether a save is due by rank 0's clock, about twice a second.

    A second request by SIGTERM (`StopCounter`) ends the process at once.
    """

    def __init__(self, group: CheckpointGroup, clock: SaveClock, ledger: RunLedger) -> None:
        """Agree on nothing yet; `listen` to be told by SIGTERM.

        Args:
            group: the ranks that save together.
            clock: says when a save is due.
            ledger: receives when the first step was done: it is how long a run has trained.
        """
        self.stopping = False
        """Whether all ranks have agreed to stop."""
        self._group = group
        self._clock = clock
        self._ledger = ledger
        self.requested = False
        """Whether this rank was asked to stop."""
        self._calls = 0
        self._agree_at = 1
        self._agreed_calls = 0
        self._agreed_time = time.monotonic()
        self._former: Any = None
        self._terminations = StopCounter()

    def listen(self) -> None:
        """Take SIGTERM as a request to stop, also if another handler was installed since. Does
        nothing outside the main thread, which alone may.
        """
        if threading.current_thread() is threading.main_thread():
            former = signal.signal(signal.SIGTERM, self._on_signal)
            if self._former is None:
                self._former = former

    def unlisten(self) -> None:
        """Give SIGTERM back to the handler that it had before `listen`."""
        if self._former is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._former)
            self._former = None

    def poll(self, step: int) -> bool:
        """Exchange requests if it is time to; called by all ranks after every step.

        Args:
            step: the number of completed steps.

        Returns:
            Whether a save is due by rank 0's clock, the same on all ranks.
        """
        if not self._calls and self._group.is_rank_zero:
            self._record("first_step", step=step, seconds=round(self._clock.trained, 3))
        self._clock.tick()
        self._calls += 1
        if self._calls < self._agree_at:
            return False
        now = time.monotonic()
        seconds_per_call = (now - self._agreed_time) / (self._calls - self._agreed_calls)
        cost = self._clock.interval.cost or 0.0
        due = self._clock.is_due(step)
        answers = self._group.gather((self.requested, due, seconds_per_call, cost))
        self.stopping = any(stop for stop, _, _, _ in answers)
        slowest = max(seconds for _, _, seconds, _ in answers)
        self._clock.interval.take_costs(max(cost for _, _, _, cost in answers))
        self._tell_interval()
        self._agreed_time = now
        self._agreed_calls = self._calls
        self._agree_at = self._calls + max(
            1, min(_MAX_CALLS, int(_AGREE_SECONDS / max(slowest, 1e-6)))
        )
        return answers[0][1]

    def _tell_interval(self) -> None:
        if self._group.is_rank_zero and (news := self._clock.take_news()):
            log.event("save-interval", **news)
            self._record(EVENT, **news)

    def _record(self, event: str, **fields: Any) -> None:
        generation = int(os.environ.get("KDIST_GENERATION", "1"))
        try:
            self._ledger.append(event, generation=generation, **fields)
        except OSError as error:
            log.warn("ledger-write-failed", error=str(error))

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._terminations.add():
            os._exit(128 + number)
        self.requested = True
