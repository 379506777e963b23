"""Persists an agent's counters in the checkpoint folder, so that the agent that replaces it
continues them.

A scrape is answered after its numbers were saved, so no counter of the next agent starts below a
value that Prometheus has already read, which it would treat as a counter reset. Storage that hangs
or fails costs only that guarantee: a background thread writes, and a scrape waits for it for
`_WAIT_SECONDS` at most.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kdist_trainer import log
from kdist_trainer.formats import LEDGER
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import parse_json
from kdist_trainer.metrics.agent_metrics import AGENT_METRICS
from kdist_trainer.metrics.aggregation import MetricsSnapshot
from kdist_trainer.metrics.metric import Kind
from kdist_trainer.metrics.rank_metrics import WALL_CATEGORIES
from kdist_trainer.metrics.transport import COUNTER_SLOTS, LAYOUT
from kdist_trainer.object_store.store import ObjectPath
from kdist_trainer.processes.threads import OnError, start_thread

Labels = tuple[str, ...]

_INTERVAL_SECONDS = 10.0
_OBJECT_INTERVAL_SECONDS = 60.0  # each is a request that is paid for
_WAIT_SECONDS = 0.2
_MAX_BYTES = 1_000_000
_CUMULATIVE = {metric.name: metric for metric in AGENT_METRICS if metric.kind is not Kind.GAUGE}


@dataclass(frozen=True)
class CounterState:
    """The counters of an agent and its ranks, to be persisted."""

    ranks: tuple[tuple[float, ...], ...] = ()
    """Of each local rank, in their order."""
    rank_zero: tuple[float, ...] = (0.0,) * COUNTER_SLOTS
    """Those that rank 0 reported while it was local."""
    wall: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(WALL_CATEGORIES, 0.0))
    """Wall time in seconds by category."""
    agent: Mapping[str, Mapping[Labels, tuple[float, ...]]] = field(default_factory=dict)
    """The agent's own counters and histograms by the metric's name and label values."""


def counter_state(
    snapshot: MetricsSnapshot,
    agent: Mapping[str, Mapping[Labels, Sequence[float]]],
    wall: Mapping[str, float],
) -> CounterState:
    """Select what is to be persisted of the ranks' counters, of the agent's own metrics, and of its
    wall time in seconds by category.
    """
    cumulative = {
        name: {labels: tuple(numbers) for labels, numbers in agent[name].items()}
        for name in _CUMULATIVE
    }
    return CounterState(snapshot.in_order, tuple(snapshot.rank_zero), wall, cumulative)


def counters_path(checkpoints: Path | ObjectPath, *, run_id: str, node: str) -> Path | ObjectPath:
    """The file with the counters of one node of a run. In a pod of an indexed Job its completion
    index identifies it, because its replacement has another name.
    """
    index = os.environ.get("JOB_COMPLETION_INDEX", "")
    identity = f"{run_id}/{index if index.isdecimal() else node}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return checkpoints / LEDGER / "sums" / f"{digest}.json"


def read_counters(path: Path | ObjectPath, *, run_id: str) -> CounterState:
    """Read the counters that an agent of this run wrote; all are zero if there are none, or none
    that this version can read.
    """
    try:
        if isinstance(path, ObjectPath):
            content = path.read_bytes(_MAX_BYTES)
        else:
            with path.open("rb") as file:
                content = file.read(_MAX_BYTES)
        document = parse_json(content, allow_nan=True)
        if (document["layout"], document["run_id"]) != (LAYOUT, run_id):
            return CounterState()
        return CounterState(
            ranks=tuple(_numbers(each, COUNTER_SLOTS) for each in document["ranks"]),
            rank_zero=_numbers(document["leader"], COUNTER_SLOTS),
            wall=dict(
                zip(WALL_CATEGORIES, _numbers(document["wall"], len(WALL_CATEGORIES)), strict=True)
            ),
            agent={name: _series(name, series) for name, series in document["agent"].items()},
        )
    except FileNotFoundError:
        return CounterState()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.warn("counters-unreadable", message=f"counters start from zero: {path}: {error}")
        return CounterState()


def write_counters(path: Path | ObjectPath, state: CounterState, *, run_id: str) -> None:
    """Replace the file by the counters of this run. Raises `OSError`."""
    document = {
        "layout": LAYOUT,
        "run_id": run_id,
        "ranks": state.ranks,
        "leader": state.rank_zero,
        "wall": [state.wall[category] for category in WALL_CATEGORIES],
        "agent": {
            name: [[labels, numbers] for labels, numbers in series.items()]
            for name, series in state.agent.items()
        },
    }
    if isinstance(path, ObjectPath):
        path.write_bytes(encode_json(document).encode())
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.touch(mode=0o600)
    fresh.write_text(encode_json(document))
    fresh.replace(path)


class CounterStore:
    """Writes counters to a file from a background thread: on request, and every
    `_INTERVAL_SECONDS`, or `_OBJECT_INTERVAL_SECONDS` in an object store.
    """

    def __init__(
        self, path: Path | ObjectPath, snapshot: Callable[[], CounterState], *, run_id: str
    ) -> None:
        self._path = path
        self._snapshot = snapshot
        self._run_id = run_id
        self._wake = threading.Event()
        self._stop = False
        self._condition = threading.Condition()
        self._requests = 0
        self._completed = 0
        self._requested: CounterState | None = None
        self._warned = False
        self._thread = start_thread(
            self._run, name="kdist-metrics-persistence", on_error=OnError.RESTART
        )

    def save(self, state: CounterState) -> None:
        """Write these counters; returns when they are written, or after `_WAIT_SECONDS`."""
        with self._condition:
            self._requested = state
            self._requests += 1
            number = self._requests
            self._wake.set()
            self._condition.wait_for(lambda: self._completed >= number, _WAIT_SECONDS)

    def close(self) -> None:
        """Write the current counters, unless storage does not respond, and stop."""
        self._stop = True
        self.save(self._snapshot())
        self._thread.join(_WAIT_SECONDS)

    def _run(self) -> None:
        is_object = isinstance(self._path, ObjectPath)
        interval = _OBJECT_INTERVAL_SECONDS if is_object else _INTERVAL_SECONDS
        while not self._stop or self._wake.is_set():
            self._wake.wait(interval)
            self._wake.clear()
            with self._condition:
                state, self._requested = self._requested, None
                number = self._requests
            try:
                write_counters(self._path, state or self._snapshot(), run_id=self._run_id)
            except OSError as error:
                if not self._warned:
                    log.warn(
                        "counters-not-persisted",
                        message=f"counters are not persisted: {self._path}: {error}",
                    )
                self._warned = True
            with self._condition:
                self._completed = max(self._completed, number)
                self._condition.notify_all()


def _numbers(found: Any, count: int) -> tuple[float, ...]:
    numbers = tuple(float(each) for each in found)
    if len(numbers) != count or not all(math.isfinite(each) and each >= 0 for each in numbers):
        raise ValueError("not the values of counters")
    return numbers


def _series(name: str, found: Any) -> dict[Labels, tuple[float, ...]]:
    metric = _CUMULATIVE[name]
    slots = len(metric.buckets) + 2 if metric.kind is Kind.HISTOGRAM else 1
    series = {
        tuple(str(label) for label in labels): _numbers(numbers, slots) for labels, numbers in found
    }
    if any(len(labels) != len(metric.labels) for labels in series):
        raise ValueError(f"{name} has other labels")
    return series
