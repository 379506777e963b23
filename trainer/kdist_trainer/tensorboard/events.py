"""Event files, in TensorBoard's own format and by its own code, written on a thread of their own.

Each group of ranks opens a file and says at which step it goes on: TensorBoard then forgets what the group before it had drawn
from there on, so a curve shows every step once. It reads a folder's files in the order of the times in their names.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from kdist_trainer import log

Points = queue.Queue[tuple[int, float, Mapping[str, float]] | None]
"""(step, Unix time, values by name); None ends the file."""

_RETRY_SECONDS = 30.0
_PREFIX = "events.out.tfevents."


def write(folder: Path, step: int, points: Points) -> None:
    """Write points until None comes; `step` is the first one that they may have. Warns of what fails, raises nothing."""
    begun = warned = False
    while True:
        try:
            with open_file(folder) as file:
                _begin(file, None if begun else step)
                begun = True
                _draw(file, points)
            return
        except ImportError as error:
            log.warn("tensorboard-missing", message=f"no event files are written: TensorBoard is not installed here ({error})")
            return
        except Exception as error:  # noqa: BLE001  a curve that cannot be drawn must never end a training
            if not warned:
                log.warn("tensorboard-not-written", error=str(error), message=f"event files cannot be written: {error}")
            warned = True
        if _pause(points):
            return


def open_file(folder: Path) -> FileIO:
    """A new event file that TensorBoard reads after all that are there, whatever clocks said. Raises `OSError`.

    It has no buffer: what a rank that is killed has drawn is of steps that may be in a checkpoint, and will not be done again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    times = [path.name.removeprefix(_PREFIX).partition(".")[0] for path in folder.glob(f"{_PREFIX}*")]
    newest = max((int(each) for each in times if each.isdecimal()), default=0)
    stamp = max(int(time.time()), newest + 1)
    return Path(folder, f"{_PREFIX}{stamp:010d}.{socket.gethostname()}.{os.getpid()}").open("xb", buffering=0)


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
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        writer.write(Event(wall_time=seconds, step=step, summary=summary).SerializeToString())


def _pause(points: Points) -> bool:
    """Wait a while before the next attempt, and leave out what comes meanwhile; whether that was the end."""
    end = time.monotonic() + _RETRY_SECONDS
    while (left := end - time.monotonic()) > 0:
        with contextlib.suppress(queue.Empty):
            if points.get(timeout=left) is None:
                return True
    return False
