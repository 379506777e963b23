"""`kdist_trainer.stop_requested`: whether this rank is to stop, and how long it has for that; for
any script, with or without a `Checkpointer`. Free of torch.
"""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass

from kdist_trainer.processes.liveness import Heartbeat, heartbeat_path, own_place
from kdist_trainer.processes.signals import exit_on_unrequested_sigterm, leave_stops_to_others


@dataclass(frozen=True)
class StopRequest:
    """What `stop_requested` returns.

    Attributes:
        deadline: When the agent kills the rank, as `time.time()` counts.
    """

    deadline: float

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline; 0 after it."""
        return max(0.0, self.deadline - time.time())


def stop_requested() -> StopRequest | None:
    """Whether this rank is to stop: a node of its group was asked to end (a drain, a spot notice,
    `kdist suspend`, Ctrl-C), or the ranks start again because nodes join or have left. None if not,
    and outside kdist. Call it after every step, on any rank; it takes microseconds.

    SIGTERM, which the ranks of such a node get too, no longer ends a process that has called this
    once from its main thread, unless the script handles SIGTERM itself. A SIGTERM that the
    agent did not ask for ends the process at a call more than five seconds later.
    """
    if (place := own_place()) is None:
        return None
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        leave_stops_to_others()
    deadline = Heartbeat.read_stop(heartbeat_path(*place))
    if is_main and not deadline:
        exit_on_unrequested_sigterm()
    return StopRequest(deadline) if deadline else None
