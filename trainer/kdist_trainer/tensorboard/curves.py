"""The curves of a run: what rank 0 measures, on its way to event files of TensorBoard.

What is measured is put into a queue and never waited for: a disk that hangs, fills up or is slow costs points, not steps.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kdist_trainer.stats import StepPhase, StepStats
from kdist_trainer.tensorboard.events import Points, write

FOLDER = "tensorboard"
"""Name of the folder of event files beside the checkpoints."""
MIN_INTERVAL_SECONDS = 0.1
"""Least time of training between two points: faster steps than that are thinned out."""
RESOLUTION = 0.001
"""The same as a share of the group's life: a month's curve takes no more than some ten thousand points, a few MB."""

_CLOSE_SECONDS = 2.0
_MOST_WAITING = 4096


class Curves:
    """A run's scalars; without a folder of checkpoints they go nowhere. One thread calls it."""

    def __init__(self, checkpoints: Path | None, stats: StepStats) -> None:
        self._folder = None if checkpoints is None else checkpoints / FOLDER
        self._stats = stats
        self._points: Points = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._lived = 0.0
        self._start_anew()

    def begin(self, step: int) -> None:
        """The run goes on after `step`: what is drawn beyond it, by a group that was lost, is done again."""
        if self._folder is None:
            return
        self.close()
        self._start_anew()
        self._lived, self._seconds = 0.0, MIN_INTERVAL_SECONDS  # the first step is drawn
        self._points = queue.Queue(_MOST_WAITING)
        arguments = (self._folder, step + 1, self._points)
        self._thread = threading.Thread(target=write, args=arguments, name="kdist-tensorboard", daemon=True)
        self._thread.start()

    def add_step(self, step: int, *, samples: int, seconds: float, loss: float) -> None:
        """One step: its number, its samples over all ranks, this rank's seconds, the global mean loss."""
        if self._thread is None:
            return
        self._steps += 1
        self._samples += samples
        self._seconds += seconds
        self._lived += seconds
        if self._seconds >= max(MIN_INTERVAL_SECONDS, RESOLUTION * self._lived):
            self._add(step, {"train/loss": loss, **self._learning(), **self._pace()})
            self._start_anew()

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """What an evaluation after `step` measured."""
        if self._thread is not None and metrics:
            self._add(step, {f"evaluation/{name}": value for name, value in metrics.items()})

    def close(self) -> None:
        """Write what waits, for at most `_CLOSE_SECONDS`; nothing more is drawn until the next `begin`."""
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full):  # whoever should have emptied it hangs: a daemon, which holds nobody up
            self._points.put_nowait(None)
            self._thread.join(_CLOSE_SECONDS)
        self._thread = None

    def _add(self, step: int, values: Mapping[str, float]) -> None:
        with contextlib.suppress(queue.Full):
            self._points.put_nowait((step, time.time(), values))

    def _start_anew(self) -> None:
        """Nothing was done since the last point."""
        self._steps, self._samples, self._seconds = 0, 0, 0.0
        self._phases: Sequence[float] = list(self._stats.phase)
        self._phase_steps = self._stats.steps

    def _learning(self) -> dict[str, float]:
        values = {"train/learning_rate": self._stats.learning_rate, "train/grad_norm": self._stats.grad_norm}
        return {name: value for name, value in values.items() if value is not None}

    def _pace(self) -> dict[str, float]:
        """Throughput, and where the time of a step went, since the last point."""
        paces = {"throughput/samples_per_second": self._samples / self._seconds}
        steps = self._stats.steps - self._phase_steps
        if steps:
            spent = [now - before for now, before in zip(self._stats.phase, self._phases, strict=True)]
            paces |= {f"step_seconds/{phase.name.lower()}": spent[phase] / steps for phase in StepPhase}
            paces["step_seconds/total"] = sum(spent) / steps
        return paces
