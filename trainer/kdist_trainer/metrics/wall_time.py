"""The breakdown of an agent's wall time (goodput): categories that only grow and always add up to
the elapsed time.

It has two sources. The first local rank reports the time that it spent, but each step only once it
is over. The agent's state classifies the remaining time. So the exact breakdown of a moment is
known a little later. The published values follow it: each reading distributes the time since the
previous reading over the categories that lag behind the exact breakdown, in proportion to their
lag. Published seconds are never taken back; a wrong guess during one step is corrected in the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kdist_trainer.liveness import Phase
from kdist_trainer.metrics.step_stats import WALL_CATEGORIES, WallCategory

_CATEGORY_BY_STATE = {
    "pending": WallCategory.STARTUP,
    "rendezvous": WallCategory.RENDEZVOUS,
    "standby": WallCategory.IDLE,
    "initializing": WallCategory.INIT,
    "running": WallCategory.IDLE,
    "checkpointing": WallCategory.IDLE,
    "restarting": WallCategory.RESTART,
    "hung": WallCategory.STALLED,
    "succeeded": WallCategory.IDLE,
    "failed": WallCategory.IDLE,
}
_RANKS_RUNNING = {"initializing", "running", "checkpointing"}
_CATEGORY_BY_PHASE = {
    Phase.START: WallCategory.INIT,
    Phase.RENDEZVOUS: WallCategory.INIT,
    Phase.INIT: WallCategory.INIT,
    Phase.RESTORE: WallCategory.CHECKPOINT_RESTORE,
    Phase.DATA: WallCategory.DATA_WAIT,
    Phase.STEP: WallCategory.PRODUCTIVE_STEP,
    Phase.SYNC: WallCategory.PRODUCTIVE_STEP,
    Phase.SAVE: WallCategory.CHECKPOINT_SAVE,
    Phase.EVALUATE: WallCategory.EVALUATION,
    Phase.EXIT: WallCategory.IDLE,
}
_GUESSED = (WallCategory.IDLE, WallCategory.INIT, WallCategory.UNOBSERVED)
_NO_SECONDS = [0.0] * len(WALL_CATEGORIES)


class WallTimeBreakdown:
    """Seconds by category since `now`. Not thread-safe: callers hold a lock."""

    def __init__(
        self, now: float, persisted: Mapping[str, float] | None = None, *, observed: bool = True
    ) -> None:
        """Start the breakdown.

        Args:
            now: Monotonic time in seconds.
            persisted: Seconds by category of previous agents, which are continued.
            observed: Whether ranks report what they do from their start, as the managed loop does;
                a script may never report.
        """
        known = [persisted[category] for category in WALL_CATEGORIES] if persisted else _NO_SECONDS
        self._start = now - sum(known)
        self._state = "pending"
        self._before_steps = WallCategory.INIT if observed else WallCategory.UNOBSERVED
        self._reported: Sequence[float] = _NO_SECONDS
        self._has_stepped = False
        self._classified = list(known)
        self._persisted = known
        self._published = list(known)

    def enter(self, state: str, *, now: float) -> None:
        """Change the agent's state; unreported time until now belongs to the previous state."""
        self._classify(now, self._default_category())
        self._state = state

    def report(self, reported: Sequence[float], *, has_stepped: bool, now: float) -> None:
        """Update the seconds that the ranks reported.

        Time before `now` that they do not account for was idle; before the first step it was init,
        or unobserved.

        Args:
            reported: Seconds by category, over all generations.
            has_stepped: Whether the ranks have completed a step in this generation.
            now: Monotonic time in seconds.
        """
        category = self._default_category()  # before has_stepped changes: time so far was no idling
        self._reported = reported
        self._has_stepped = has_stepped
        if self._state in _RANKS_RUNNING:
            self._classify(now, category)
        self._correct(now)

    def read(self, now: float, *, phase: Phase | None = None) -> dict[str, float]:
        """Return the seconds by category: they add up to the time since the start, and none is less
        than in the previous reading.

        Args:
            now: Monotonic time in seconds.
            phase: The phase of the first local rank by its heartbeat; unreported time is attributed
                to it for the time being.
        """
        exact = self._exact()
        exact[WALL_CATEGORIES.index(self._current_category(phase))] += self._unaccounted(now)
        lags = [
            max(0.0, seconds - shown) for seconds, shown in zip(exact, self._published, strict=True)
        ]
        elapsed = max(0.0, now - self._start - sum(self._published))
        if (total_lag := sum(lags)) > 0:
            self._published = [
                shown + lag * elapsed / total_lag
                for shown, lag in zip(self._published, lags, strict=True)
            ]
        return dict(zip(WALL_CATEGORIES, self._published, strict=True))

    def _current_category(self, phase: Phase | None) -> WallCategory:
        """The category of time that is not over yet."""
        if self._state not in _RANKS_RUNNING:
            return _CATEGORY_BY_STATE[self._state]
        if self._before_steps is WallCategory.UNOBSERVED and not self._has_stepped:
            return WallCategory.UNOBSERVED
        if phase:
            return _CATEGORY_BY_PHASE[phase]
        return WallCategory.PRODUCTIVE_STEP if self._has_stepped else WallCategory.INIT

    def _default_category(self) -> WallCategory:
        """The category of time that is over and that no rank accounted for."""
        if self._state in _RANKS_RUNNING and not self._has_stepped:
            return self._before_steps
        return _CATEGORY_BY_STATE[self._state]

    def _exact(self) -> list[float]:
        return [
            reported + classified
            for reported, classified in zip(self._reported, self._classified, strict=True)
        ]

    def _unaccounted(self, now: float) -> float:
        return max(0.0, now - self._start - sum(self._exact()))

    def _correct(self, now: float) -> None:
        """Undo guesses about time that a late report accounts for."""
        excess = sum(self._exact()) - (now - self._start)
        for category in _GUESSED:
            index = WALL_CATEGORIES.index(category)
            undone = min(max(0.0, excess), self._classified[index] - self._persisted[index])
            self._classified[index] -= undone
            excess -= undone

    def _classify(self, now: float, category: WallCategory) -> None:
        """Attribute all unaccounted time until now to a category."""
        self._classified[WALL_CATEGORIES.index(category)] += self._unaccounted(now)
