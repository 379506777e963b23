"""Writes the metrics of a run to TensorBoard event files, from a background thread.

Each worker group records the step at which it starts; TensorBoard then discards the later points of
the group before it, so a curve shows every step once. TensorBoard reads the files of a folder in
the order of the times in their names: a process continues in its own file for as long as none is
newer, so that there are no more files than processes. Rank 0 queues its points and
never waits for the disk: if it hangs, fills up or is slow, points are lost and no step is delayed.
torch's SummaryWriter blocks once eleven points wait for a disk that hangs, and raises in the
training once the disk was full.

An object store has no append: there the newest file is written again every few seconds, and the
next one is begun before it becomes large. A rank that is killed loses the points since the last
write.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from io import FileIO
from pathlib import Path

from kdist_trainer import log
from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.metrics.rank_metrics import StepPhase, StepStats
from kdist_trainer.object_store.files import GrowingObject
from kdist_trainer.object_store.store import ObjectPath
from kdist_trainer.processes.threads import OnError, start_thread

Points = queue.Queue[tuple[int, float, Mapping[str, float]] | None]
"""(step, Unix time, values by name); None ends the file."""

_RETRY_SECONDS = 30.0
PREFIX = "events.out.tfevents."
"""Prefix of the names of event files."""
_OBJECT_BYTES = 1 << 20
"""Size of a file in an object store at which the next one is begun."""
_ended: dict[Path, Path] = {}
"""By their folder, the files of this process that have ended with a whole point."""


def write(folder: StoragePath, step: int, points: Points) -> None:
    """Write points, of `step` or later ones, to an event file until None arrives. Failures are
    logged and never raised.
    """
    has_start = warned = False
    while True:
        try:
            with open_file(folder) as file:
                _write_header(file, None if has_start else step)
                file.flush()
                has_start = True
                is_over = _write_points(file, points)
            if is_over:
                if isinstance(folder, Path) and isinstance(file, FileIO):
                    _ended[folder] = Path(os.fsdecode(file.name))
                return
            continue  # with the next file
        except ImportError as error:
            log.warn(
                "tensorboard-missing",
                message=f"no event files are written: TensorBoard is not installed ({error})",
            )
            return
        except Exception as error:  # noqa: BLE001  a failed write must never end a training
            if not warned:
                log.warn(
                    "tensorboard-not-written",
                    error=str(error),
                    message=f"event files cannot be written: {error}",
                )
            warned = True
        if _wait_before_retry(points):
            return


def open_file(folder: StoragePath) -> FileIO | GrowingObject:
    """Open an event file that TensorBoard reads after all other ones, even if clocks differ: the
    one that this process has ended, or a new one. Raises `OSError`.

    A file on a disk is unbuffered: the points of a killed rank may be of steps that are in a
    checkpoint and will not be repeated.
    """
    if isinstance(folder, Path):
        folder.mkdir(mode=storage.FOLDER_MODE, parents=True, exist_ok=True)
    times = [
        name.removeprefix(PREFIX).partition(".")[0]
        for name in storage.list_files(folder)
        if name.startswith(PREFIX)
    ]
    newest = max((int(each) for each in times if each.isdecimal()), default=0)
    own = _ended.pop(folder, None) if isinstance(folder, Path) else None
    if own is not None and own.name.removeprefix(PREFIX).startswith(f"{newest:010d}."):
        return FileIO(own, "a", opener=_open)
    stamp = max(int(time.time()), newest + 1)
    path = folder / f"{PREFIX}{stamp:010d}.{socket.gethostname()}.{os.getpid()}"
    return GrowingObject(path) if isinstance(path, ObjectPath) else FileIO(path, "x", opener=_open)


def _open(name: str, flags: int) -> int:
    return os.open(name, flags, storage.FILE_MODE)


def _write_header(file: FileIO | GrowingObject, step: int | None) -> None:
    """Write the file version and, if given, the step at which the run continues."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.summary.writer.record_writer import RecordWriter

    writer, now = RecordWriter(file), time.time()
    writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
    if step is not None:
        start = SessionLog(status=SessionLog.START)
        writer.write(Event(wall_time=now, step=step, session_log=start).SerializeToString())


def _write_points(file: FileIO | GrowingObject, points: Points) -> bool:
    """Write points until None arrives or the file is large enough. Returns whether None arrived."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    writer = RecordWriter(file)
    while not isinstance(file, GrowingObject) or file.size < _OBJECT_BYTES:
        seconds_left = file.seconds_to_flush if isinstance(file, GrowingObject) else None
        try:
            point = points.get(timeout=seconds_left)
        except queue.Empty:
            file.flush()
            continue
        if point is None:
            return True
        step, seconds, values = point
        summary = Summary(
            value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        writer.write(Event(wall_time=seconds, step=step, summary=summary).SerializeToString())
    return False


def _wait_before_retry(points: Points) -> bool:
    """Wait `_RETRY_SECONDS`, discarding points. Returns whether the end arrived meanwhile."""
    end = time.monotonic() + _RETRY_SECONDS
    while (left := end - time.monotonic()) > 0:
        with contextlib.suppress(queue.Empty):
            if points.get(timeout=left) is None:
                return True
    return False


FOLDER = "tensorboard"
"""Name of the folder of event files in the checkpoint folder."""
MIN_INTERVAL_SECONDS = 0.1
"""Minimum training time between two points; faster steps are downsampled."""
RESOLUTION = 0.001
"""Minimum training time between two points as a fraction of the worker group's lifetime, so that a
curve of a month has about ten thousand points, a few MB.
"""

_CLOSE_SECONDS = 2.0
_MAX_QUEUED = 4096


class TensorBoardWriter:
    """Writes the scalars of a run; does nothing without a checkpoint folder. Not thread-safe."""

    def __init__(self, checkpoints: StoragePath | None, stats: StepStats) -> None:
        """Create a writer; `begin` opens a file. The rank's metrics are read for each point."""
        self._folder = None if checkpoints is None else checkpoints / FOLDER
        self._stats = stats
        self._points: Points = queue.Queue(_MAX_QUEUED)
        self._thread: threading.Thread | None = None
        self._lifetime = 0.0
        self._reset()

    def begin(self, step: int) -> None:
        """Begin a curve that continues after `step`: TensorBoard discards the points after this
        step that were written before.
        """
        if self._folder is None:
            return
        self.close()
        self._reset()
        self._lifetime = 0.0
        self._seconds = MIN_INTERVAL_SECONDS  # so that the first step becomes a point
        self._points = queue.Queue(_MAX_QUEUED)
        self._thread = start_thread(
            partial(write, self._folder, step + 1, self._points),
            name="kdist-tensorboard",
            on_error=OnError.REPORT,  # `write` has its own retries, and a training needs no file
        )

    def add_step(self, step: int, *, samples: int, seconds: float, loss: float) -> None:
        """Add a step with its samples and mean loss over all ranks; it becomes a point unless the
        last one is too recent.
        """
        if self._thread is None:
            return
        self._samples += samples
        self._seconds += seconds
        self._lifetime += seconds
        if self._seconds >= max(MIN_INTERVAL_SECONDS, RESOLUTION * self._lifetime):
            learning = {
                "train/learning_rate": self._stats.learning_rate,
                "train/grad_norm": self._stats.grad_norm,
            }
            known = {name: value for name, value in learning.items() if value is not None}
            self._add(step, {"train/loss": loss, **known, **self._throughput()})
            self._reset()

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._thread is not None and metrics:
            self._add(step, {f"evaluation/{name}": value for name, value in metrics.items()})

    def close(self) -> None:
        """Write the queued points, for at most `_CLOSE_SECONDS`. Points are dropped until the next
        `begin`.
        """
        if self._thread is None:
            return
        # if the queue is full, the storage hangs; the thread is a daemon and blocks no exit
        with contextlib.suppress(queue.Full):
            self._points.put_nowait(None)
            self._thread.join(_CLOSE_SECONDS)
        self._thread = None

    def _add(self, step: int, values: Mapping[str, float]) -> None:
        with contextlib.suppress(queue.Full):
            self._points.put_nowait((step, time.time(), values))

    def _reset(self) -> None:
        self._samples = 0
        self._seconds = 0.0
        self._phases: Sequence[float] = list(self._stats.phase)
        self._phase_steps = self._stats.steps

    def _throughput(self) -> dict[str, float]:
        """Throughput, and mean seconds per step by phase, since the last point."""
        values = {"throughput/samples_per_second": self._samples / self._seconds}
        steps = self._stats.steps - self._phase_steps
        if steps:
            seconds = [
                now - before for now, before in zip(self._stats.phase, self._phases, strict=True)
            ]
            values |= {
                f"step_seconds/{phase.name.lower()}": seconds[phase] / steps for phase in StepPhase
            }
            values["step_seconds/total"] = sum(seconds) / steps
        return values
