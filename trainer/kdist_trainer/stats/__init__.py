"""Every number that kdist measures, declared once: `StepStats` for a rank's, `AGENT_METRICS` for the agent's own."""

from kdist_trainer.stats.agent import AGENT_METRICS, STATES
from kdist_trainer.stats.metric import Kind, Metric, Scope
from kdist_trainer.stats.phases import COLLECTIVES, WALL_CATEGORIES, Op, StepPhase, Wall
from kdist_trainer.stats.record import StepStats
from kdist_trainer.stats.wire import (
    COUNTER_SLOTS,
    GAUGES,
    LAYOUT,
    MAX_RECORD,
    RECORDED,
    SLOTS,
    MalformedRecordError,
    Record,
    pack,
    unpack,
)

__all__ = [
    "AGENT_METRICS",
    "COLLECTIVES",
    "COUNTER_SLOTS",
    "GAUGES",
    "LAYOUT",
    "MAX_RECORD",
    "RECORDED",
    "SLOTS",
    "STATES",
    "WALL_CATEGORIES",
    "Kind",
    "MalformedRecordError",
    "Metric",
    "Op",
    "Record",
    "Scope",
    "StepPhase",
    "StepStats",
    "Wall",
    "pack",
    "unpack",
]
