"""Where an agent's wall time went: a partition whose categories only grow and always sum to the elapsed time.

Two sources say where time went. The first local rank reports what it spent, a step at a time and only once it is over. The
agent's state says what the rest was. So the exact partition of the moment just past is known a little later. What is shown
chases it: at each reading the elapsed time since the last one is given to the categories that lag behind the exact
partition, in proportion. Shown seconds are never taken back, and an error made while a step was running heals in the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from kdist_trainer.stats import WALL_CATEGORIES, Wall

_OF_STATE = {
    "pending": Wall.STARTUP,
    "rendezvous": Wall.RENDEZVOUS,
    "initializing": Wall.INIT,
    "running": Wall.IDLE,
    "checkpointing": Wall.CHECKPOINT_SAVE,
    "restarting": Wall.RESTART,
    "hung": Wall.STALLED,
    "succeeded": Wall.IDLE,
    "failed": Wall.IDLE,
}
_ZERO = [0.0] * len(WALL_CATEGORIES)


class WallClock:
    """The partition since `now`, a monotonic time in seconds. Not thread-safe: the caller holds a lock."""

    def __init__(self, now: float) -> None:
        self._start = now
        self._state = "pending"
        self._reported: Sequence[float] = _ZERO
        self._has_stepped = False
        self._settled = list(_ZERO)
        self._claimed = list(_ZERO)
        self._shown = list(_ZERO)

    def enter(self, state: str, *, now: float) -> None:
        """The agent does something else from now on; what nobody reported until now was `state`'s category so far."""
        self._settle(now, _OF_STATE[self._state] if self._has_stepped or self._state != "running" else Wall.INIT)
        self._state = state

    def report(self, reported: Sequence[float], *, has_stepped: bool, now: float) -> None:
        """The ranks' sums as of now; time before now that they do not account for was idle (before the first step: init)."""
        self._reported, self._has_stepped = reported, has_stepped
        if self._state == "running":
            self._settle(now, Wall.IDLE if has_stepped else Wall.INIT)

    def claim(self, category: str, seconds: float) -> None:
        """The agent accounts for time itself; what its states already gave to the category is not counted twice."""
        self._claimed[WALL_CATEGORIES.index(category)] += seconds

    def read(self, now: float) -> dict[str, float]:
        """Seconds by category. They sum to the time since the start, and none is less than it was before."""
        exact = self._exact()
        running = Wall.PRODUCTIVE_STEP if self._has_stepped else Wall.INIT
        going_on = running if self._state == "running" else _OF_STATE[self._state]
        exact[WALL_CATEGORIES.index(going_on)] += self._unaccounted(now)
        lags = [max(0.0, known - shown) for known, shown in zip(exact, self._shown, strict=True)]
        room = max(0.0, now - self._start - sum(self._shown))
        if (lag := sum(lags)) > 0:
            self._shown = [shown + part * room / lag for shown, part in zip(self._shown, lags, strict=True)]
        return dict(zip(WALL_CATEGORIES, self._shown, strict=True))

    def _exact(self) -> list[float]:
        parts = zip(self._reported, self._settled, self._claimed, strict=True)
        return [reported + max(settled, claimed) for reported, settled, claimed in parts]

    def _unaccounted(self, now: float) -> float:
        return max(0.0, now - self._start - sum(self._exact()))

    def _settle(self, now: float, category: str) -> None:
        index = WALL_CATEGORIES.index(category)
        self._settled[index] = max(self._settled[index], self._claimed[index]) + self._unaccounted(now)
