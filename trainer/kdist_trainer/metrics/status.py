"""The `/status` document: what this agent's part of the job is doing, for `kdist run` and `kdist
status`.

`job`, `run_id`, `node`, `pid`: whose document it is. `state`: the agent's, one of `STATES`.
`phase`: what its first rank is at, or the state once the work is over. `generation`, `world_size`:
the group. `step`, `target_steps`, `loss`, `learning_rate`, `last_checkpoint_step`,
`last_checkpoint_time` (Unix): what the ranks said last; loss, rate and checkpoints only where rank
0 is. `samples_per_second`: this node's. `restarts`: of this agent's ranks; `restarts_remaining`:
the job's; `lost_steps`, `wall_seconds` (by category). `nodes`: how many there may be, `min` and
`max`. `ranks`: see `ranks`. `exit`: the exit record once the work is over. All but the first may be
null.
"""

from __future__ import annotations

import contextlib
from collections import deque
from pathlib import Path
from typing import Any

from kdist_trainer import log
from kdist_trainer.liveness import Heartbeat, RankSnapshot
from kdist_trainer.metrics import declarations
from kdist_trainer.metrics.aggregation import AgentMetrics, MetricsSnapshot
from kdist_trainer.metrics.step_stats import StepPhase
from kdist_trainer.metrics.wire import GAUGES, SLOTS

_WINDOW_SECONDS = 10.0
_SPACING_SECONDS = 0.5
_PHASE = SLOTS["kdist_step_phase_seconds_total"].start
_STEPS = SLOTS["kdist_steps_total"].start
_ALL_REDUCE = SLOTS["kdist_collective_seconds_total"].start
_BUSY = tuple(
    _PHASE + phase
    for phase in (StepPhase.DATA_WAIT, StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.OPTIMIZER)
)


class Throughput:
    """Samples per second over the last ten seconds, from a total that only grows."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float]] = deque()

    def add(self, total: float, *, now: float) -> None:
        """The total stands at `total` at monotonic time `now`."""
        if not self._points or now - self._points[-1][0] >= _SPACING_SECONDS:
            self._points.append((now, total))
        self._forget(now)

    def rate(self, total: float, *, now: float) -> float | None:
        """Samples per second until now; None while nothing was counted in the window."""
        self._forget(now)
        if not self._points or now - self._points[0][0] < _SPACING_SECONDS:
            return None
        since, before = self._points[0]
        return max(0.0, total - before) / (now - since)

    def _forget(self, now: float) -> None:
        while len(self._points) > 1 and now - self._points[0][0] > _WINDOW_SECONDS:
            self._points.popleft()


def shown_gauges(snapshot: MetricsSnapshot) -> dict[str, Any]:
    """What the ranks last said of the training: a number, None while unknown, a word where it is
    not finite.
    """
    fields = {
        "step": "kdist_last_step",
        "target_steps": "kdist_target_steps",
        "loss": "kdist_loss",
        "learning_rate": "kdist_learning_rate",
        "last_checkpoint_step": "kdist_checkpoint_last_success_step",
        "last_checkpoint_time": "kdist_checkpoint_last_success_timestamp_seconds",
    }
    values = {field: snapshot.gauges[GAUGES[name]] for field, name in fields.items()}
    whole = {"step", "target_steps", "last_checkpoint_step"}
    return {
        field: int(value) if field in whole and value is not None else log.plain(value)
        for field, value in values.items()
    }


def counted(snapshot: MetricsSnapshot, told: AgentMetrics) -> dict[str, Any]:
    """What the agent knows of its group and of the restarts."""
    remaining = told.get(declarations.RESTARTS_REMAINING)
    return {
        "generation": snapshot.generation,
        "world_size": snapshot.world_size,
        "restarts": int(told.total(declarations.RESTARTS)),
        "restarts_remaining": None if remaining is None else int(remaining),
        "lost_steps": int(told.total(declarations.LOST_STEPS)),
    }


def ranks(snapshot: MetricsSnapshot, scratch: Path, *, now: float) -> list[dict[str, Any]]:
    """One entry per local rank, with what it does by its heartbeat in `scratch`; `now` is a
    monotonic time.

    `collective` is what it is in, such as `all_reduce(float32[1024]) #17`. `busy_seconds` and
    `all_reduce_seconds` are means per step of this generation: work without waiting for peers, and
    time with an all-reduce in flight, if there was one.
    """
    found = []
    for local_rank, rank in enumerate(snapshot.local_ranks):
        entry: dict[str, Any] = {
            "rank": rank,
            "local_rank": local_rank,
            "step": None,
            "step_seconds": None,
        }
        entry |= {
            "busy_seconds": None,
            "all_reduce_seconds": None,
            "phase": None,
            "heartbeat_age": None,
            "collective": None,
        }
        if record := snapshot.current.get(rank):
            step, seconds = (
                record.gauges[GAUGES["kdist_last_step"]],
                record.gauges[GAUGES["kdist_step_duration_ewma_seconds"]],
            )
            steps = record.counters[_STEPS]
            entry["step"] = None if step is None else int(step)
            entry["step_seconds"] = log.plain(seconds)
            entry["busy_seconds"] = (
                sum(record.counters[slot] for slot in _BUSY) / steps if steps else None
            )
            entry["all_reduce_seconds"] = (
                record.counters[_ALL_REDUCE] / steps
                if steps and record.counters[_ALL_REDUCE]
                else None
            )
        if beat := read_beat(scratch, local_rank):
            entry["phase"] = str(beat.phase)
            entry["collective"] = beat.collective
            entry["heartbeat_age"] = round(max(0.0, now - beat.time_ns / 1e9), 3)
        found.append(entry)
    return found


def read_beat(scratch: Path, local_rank: int) -> RankSnapshot | None:
    """The latest beat of a local rank; None if it never beat."""
    try:
        with contextlib.closing(Heartbeat(scratch / f"rank-{local_rank}.heartbeat")) as heartbeat:
            beat = heartbeat.read()
    except (OSError, ValueError):
        return None
    return beat if beat.count else None
