"""How the metrics of a rank reach its agent: datagrams over a Unix socket.

`Reporter`, which scripts import as `kdist_trainer.Reporter`, sends the rank's `StepStats`. Sending
never blocks: if the agent is slow, stopped or gone, the record is dropped and counted. The counters
are cumulative, so the next record that arrives includes everything in the lost ones. The agent's
`Receiver` reads the socket.

A record is a header followed by every number as a float64: first the counters and histograms, then
the gauges, in the order of `StepStats`, in at most `MAX_RECORD` bytes. The header contains a digest
of that layout, so a record of another version is rejected, never misread.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import math
import os
import select
import socket
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from pathlib import Path

from kdist_trainer import log
from kdist_trainer.metrics.metric import Kind, Metric
from kdist_trainer.metrics.rank_metrics import StepStats, WallCategory
from kdist_trainer.metrics.torch_internals import compile_seconds
from kdist_trainer.processes.liveness import Heartbeat, Phase
from kdist_trainer.processes.threads import OnError, start_thread

MAX_RECORD = 1024
"""Maximum size of a datagram in bytes."""

_METRICS: dict[str, Metric] = {
    declared.name: declared.metadata["metric"]
    for declared in dataclasses.fields(StepStats)
    if "metric" in declared.metadata
}
RECORDED: tuple[Metric, ...] = tuple(_METRICS.values())
"""Every metric that a record carries, in the order of declaration."""

_COUNTERS = [name for name, metric in _METRICS.items() if metric.kind is not Kind.GAUGE]
_GAUGES = [name for name, metric in _METRICS.items() if metric.kind is Kind.GAUGE]
_SINGLE = [name for name in _COUNTERS if _METRICS[name].slots == 1]
_MULTIPLE = [name for name in _COUNTERS if _METRICS[name].slots > 1]
_get_single = attrgetter(*_SINGLE)
_get_multiple = attrgetter(*_MULTIPLE)
_get_gauges = attrgetter(*_GAUGES)

COUNTER_SLOTS = sum(_METRICS[name].slots for name in _COUNTERS)
_SLOTS = COUNTER_SLOTS + len(_GAUGES)
_MAGIC = b"kdst"


def digest_layout(metrics: Iterable[Metric]) -> int:
    """The digest of these metrics' places and meanings in a record, whatever their help says."""
    places = [(one.name, one.kind.value, one.series, one.buckets) for one in metrics]
    return zlib.crc32(repr(places).encode())


LAYOUT = digest_layout(_METRICS[name] for name in (*_SINGLE, *_MULTIPLE, *_GAUGES))
"""Digest of the layout: numbers written under another one have another meaning."""
_PACKED = struct.Struct(f"<4sIIIQQQ{_SLOTS}d")
assert _PACKED.size <= MAX_RECORD, f"a record would take {_PACKED.size} bytes"  # noqa: S101  found at the first import


_placed = [_METRICS[name] for name in (*_SINGLE, *_MULTIPLE)]
_ends = accumulate(metric.slots for metric in _placed)
SLOTS = {one.name: slice(end - one.slots, end) for one, end in zip(_placed, _ends, strict=True)}
"""Position of a counter's or histogram's numbers in `Record.counters`, by the metric's name."""
GAUGES: dict[str, int] = {_METRICS[name].name: index for index, name in enumerate(_GAUGES)}
"""Position of a gauge in `Record.gauges`, by the metric's name."""


class MalformedRecordError(ValueError):
    """The datagram is not a record of this version."""


@dataclass(frozen=True, slots=True)
class Record:
    """An unpacked datagram. `started_ns` is the Unix time of the rank's start in nanoseconds."""

    rank: int
    generation: int
    sequence: int
    started_ns: int
    counters: tuple[float, ...]
    gauges: tuple[float | None, ...]


def pack(stats: StepStats) -> bytes:
    """Pack the next record of `stats` and increment its sequence number."""
    stats.sequence += 1
    gauges = _get_gauges(stats)
    numbers = list(_get_single(stats))
    for values in _get_multiple(stats):
        numbers += values
    present = 0
    for index, value in enumerate(gauges):
        if value is None:
            numbers.append(0.0)
        else:
            present |= 1 << index
            numbers.append(value)
    return _PACKED.pack(
        _MAGIC,
        LAYOUT,
        stats.rank,
        present,
        stats.generation,
        stats.sequence,
        stats.started_ns,
        *numbers,
    )


def unpack(datagram: bytes) -> Record:
    """Unpack a datagram. Raises `MalformedRecordError`."""
    if len(datagram) != _PACKED.size:
        raise MalformedRecordError(f"{len(datagram)} bytes, not {_PACKED.size}")
    magic, layout, rank, present, generation, sequence, started_ns, *numbers = _PACKED.unpack(
        datagram
    )
    if magic != _MAGIC or layout != LAYOUT:
        raise MalformedRecordError("other magic or layout")
    counters = tuple(numbers[:COUNTER_SLOTS])
    if not math.isfinite(sum(counters)):
        raise MalformedRecordError("a counter is not finite")
    gauges = tuple(
        value if present >> index & 1 else None
        for index, value in enumerate(numbers[COUNTER_SLOTS:])
    )
    return Record(rank, generation, sequence, started_ns, counters, gauges)


MIN_INTERVAL_SECONDS = 0.2
"""Minimum interval between two records."""
CLOSE_SECONDS = 1.0
"""Maximum time that `Reporter.close` waits until the socket accepts the last record."""

_FULL = {errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOBUFS}
# a Unix socket's address holds 108 bytes on Linux and 104 on macOS, the final zero included
_MAX_ADDRESS_BYTES = 100
_LINK_BYTES = len("/kdist-12345678/s/")
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - in folders of random names
_RECONNECT_SECONDS = 1.0
PROGRESS_SECONDS = 1.0
"""Least time between two `progress` events, of the managed loop and of scripts."""


class NoShortFolderError(OSError, ValueError):
    """No folder is short enough for a socket; the message says what to do."""


def find_short_folder(room: int) -> Path:
    """The first folder for temporary files whose path leaves `room` bytes of a socket's address.
    Raises `NoShortFolderError` if there is none.
    """
    # Not tempfile's own choice: in an agent that is a folder below a long path.
    wanted = os.environ.get("TMPDIR", "")
    for name in filter(None, (wanted, *_SHORT_FOLDERS)):
        if len(os.fsencode(name)) + room <= _MAX_ADDRESS_BYTES and os.access(name, os.W_OK):
            return Path(name)
    what = (
        f"TMPDIR is {wanted}, of {len(os.fsencode(wanted))} bytes" if wanted else "TMPDIR is empty"
    )
    raise NoShortFolderError(
        "no folder for sockets: the address of a Unix socket has at most "
        f"{_MAX_ADDRESS_BYTES} bytes, {what}, and {', '.join(_SHORT_FOLDERS)} cannot be written: "
        "set TMPDIR to a folder that exists, can be written and has a path of at most "
        f"{_MAX_ADDRESS_BYTES - room} bytes"
    )


@contextlib.contextmanager
def short_address(path: Path) -> Iterator[str]:
    """Yield an address of the socket at `path` that is short enough to bind or connect to, valid
    within the `with` block.
    """
    if len(os.fsencode(path)) <= _MAX_ADDRESS_BYTES:
        yield str(path)
        return
    base = find_short_folder(_LINK_BYTES + len(os.fsencode(path.name)))
    with tempfile.TemporaryDirectory(prefix="kdist-", dir=base) as folder:
        link = Path(folder, "s")
        link.symlink_to(path.parent.absolute())
        yield str(link / path.name)


_shared: list[tuple[int, StepStats]] = []  # process id and its metrics


def shared_stats() -> StepStats:
    """Return the metrics that every `Reporter()` of this process sends, because an agent keeps one
    record per rank.
    """
    if not _shared or _shared[0][0] != os.getpid():
        made = StepStats(
            rank=int(os.environ.get("RANK", "0")),
            generation=int(os.environ.get("KDIST_GENERATION", "0")),
        )
        _shared[:] = [(os.getpid(), made)]
    return _shared[0][1]


class Reporter:
    """Sends a rank's `StepStats` to its agent. Outside of kdist (no $KDIST_METRICS_SOCKET) it does
    nothing.

    In a script:

        with Reporter() as reporter:
            for batch in loader:
                ...
                reporter.step(loss=loss.item(), samples=len(batch))
    """

    _compiled = 0.0  # what the records of this process have counted, whichever reporter sent them

    def __init__(
        self, stats: StepStats | None = None, *, min_interval_seconds: float = MIN_INTERVAL_SECONDS
    ) -> None:
        """Connect on the first send.

        Args:
            stats: The metrics to send; by default those of `shared_stats`.
            min_interval_seconds: Minimum interval between two records.
        """
        self.stats = stats or shared_stats()
        path = os.environ.get("KDIST_METRICS_SOCKET")
        self._path = Path(path) if path else None
        self._owner = os.getpid()
        self._min_interval = min_interval_seconds
        self._created_at = time.perf_counter()
        self._socket: socket.socket | None = None
        self._next_connect = 0.0
        self._next_send = -math.inf
        self._script: _Script | None = None
        self._loss_is_finite = True
        if self._path is not None:
            atexit.register(self.close)

    def send(self) -> None:
        """Send the current metrics, unless the last record was sent within the minimum interval.
        Never blocks and never raises.
        """
        if self._path is None:
            return
        now = time.monotonic()
        if now < self._next_send:
            return
        self._next_send = now + self._min_interval
        self._send_record(now)

    def flush(self) -> None:
        """Send the current metrics regardless of the minimum interval, before something that takes
        long.
        """
        self._next_send = -math.inf
        self.send()

    def close(self) -> None:
        """Send a last record and close the socket. Waits at most `CLOSE_SECONDS` until the socket
        accepts the record.
        """
        # the records of a forked child would make those of its parent stale
        if self._path is None or os.getpid() != self._owner:
            return
        self._next_connect = 0.0
        deadline = time.monotonic() + CLOSE_SECONDS
        while (now := time.monotonic()) < deadline and not self._send_record(now):
            if self._socket is None:
                break
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            poll.poll((deadline - now) * 1000)
        self._disconnect()
        self._path = None
        atexit.unregister(self.close)

    def step(
        self,
        *,
        loss: float | None = None,
        samples: int = 0,
        learning_rate: float | None = None,
        grad_norm: float | None = None,
        step: int | None = None,
        target_steps: int | None = None,
    ) -> None:
        """Report one completed step of a script; its duration is the time since the last call.

        This is also the rank's heartbeat: a script that has reported once is considered hung when
        it stops reporting. Numbers may be tensors, at the cost of a device synchronization.

        Args:
            loss: Training loss. The job shows that of rank 0; all-reduce it first to show the mean
                over all ranks.
            samples: Samples that this rank consumed in the step.
            learning_rate: Learning rate of the step.
            grad_norm: Norm of the gradient.
            step: Number of the step; by default counted from 1, or on from the step that a
                `Checkpointer` has resumed.
            target_steps: Total number of steps.
        """
        if self._path is not None:
            number = step if step is not None else int(self.stats.last_step or 0) + 1
            values = {"loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate}
            self._reach(number, values, samples=samples, target_steps=target_steps)

    def _reach(
        self,
        step: int,
        values: Mapping[str, float | None],
        *,
        count: int = 1,
        samples: int = 0,
        target_steps: int | None = None,
    ) -> None:
        """Report the last `count` steps up to this one, with so many samples each, and what is
        known of the last one.
        """
        if self._script is None:
            self._script = _Script(self._created_at)
        seconds = self._script.take_step_seconds() / count
        for number in range(step - count + 1, step + 1):
            self.stats.add_step(seconds, samples, number)
        self._set(**values)
        if target_steps is not None:
            self.stats.target_steps = target_steps
        self._script.report_progress(self.stats, step)
        self.send()

    def update(
        self,
        *,
        loss: float | None = None,
        learning_rate: float | None = None,
        grad_norm: float | None = None,
    ) -> None:
        """Report values of the last step that became known after it was reported.

        Args:
            loss: Training loss.
            learning_rate: Learning rate of the step.
            grad_norm: Norm of the gradient.
        """
        if self._path is not None:
            self._set(loss=loss, grad_norm=grad_norm, learning_rate=learning_rate)
            self.send()

    def begin(self, phase: Phase) -> None:
        """Report what the script does between two steps, so that it is not considered hung: `SAVE`,
        or `EVALUATE` again after each batch.
        """
        if self._script is not None:
            self._script.beat(phase, int(self.stats.last_step or 0))

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Report an evaluation that has ended. The time since the last step was spent in it.

        Args:
            metrics: The results by name; that of `loss` is shown as the evaluation's loss.
        """
        if self._path is None:
            return
        if self._script is not None:
            self.stats.add_wall(WallCategory.EVALUATION, self._script.take_step_seconds())
        values = {name: float(value) for name, value in metrics.items()}
        self.stats.evaluation_loss = values.get("loss", self.stats.evaluation_loss)
        if self.stats.rank == 0:
            log.event("evaluated", step=int(self.stats.last_step or 0), metrics=values)
        self.flush()

    def _set(
        self,
        *,
        loss: float | None,
        grad_norm: float | None = None,
        learning_rate: float | None = None,
    ) -> None:
        stats = self.stats
        for name, value in (("loss", loss), ("grad_norm", grad_norm)):
            if value is not None:
                setattr(stats, name, float(value))
                if not math.isfinite(value):
                    stats.add_nonfinite("loss" if name == "loss" else "grad")
                if name == "loss":
                    self._warn_nonfinite_loss(float(value))
        if learning_rate is not None:
            stats.learning_rate = float(learning_rate)

    def _warn_nonfinite_loss(self, loss: float) -> None:
        """Warn at once of a NaN or infinite loss, and only once until it is finite again."""
        is_finite = math.isfinite(loss)
        if self._loss_is_finite and not is_finite:
            log.warn(
                "loss-not-finite",
                step=int(self.stats.last_step or 0),
                loss=str(loss),
                message=(
                    "the script trains on; lower the learning rate, clip gradients or look at the "
                    "data of this step"
                ),
            )
        self._loss_is_finite = is_finite

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send_record(self, now: float) -> bool:
        try:
            if self._socket is None and not self._connect(now):
                self.stats.dropped += 1
                return False
            assert self._socket is not None  # noqa: S101  for the type checker: _connect made it
            compiled = compile_seconds()
            self.stats.compile_seconds += compiled - Reporter._compiled
            Reporter._compiled = compiled
            self._socket.send(pack(self.stats))
        except Exception as error:  # noqa: BLE001  a metric that cannot be sent must never end a training
            self.stats.dropped += 1
            if getattr(error, "errno", None) not in _FULL:
                self._disconnect()
            return False
        return True

    def _connect(self, now: float) -> bool:
        if self._path is None or now < self._next_connect:
            return False
        self._next_connect = now + _RECONNECT_SECONDS
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            opened.setblocking(False)
            with short_address(self._path) as address:
                opened.connect(address)
        except OSError:
            opened.close()
            return False
        self._socket = opened
        return True

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class _Script:
    """The heartbeat of a script, and the progress events of its rank 0."""

    def __init__(self, started: float) -> None:
        self._last = started
        self._logged_at = -math.inf
        self._logged_samples = 0.0
        self._heartbeat = Heartbeat.of_process()

    def take_step_seconds(self) -> float:
        """Seconds since the last call."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds

    def beat(self, phase: Phase, step: int) -> None:
        if self._heartbeat is not None:
            self._heartbeat.beat(phase, step)

    def report_progress(self, stats: StepStats, step: int) -> None:
        """Write the heartbeat, and log the progress of rank 0 about once a second."""
        self.beat(Phase.STEP, step)
        seconds = self._last - self._logged_at
        if stats.rank != 0 or seconds < PROGRESS_SECONDS:
            return
        rate = None
        if math.isinf(seconds):
            log.event("first-step", step=step)
        else:
            own = (stats.samples - self._logged_samples) / seconds
            rate = own * int(os.environ.get("WORLD_SIZE", "1"))
        self._logged_at = self._last
        self._logged_samples = stats.samples
        progress = {
            "target": stats.target_steps,
            "loss": stats.loss,
            "learning_rate": stats.learning_rate,
        }
        log.event("progress", step=step, **progress, samples_per_second=rate)


_BATCH = 64
_MAX_BATCHES = 16


class Receiver:
    """A datagram socket and the thread that reads it."""

    def __init__(
        self, path: Path, *, on_datagram: Callable[[bytes], None], lock: threading.Lock
    ) -> None:
        """Bind the socket, with mode 0600, and start the thread. A socket that a dead agent left
        there is replaced. `on_datagram` is called with each datagram, one at a time, while the lock
        is held. Raises `OSError`.
        """
        self._path = path
        self._on_datagram = on_datagram
        self._lock = lock
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setblocking(False)
            path.unlink(missing_ok=True)
            with short_address(path) as address:
                self._socket.bind(address)
            path.chmod(0o600)
        except OSError:
            self._socket.close()
            raise
        self._wake, self._woken = socket.socketpair()
        self._thread = start_thread(
            self._run, name="kdist-metrics-receiver", on_error=OnError.RESTART
        )

    def drain(self) -> None:
        """Process the datagrams that have arrived, a bounded number. The caller holds the lock."""
        for _ in range(_MAX_BATCHES):
            if not self._read_batch():
                return

    def close(self) -> None:
        """Process what has arrived, stop the thread and remove the socket."""
        self._wake.send(b".")
        self._thread.join()
        with self._lock:
            self.drain()
        for end in (self._socket, self._wake, self._woken):
            end.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while self._woken.fileno() not in {descriptor for descriptor, _ in poll.poll()}:
            with self._lock:
                self._read_batch()

    def _read_batch(self) -> bool:
        """Process a bounded number of datagrams. Returns whether there may be more."""
        for _ in range(_BATCH):
            try:
                datagram = self._socket.recv(MAX_RECORD + 1)
            except OSError:  # no more; any other error shows as missing records
                return False
            self._on_datagram(datagram)
        return True
