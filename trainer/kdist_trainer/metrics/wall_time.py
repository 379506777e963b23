"""Where an agent's wall time went: a partition whose categories only grow and always sum to the
elapsed time.

Two sources say where time went. The first local rank reports what it spent, a step at a time and
only once it is over. The agent's state says what the rest was. So the exact partition of the moment
just past is known a little later. What is shown chases it: at each reading the elapsed time since
the last one is given to the categories that lag behind the exact partition, in proportion. Shown
seconds are never taken back, and an error made while a step was running heals in the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kdist_trainer.liveness import Phase
from kdist_trainer.metrics.step_stats import WALL_CATEGORIES, Wall

_OF_STATE = {
    "pending": Wall.STARTUP,
    "rendezvous": Wall.RENDEZVOUS,
    "initializing": Wall.INIT,
    "running": Wall.IDLE,
    "checkpointing": Wall.IDLE,
    "restarting": Wall.RESTART,
    "hung": Wall.STALLED,
    "succeeded": Wall.IDLE,
    "failed": Wall.IDLE,
}
_RANKS_AT_WORK = {"initializing", "running", "checkpointing"}
_OF_PHASE = {
    Phase.START: Wall.INIT,
    Phase.RENDEZVOUS: Wall.INIT,
    Phase.INIT: Wall.INIT,
    Phase.RESTORE: Wall.CHECKPOINT_RESTORE,
    Phase.DATA: Wall.DATA_WAIT,
    Phase.STEP: Wall.PRODUCTIVE_STEP,
    Phase.SYNC: Wall.PRODUCTIVE_STEP,
    Phase.SAVE: Wall.CHECKPOINT_SAVE,
    Phase.EVALUATE: Wall.EVALUATION,
    Phase.EXIT: Wall.IDLE,
}
_GUESSED = (Wall.IDLE, Wall.INIT, Wall.UNOBSERVED)
_ZERO = [0.0] * len(WALL_CATEGORIES)


class WallTimeBreakdown:
    """The partition since `now`, a monotonic time in seconds, on top of an earlier agent's. The
    caller holds a lock.

    `observed` says that the ranks tell what they do from their start, as the managed loop's do; a
    script may tell nothing ever.
    """

    def __init__(
        self, now: float, before: Mapping[str, float] | None = None, *, observed: bool = True
    ) -> None:
        known = [before[category] for category in WALL_CATEGORIES] if before else _ZERO
        self._start = now - sum(known)
        self._state = "pending"
        self._before_steps = Wall.INIT if observed else Wall.UNOBSERVED
        self._reported: Sequence[float] = _ZERO
        self._has_stepped = False
        self._settled = list(known)
        self._kept = known
        self._shown = list(known)

    def enter(self, state: str, *, now: float) -> None:
        """The agent does something else from now on; what nobody reported until now was `state`'s
        category so far.
        """
        self._settle(now, self._leftover())
        self._state = state

    def report(self, reported: Sequence[float], *, has_stepped: bool, now: float) -> None:
        """The ranks' sums as of now.

        Time before now that they do not account for was idle; before the first step it was init, or
        unobserved.
        """
        leftover = self._leftover()  # what precedes the first step was no idling
        self._reported, self._has_stepped = reported, has_stepped
        if self._state in _RANKS_AT_WORK:
            self._settle(now, leftover)
        self._correct(now)

    def read(self, now: float, *, doing: Phase | None = None) -> dict[str, float]:
        """Seconds by category. They sum to the time since the start, and none is less than it was
        before.

        `doing` is what the first local rank is at by its heartbeat: what it has not reported yet
        probably goes there.
        """
        exact = self._exact()
        going_on = _OF_STATE[self._state]
        if self._state in _RANKS_AT_WORK:
            if self._before_steps is Wall.UNOBSERVED and not self._has_stepped:
                going_on = Wall.UNOBSERVED
            else:
                going_on = (
                    _OF_PHASE[doing]
                    if doing
                    else Wall.PRODUCTIVE_STEP
                    if self._has_stepped
                    else Wall.INIT
                )
        exact[WALL_CATEGORIES.index(going_on)] += self._unaccounted(now)
        lags = [max(0.0, known - shown) for known, shown in zip(exact, self._shown, strict=True)]
        room = max(0.0, now - self._start - sum(self._shown))
        if (lag := sum(lags)) > 0:
            self._shown = [
                shown + part * room / lag for shown, part in zip(self._shown, lags, strict=True)
            ]
        return dict(zip(WALL_CATEGORIES, self._shown, strict=True))

    def _leftover(self) -> str:
        """Where time goes that is over and that nobody accounted for."""
        at_work = self._state in _RANKS_AT_WORK
        return self._before_steps if at_work and not self._has_stepped else _OF_STATE[self._state]

    def _exact(self) -> list[float]:
        return [
            reported + settled
            for reported, settled in zip(self._reported, self._settled, strict=True)
        ]

    def _unaccounted(self, now: float) -> float:
        return max(0.0, now - self._start - sum(self._exact()))

    def _correct(self, now: float) -> None:
        """A report may speak of time that was settled before it came: it knows better."""
        excess = sum(self._exact()) - (now - self._start)
        for category in _GUESSED:
            index = WALL_CATEGORIES.index(category)
            taken = min(max(0.0, excess), self._settled[index] - self._kept[index])
            self._settled[index] -= taken
            excess -= taken

    def _settle(self, now: float, category: str) -> None:
        index = WALL_CATEGORIES.index(category)
        self._settled[index] += self._unaccounted(now)
