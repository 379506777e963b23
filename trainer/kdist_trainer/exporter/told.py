"""The agent's own numbers: counted and set as the agent tells them, kept by metric and label values."""

from __future__ import annotations

import importlib.metadata
import platform
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from kdist_trainer import __version__
from kdist_trainer.stats import AGENT_METRICS, COLLECTIVES, Kind, Metric
from kdist_trainer.stats.agent import (
    BUILD_INFO,
    COLLECTIVE_FAILURES,
    JOB_INFO,
    RESTARTS_REMAINING,
    WORKER_EXITS,
    WORLD_SIZE_MAX,
)

Labels = tuple[str, ...]


class Told:
    """Values of `AGENT_METRICS` by the metric's name and label values. Not thread-safe: the caller holds a lock."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Labels, float]] = {metric.name: {} for metric in AGENT_METRICS}
        self._observed: dict[str, dict[Labels, list[float]]] = {metric.name: {} for metric in AGENT_METRICS}
        for metric in AGENT_METRICS:
            if metric.kind is Kind.COUNTER:
                self._values[metric.name] = dict.fromkeys(metric.series, 0.0)
        self._budget: int | None = None

    def resume(self, before: Mapping[str, Mapping[Labels, Sequence[float]]]) -> None:
        """Go on from what counters and histograms came to, by the metric's name."""
        for name, series in before.items():
            for labels, numbers in series.items():
                if len(numbers) == 1:
                    self._values[name][labels] = numbers[0]
                else:
                    self._observed[name][labels] = list(numbers)

    def count(self, metric: Metric, labels: Labels = (), amount: float = 1.0) -> None:
        """Let a counter grow. Raises `ValueError` if it would shrink."""
        if not amount >= 0:
            raise ValueError(f"{metric.name} cannot grow by {amount}")
        values = self._values[metric.name]
        values[labels] = values.get(labels, 0.0) + amount

    def count_exit(self, cause: str, signal: str, collective: str | None) -> None:
        """Count the end of a worker, and the failure of the collective that it was in."""
        self.count(WORKER_EXITS, (cause, signal))
        if collective:
            self.count(COLLECTIVE_FAILURES, (collective if collective in COLLECTIVES else "other", cause))

    def set(self, metric: Metric, value: float, labels: Labels = ()) -> None:
        """Let a gauge show a value."""
        self._values[metric.name][labels] = value

    def allow(self, restarts: int, *, budget: int) -> None:
        """Let so many restarts be left of the job's budget."""
        self._budget = budget
        self.set(RESTARTS_REMAINING, restarts)

    def refill(self) -> None:
        """Let all of the budget be left again: a rank of this generation has committed a checkpoint."""
        if self._budget is not None:
            self.set(RESTARTS_REMAINING, self._budget)

    def observe(self, metric: Metric, seconds: float, labels: Labels = ()) -> None:
        """Let a histogram count an observation."""
        counts = self._observed[metric.name].setdefault(labels, [0.0] * (len(metric.buckets) + 2))
        counts[bisect_left(metric.buckets, seconds)] += 1
        counts[-1] += seconds

    def set_info(self, info: Mapping[str, str]) -> None:
        """Let the info metrics show these labels, empty where nobody knows them, and a gauge the largest world size."""
        try:
            torch_version = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            torch_version = ""
        found = {"version": __version__, "torch_version": torch_version, "python_version": platform.python_version(), **info}
        for metric in (BUILD_INFO, JOB_INFO):
            self.set(metric, 1, tuple(str(found.get(label, "")) for label in metric.labels))
        if str(found.get("world_size_max", "")).isdecimal():
            self.set(WORLD_SIZE_MAX, int(found["world_size_max"]))

    def get(self, metric: Metric, labels: Labels = ()) -> float | None:
        """One value; None if it was never told."""
        return self._values[metric.name].get(labels)

    def total(self, metric: Metric) -> float:
        """Sum of a counter's series."""
        return sum(self._values[metric.name].values())

    def snapshot(self) -> dict[str, dict[Labels, list[float]]]:
        """All series by the metric's name, detached: one number each, or a histogram's slots."""
        single = {name: {labels: [value] for labels, value in series.items()} for name, series in self._values.items()}
        several = {name: {labels: list(slots) for labels, slots in series.items()} for name, series in self._observed.items()}
        return {name: single[name] or several[name] for name in single}
