"""What a rank's time is divided into: the phases of a step, and the categories of a run's wall time."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class StepPhase(IntEnum):
    """Parts of a step, indices of `StepStats.phase`."""

    DATA_WAIT = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    COMM_EXPOSED = 4
    OTHER = 5


class Wall(StrEnum):
    """Categories that a run's wall time is divided into."""

    STARTUP = "startup"
    RENDEZVOUS = "rendezvous"
    INIT = "init"
    DATA_WAIT = "data_wait"
    PRODUCTIVE_STEP = "productive_step"
    CHECKPOINT_SAVE = "checkpoint_save"
    CHECKPOINT_RESTORE = "checkpoint_restore"
    EVALUATION = "evaluation"
    STALLED = "stalled"
    RESTART = "restart"
    IDLE = "idle"
    UNOBSERVED = "unobserved"
    """A script is at work that reports no steps: nobody knows what it does."""


WALL_CATEGORIES = tuple(str(category) for category in Wall)


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier", "all_to_all", "send", "recv")
"""Collectives by the names that a metric may show."""


class Op(IntEnum):
    """Collectives that are timed, indices of `StepStats.collectives`."""

    ALL_REDUCE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2
