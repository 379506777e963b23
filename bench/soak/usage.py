"""What a disturbed training holds at one moment, as one row."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from kdist.job.local import agents
from tests.faults.training_run import TrainingRun
from tests.process_usage import ThreadTimes, count

_SHOWN_CORES = 0.005


class Observer:
    """Makes rows of one run, each with what happened since the one before."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._times = ThreadTimes()
        self._seconds: Counter[str] = Counter()
        self.since = time.monotonic()
        self._step = 0
        self.look()

    def look(self) -> None:
        """Remember the CPU of each thread so far: those of groups that were left end soon."""
        self._times.read(self._run.processes())
        self.looked = time.monotonic()

    def row(self) -> dict[str, Any]:
        """The row of this moment."""
        processes = self._run.processes()
        now, seconds = time.monotonic(), self._times.read(processes)
        span = max(now - self.since, 0.001)
        step = max((rank.beat.step for rank in self._run.ranks()), default=0)
        cores = {name: (seconds[name] - self._seconds[name]) / span for name in seconds}
        row = {
            "seconds": round(span, 1),
            "steps": max(step, self._step),
            "stepsPerSecond": round(max(0, step - self._step) / span, 2) if self._step else None,
            "commits": len(self._run.events("commit")),
            "processes": self._held(processes),
            "cores": {name: round(one, 3) for name, one in cores.items() if one > _SHOWN_CORES},
            **_count_files(self._run.folder),
            "series": self._count_series(),
        }
        self.since, self._seconds, self._step = now, seconds, max(step, self._step)
        return row

    def _held(self, processes: set[int]) -> dict[str, Any]:
        """What each process holds, by what it is; of those without a name the sums."""
        names = {pid: f"agent {node}" for node, pid in self._run.agents().items()}
        names |= {rank.pid: f"rank {rank.node}/{rank.number}" for rank in self._run.ranks()}
        names[self._run.process.pid] = "kdist run"
        found: dict[str, Any] = {}
        for pid in processes:
            with suppress(OSError, StopIteration):  # it has ended
                usage = count(pid)
                name = names.get(pid, "others")
                before = found.get(name, {"descriptors": 0, "threads": 0, "privateKib": 0})
                found[name] = {
                    "pid": pid if pid in names else 0,
                    "descriptors": before["descriptors"] + usage.descriptors,
                    "threads": before["threads"] + usage.threads,
                    "privateKib": before["privateKib"] + usage.private_kib,
                }
        return found

    def _count_series(self) -> int | None:
        """The most series that an agent offers to Prometheus; None if none answers."""
        samples = agents.fetch_samples(self._run.folder, metrics=True).values()
        texts = [sample.metrics for sample in samples if sample.metrics]
        return max((_count_lines(text) for text in texts), default=None)


def _count_lines(metrics: str) -> int:
    return sum(bool(line) and not line.startswith("#") for line in metrics.splitlines())


def _count_files(folder: Path) -> dict[str, int]:
    files = nbytes = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # a save's, renamed
            if path.is_file():
                files, nbytes = files + 1, nbytes + path.stat().st_size
    return {"files": files, "bytes": nbytes}
