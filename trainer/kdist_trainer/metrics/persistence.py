"""Keeps an agent's counters in the checkpoint folder, so that the agent that replaces it continues
them.

A scrape is answered after its numbers were saved, so no counter of the next agent starts below a
value that Prometheus has already read, which it would treat as a counter reset. Storage that hangs
or fails costs only that guarantee: writing happens in a thread, and a scrape waits for it a moment
at most.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kdist_trainer import log
from kdist_trainer.metrics.aggregation import MetricsSnapshot
from kdist_trainer.metrics.declarations import AGENT_METRICS, Kind
from kdist_trainer.metrics.step_stats import WALL_CATEGORIES
from kdist_trainer.metrics.wire import COUNTER_SLOTS, LAYOUT

Labels = tuple[str, ...]

_EVERY_SECONDS = 10.0
_WAIT_SECONDS = 0.2
_MOST_BYTES = 1_000_000
_COUNTED = {metric.name: metric for metric in AGENT_METRICS if metric.kind is not Kind.GAUGE}


@dataclass(frozen=True)
class CounterState:
    """All that only grows: of the local ranks in their order, of rank 0 while it was local, of wall
    time, and of the agent.
    """

    ranks: tuple[tuple[float, ...], ...] = ()
    leader: tuple[float, ...] = (0.0,) * COUNTER_SLOTS
    wall: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(WALL_CATEGORIES, 0.0))
    agent: Mapping[str, Mapping[Labels, tuple[float, ...]]] = field(default_factory=dict)
    """Counters and histograms by the metric's name and label values."""


def sums_of(
    snapshot: MetricsSnapshot,
    told: Mapping[str, Mapping[Labels, Sequence[float]]],
    wall: Mapping[str, float],
) -> CounterState:
    """What there is to keep of an agent's numbers."""
    counted = {
        name: {labels: tuple(numbers) for labels, numbers in told[name].items()}
        for name in _COUNTED
    }
    return CounterState(snapshot.sums, tuple(snapshot.leader), wall, counted)


def place(checkpoints: Path, *, run_id: str, node: str) -> Path:
    """Where a node's sums of a run are kept. A pod of an indexed job has another name each time:
    there its index counts.
    """
    index = os.environ.get("JOB_COMPLETION_INDEX", "")
    whose = hashlib.sha256(f"{run_id}/{index if index.isdecimal() else node}".encode()).hexdigest()[
        :16
    ]
    return checkpoints / "ledger" / "sums" / f"{whose}.json"


def read(path: Path, *, run_id: str) -> CounterState:
    """The sums that an agent of this run left there; nothing where there are none, or none that
    this version understands.
    """
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(_MOST_BYTES))
        if (document["layout"], document["run_id"]) != (LAYOUT, run_id):
            return CounterState()
        return CounterState(
            ranks=tuple(_numbers(each, COUNTER_SLOTS) for each in document["ranks"]),
            leader=_numbers(document["leader"], COUNTER_SLOTS),
            wall=dict(
                zip(WALL_CATEGORIES, _numbers(document["wall"], len(WALL_CATEGORIES)), strict=True)
            ),
            agent={name: _series(name, series) for name, series in document["agent"].items()},
        )
    except FileNotFoundError:
        return CounterState()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.warn("counters-unreadable", message=f"counters begin anew: {path}: {error}")
        return CounterState()


def write(path: Path, sums: CounterState, *, run_id: str) -> None:
    """Replace what is kept. Raises `OSError`."""
    document = {
        "layout": LAYOUT,
        "run_id": run_id,
        "ranks": sums.ranks,
        "leader": sums.leader,
        "wall": [sums.wall[category] for category in WALL_CATEGORIES],
        "agent": {
            name: [[labels, numbers] for labels, numbers in series.items()]
            for name, series in sums.agent.items()
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(document))
    fresh.replace(path)


class CounterStore:
    """Writes what `look` gives: when it is asked to, and every ten seconds."""

    def __init__(self, path: Path, look: Callable[[], CounterState], *, run_id: str) -> None:
        self._path = path
        self._look = look
        self._run_id = run_id
        self._asked = threading.Event()
        self._stop = False
        self._kept = threading.Condition()
        self._given = 0
        self._done = 0
        self._sums: CounterState | None = None
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="kdist-metrics-keeper", daemon=True)
        self._thread.start()

    def keep(self, sums: CounterState) -> None:
        """Have these written; returns when they are, or after a moment."""
        with self._kept:
            self._sums, self._given = sums, self._given + 1
            wanted = self._given
            self._asked.set()
            self._kept.wait_for(lambda: self._done >= wanted, _WAIT_SECONDS)

    def close(self) -> None:
        """Write what there is now, and end; storage that hangs is left behind."""
        self._stop = True
        self.keep(self._look())
        self._thread.join(_WAIT_SECONDS)

    def _run(self) -> None:
        while not self._stop or self._asked.is_set():
            self._asked.wait(_EVERY_SECONDS)
            self._asked.clear()
            with self._kept:
                sums, number, self._sums = self._sums, self._given, None
            try:
                write(self._path, sums or self._look(), run_id=self._run_id)
            except OSError as error:
                if not self._warned:
                    log.warn(
                        "counters-not-persisted",
                        message=f"counters will not outlive this agent: {self._path}: {error}",
                    )
                self._warned = True
            with self._kept:
                self._done = max(self._done, number)
                self._kept.notify_all()


def _numbers(found: Any, count: int) -> tuple[float, ...]:
    numbers = tuple(float(each) for each in found)
    if len(numbers) != count or not all(math.isfinite(each) and each >= 0 for each in numbers):
        raise ValueError("not the sums of counters")
    return numbers


def _series(name: str, found: Any) -> dict[Labels, tuple[float, ...]]:
    metric = _COUNTED[name]
    slots = len(metric.buckets) + 2 if metric.kind is Kind.HISTOGRAM else 1
    series = {
        tuple(str(label) for label in labels): _numbers(numbers, slots) for labels, numbers in found
    }
    if any(len(labels) != len(metric.labels) for labels in series):
        raise ValueError(f"{name} has other labels")
    return series
