"""What the ranks of an unchanged script exchange: every collective of the process counted and
timed, with no steps to count by.

The agent also sees which one a rank waits in: that is all it can know of a script that reports
nothing.

Two clocks, as in the managed loop. What gloo does ends with a future, on a thread of gloo's, or
when the rank has waited for it. What is enqueued on a CUDA device lies between two events, which
are read at a later collective: nothing here synchronises. Collectives inside of a CUDA graph are
not seen when the graph is replayed, so they are not counted.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Work

from kdist_trainer import log
from kdist_trainer.instrumentation import collective_hooks, flight_recorder
from kdist_trainer.instrumentation.collective_hooks import Follow
from kdist_trainer.instrumentation.collective_timer import KINDS, payload, storage, when_done
from kdist_trainer.instrumentation.flight_recorder import FlightRecorder
from kdist_trainer.liveness import Heartbeat
from kdist_trainer.metrics import reporter
from kdist_trainer.metrics.reporter import Reporter
from kdist_trainer.metrics.step_stats import Op, StepStats

SEND_SECONDS = 1.0
_MOST_UNFINISHED = 64
# enqueued collectives after which the first are asked whether the device has passed them
_READ_AT = 8

_installed: list[ScriptCollectiveTimer] = []


def install() -> None:
    """Time the collectives of this process from now on, for its life, and send the sums to the
    agent.
    """
    stats = reporter.share()
    _installed.append(ScriptCollectiveTimer(stats))
    if "KDIST_SCRATCH" in os.environ:
        path = Path(
            os.environ["KDIST_SCRATCH"], f"rank-{os.environ.get('LOCAL_RANK', '0')}.heartbeat"
        )
        # without a beat, by which a watchdog would go
        flight_recorder.install(Heartbeat.attach(path), ScriptRecorder)
        # what a child exchanges is not this rank's
        os.register_at_fork(after_in_child=flight_recorder.remove)


class ScriptRecorder(FlightRecorder):
    """Notes collectives only until they have ended: a script may compute for long before it waits
    for one, or never does so.
    """

    def begin(self, op: str, tensors: Sequence[Tensor], group: ProcessGroup) -> Follow | None:
        """A collective begins; on threads beside the training it is not what the rank waits for."""
        super().begin(op, tensors, group)
        if not self._is_current():
            return None
        number = self._heartbeat.entered

        def follow(work: Work) -> None:
            if (tensors and tensors[0].is_cuda) or not when_done(
                work, lambda _: self._heartbeat.leave(number)
            ):
                # whose end nobody tells: it counts while somebody waits for it
                self._heartbeat.leave(number)

        return follow


@dataclass(slots=True, eq=False)
class _Flight:
    """A collective of the host's that is under way; `results` is the memory that it fills."""

    kind: Op
    nbytes: int
    results: frozenset[int]
    begun: float
    work: Work | None = None
    ended: bool = False


class ScriptCollectiveTimer:
    """Adds the collectives of the threads that train to `stats`. An error in here ends the
    measuring and nothing else.
    """

    def __init__(self, stats: StepStats) -> None:
        self._stats = stats
        self._lock = threading.Lock()
        self._running = [0 for _ in Op]
        self._since = [0.0 for _ in Op]
        self._unfinished: deque[_Flight] = deque()
        self._device = _Device(stats)
        self._main = threading.main_thread().ident
        self._sender: threading.Thread | None = None
        collective_hooks.listen(self)
        collective_hooks.surround(self)

    def begin(self, op: str, tensors: Sequence[Tensor], group: ProcessGroup) -> Follow | None:
        """A collective is about to be launched; those of threads beside the training are not
        counted.
        """
        kind = KINDS.get(op)
        if kind is None or not self._is_training():
            return None
        try:
            return self._begin(kind, tensors, group)
        except Exception as error:  # noqa: BLE001 - a number that cannot be had must never end a training
            self._give_up(error)
            return None

    def wait(self, wait: collective_hooks.Wait, awaited: Work | Tensor) -> Any:
        """What `wait` returns; what it waited for has ended."""
        result = wait()
        if self._unfinished:
            try:
                self._waited(awaited)
            except Exception as error:  # noqa: BLE001 - as above
                self._give_up(error)
        return result

    def close(self) -> None:
        """Listen no more."""
        collective_hooks.ignore(self)
        collective_hooks.leave(self)

    def _is_training(self) -> bool:
        """Whether this is the main thread or one of autograd's, which are C++'s."""
        return threading.get_ident() == self._main or isinstance(
            threading.current_thread(), threading._DummyThread
        )

    def _begin(self, kind: Op, tensors: Sequence[Tensor], group: ProcessGroup) -> Follow | None:
        if group.size() == 1 or not tensors:
            return None
        if self._sender is None:
            self._sender = threading.Thread(
                target=_send_on, args=(self._stats,), daemon=True, name="kdist metrics"
            )
            self._sender.start()
        nbytes = payload(kind, tensors, group)
        if tensors[0].is_cuda:
            return self._device.begin(kind, nbytes, tensors[0].device)
        flight = _Flight(kind, nbytes, frozenset(map(storage, tensors)), perf_counter())
        with self._lock:
            if self._running[kind] == 0:
                self._since[kind] = flight.begun
            self._running[kind] += 1
        return lambda work: self._follow(flight, work)

    def _follow(self, flight: _Flight, work: Work) -> None:
        try:
            if when_done(work, lambda _: self._end(flight)):
                return
            flight.work = work
            self._unfinished.append(flight)
            # nobody has waited for it in a way that is seen here
            if len(self._unfinished) > _MOST_UNFINISHED:
                self._end(self._unfinished.popleft())
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)

    def _waited(self, awaited: Work | Tensor) -> None:
        filled = storage(awaited) if isinstance(awaited, Tensor) else None
        for flight in list(self._unfinished):
            if flight.work is awaited or filled in flight.results:
                self._unfinished.remove(flight)
                self._end(flight)

    def _end(self, flight: _Flight) -> None:
        now = perf_counter()
        flight.work = None  # which holds what it was about
        kind = flight.kind
        with self._lock:
            self._running[kind] -= 1
            busy = now - self._since[kind] if self._running[kind] == 0 else 0.0
            self._stats.add_collectives(kind, busy=busy, nbytes=flight.nbytes, count=1)
            if kind is Op.ALL_REDUCE:
                self._stats.observe_all_reduce(now - flight.begun)

    def _give_up(self, error: Exception) -> None:
        self.close()
        log.warn(
            "timing-ended",
            message=f"collectives are timed no more: {type(error).__name__}: {error}",
        )


@dataclass(slots=True)
class _Enqueued:
    """A collective on a device, between two events; the second is there once its end is
    enqueued.
    """

    kind: Op
    nbytes: int
    begin: torch.cuda.Event
    end: torch.cuda.Event
    closed: bool = False


class _Device:
    """The collectives of one CUDA device; those of a second one in the same process are not
    counted.
    """

    def __init__(self, stats: StepStats) -> None:
        self._stats = stats
        self._device: torch.device | None = None
        self._pool: list[torch.cuda.Event] = []
        self._open: deque[_Enqueued] = deque()
        self._reached: list[torch.cuda.Event | None] = [None for _ in Op]

    def begin(self, kind: Op, nbytes: int, device: torch.device) -> Follow | None:
        """One is about to be enqueued on the present stream."""
        if torch.cuda.is_current_stream_capturing() or device != (self._device or device):
            return None
        self._device = device
        if len(self._open) >= _READ_AT:
            self._read()
        one = _Enqueued(kind, nbytes, self._event(), self._event())
        one.begin.record(torch.cuda.current_stream(device))

        def ended(_: object) -> None:
            one.end.record(torch.cuda.current_stream(device))
            one.closed = True

        def follow(work: Work) -> None:
            if when_done(work, ended):
                self._open.append(one)

        return follow

    def _read(self) -> None:
        """Add those that the device has passed, in their order, up to the first that it has not."""
        while self._open and self._open[0].closed and self._open[0].end.query():  # type: ignore[no-untyped-call]
            one = self._open.popleft()
            seconds = one.begin.elapsed_time(one.end) / 1e3
            before = self._reached[one.kind]
            # Time since an earlier one of its kind had ended: less than its own where the two
            # overlapped.
            fresh = seconds if before is None else before.elapsed_time(one.end) / 1e3
            self._stats.add_collectives(
                one.kind, busy=max(0.0, min(seconds, fresh)), nbytes=one.nbytes, count=1
            )
            if one.kind is Op.ALL_REDUCE:
                self._stats.observe_all_reduce(seconds)
            if before is None or fresh > 0:
                self._reached[one.kind] = one.end
                self._pool += [one.begin] if before is None else [one.begin, before]
            else:
                self._pool += [one.begin, one.end]

    def _event(self) -> torch.cuda.Event:
        return self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _send_on(stats: StepStats) -> NoReturn:
    """Send the sums about once a second for as long as this process lives; its end sends the last
    ones.
    """
    sender, pause = Reporter(stats, min_interval_seconds=0.0), threading.Event()
    while True:
        sender.send()
        pause.wait(SEND_SECONDS)
