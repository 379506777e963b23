"""What a run did since it began, as the agents agree on it at each worker group."""

from __future__ import annotations

from typing import NamedTuple

from kdist_trainer.metrics import declarations
from kdist_trainer.metrics.aggregation import AgentMetrics


class RunHistory(NamedTuple):
    """What the run had come to when a worker group began.

    Attributes:
        restarts: The worker groups that began after a failure, this one included.
        lost_steps: The steps that later groups began below.
        committed_step: The step of its newest checkpoint; None without one.
        committed_at: When that was committed, in Unix seconds; None if that is not known.
    """

    restarts: int
    lost_steps: int
    committed_step: int | None = None
    committed_at: float | None = None


class RunCounts:
    """The restarts and lost steps of the run. Until the first group of this agent's process they
    are what the processes before it on this node have counted.
    """

    def __init__(self) -> None:
        self._history: RunHistory | None = None
        self._failures = 0

    @property
    def committed(self) -> tuple[int | None, float | None]:
        """Step and time of the newest checkpoint as the latest group began."""
        return (None, None) if self._history is None else self._history[2:]

    def begin(self, history: RunHistory) -> None:
        """A worker group begins."""
        self._history, self._failures = history, 0

    def add_failure(self) -> None:
        """A failure has ended the group, and another one will follow."""
        self._failures = 1

    def end(self) -> None:
        """No other group follows."""
        self._failures = 0

    def fields(self, agent: AgentMetrics) -> dict[str, int]:
        """Fields of `/status`."""
        if self._history is None:
            counters = {"restarts": declarations.RESTARTS, "lost_steps": declarations.LOST_STEPS}
            return {name: int(agent.total(metric)) for name, metric in counters.items()}
        restarts = self._history.restarts + self._failures
        return {"restarts": restarts, "lost_steps": self._history.lost_steps}
