"""Writes the metrics of a run to TensorBoard event files, from a background thread.

Each worker group opens a new file and records the step at which it starts; TensorBoard then
discards the later points of the group before it, so a curve shows every step once. TensorBoard
reads the files of a folder in the order of the times in their names. Rank 0 queues its points and
never waits for the disk: if it hangs, fills up or is slow, points are lost and no step is delayed.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path

from kdist_trainer import log
from kdist_trainer.metrics.step_stats import StepPhase, StepStats

Points = queue.Queue[tuple[int, float, Mapping[str, float]] | None]
"""(step, Unix time, values by name); None ends the file."""

_RETRY_SECONDS = 30.0
_PREFIX = "events.out.tfevents."


def write(folder: Path, step: int, points: Points) -> None:
    """Write points until None comes; `step` is the first one that they may have. Warns of what
    fails, raises nothing.
    """
    begun = warned = False
    while True:
        try:
            with open_file(folder) as file:
                _begin(file, None if begun else step)
                begun = True
                _draw(file, points)
            return
        except ImportError as error:
            log.warn(
                "tensorboard-missing",
                message=f"no event files are written: TensorBoard is not installed here ({error})",
            )
            return
        except Exception as error:  # noqa: BLE001  a curve that cannot be drawn must never end a training
            if not warned:
                log.warn(
                    "tensorboard-not-written",
                    error=str(error),
                    message=f"event files cannot be written: {error}",
                )
            warned = True
        if _pause(points):
            return


def open_file(folder: Path) -> FileIO:
    """A new event file that TensorBoard reads after all that are there, whatever clocks said.
    Raises `OSError`.

    It has no buffer: what a rank that is killed has drawn is of steps that may be in a checkpoint,
    and will not be done again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    times = [
        path.name.removeprefix(_PREFIX).partition(".")[0] for path in folder.glob(f"{_PREFIX}*")
    ]
    newest = max((int(each) for each in times if each.isdecimal()), default=0)
    stamp = max(int(time.time()), newest + 1)
    return Path(folder, f"{_PREFIX}{stamp:010d}.{socket.gethostname()}.{os.getpid()}").open(
        "xb", buffering=0
    )


def _begin(file: FileIO, step: int | None) -> None:
    """Say what the file is, and at which step the run goes on where that is new."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.summary.writer.record_writer import RecordWriter

    writer, now = RecordWriter(file), time.time()
    writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
    if step is not None:
        start = SessionLog(status=SessionLog.START)
        writer.write(Event(wall_time=now, step=step, session_log=start).SerializeToString())


def _draw(file: FileIO, points: Points) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    writer = RecordWriter(file)
    while (point := points.get()) is not None:
        step, seconds, values = point
        summary = Summary(
            value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        writer.write(Event(wall_time=seconds, step=step, summary=summary).SerializeToString())


def _pause(points: Points) -> bool:
    """Wait a while before the next attempt, and leave out what comes meanwhile; whether that was
    the end.
    """
    end = time.monotonic() + _RETRY_SECONDS
    while (left := end - time.monotonic()) > 0:
        with contextlib.suppress(queue.Empty):
            if points.get(timeout=left) is None:
                return True
    return False


FOLDER = "tensorboard"
"""Name of the folder of event files beside the checkpoints."""
MIN_INTERVAL_SECONDS = 0.1
"""Least time of training between two points: faster steps than that are thinned out."""
RESOLUTION = 0.001
"""The same as a share of the group's life: a month's curve takes no more than some ten thousand
points, a few MB.
"""

_CLOSE_SECONDS = 2.0
_MOST_WAITING = 4096


class TensorBoardWriter:
    """A run's scalars; without a folder of checkpoints they go nowhere. One thread calls it."""

    def __init__(self, checkpoints: Path | None, stats: StepStats) -> None:
        self._folder = None if checkpoints is None else checkpoints / FOLDER
        self._stats = stats
        self._points: Points = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._lived = 0.0
        self._start_anew()

    def begin(self, step: int) -> None:
        """The run goes on after `step`: what is drawn beyond it, by a group that was lost, is done
        again.
        """
        if self._folder is None:
            return
        self.close()
        self._start_anew()
        self._lived, self._seconds = 0.0, MIN_INTERVAL_SECONDS  # the first step is drawn
        self._points = queue.Queue(_MOST_WAITING)
        arguments = (self._folder, step + 1, self._points)
        self._thread = threading.Thread(
            target=write, args=arguments, name="kdist-tensorboard", daemon=True
        )
        self._thread.start()

    def add_step(self, step: int, *, samples: int, seconds: float, loss: float) -> None:
        """One step: its number, its samples over all ranks, this rank's seconds, the global mean
        loss.
        """
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
        """Write what waits, for at most `_CLOSE_SECONDS`; nothing more is drawn until the next
        `begin`.
        """
        if self._thread is None:
            return
        # whoever should have emptied it hangs: a daemon, which holds nobody up
        with contextlib.suppress(queue.Full):
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
        values = {
            "train/learning_rate": self._stats.learning_rate,
            "train/grad_norm": self._stats.grad_norm,
        }
        return {name: value for name, value in values.items() if value is not None}

    def _pace(self) -> dict[str, float]:
        """Throughput, and where the time of a step went, since the last point."""
        paces = {"throughput/samples_per_second": self._samples / self._seconds}
        steps = self._stats.steps - self._phase_steps
        if steps:
            spent = [
                now - before for now, before in zip(self._stats.phase, self._phases, strict=True)
            ]
            paces |= {
                f"step_seconds/{phase.name.lower()}": spent[phase] / steps for phase in StepPhase
            }
            paces["step_seconds/total"] = sum(spent) / steps
        return paces
