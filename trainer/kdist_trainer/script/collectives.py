"""Counts and times the collectives of an unchanged script, which has no steps to count by.

The agent also learns which collective a rank waits in: nothing else is known of a script that
reports nothing.

There are two clocks, as in the managed loop. A collective of gloo's ends with a future, on a thread
of gloo's, or when the rank has waited for it. One that is enqueued on a CUDA device lies between
two events, which are read at a later collective, so nothing here synchronizes. Collectives within a
CUDA graph are invisible when the graph is replayed, so they are not counted.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from kdist_trainer import log
from kdist_trainer.instrumentation import collective_hooks
from kdist_trainer.instrumentation.collective_hooks import (
    FlightRecorder,
    PostHook,
    is_training_thread,
    on_completion,
)
from kdist_trainer.instrumentation.step_timer import KINDS, payload
from kdist_trainer.instrumentation.torch_internals import storage_id
from kdist_trainer.metrics import transport
from kdist_trainer.metrics.rank_metrics import Op, StepStats
from kdist_trainer.metrics.transport import Reporter
from kdist_trainer.processes.liveness import Heartbeat, heartbeat_path, own_place
from kdist_trainer.processes.threads import OnError, start_thread

SEND_SECONDS = 1.0
_MAX_UNFINISHED = 64
_READ_AT = 8
"""Enqueued collectives from which on the oldest ones are checked for completion."""

_installed: list[ScriptCollectiveTimer] = []


def install() -> None:
    """Time this process's collectives for the rest of its life, and send the sums to the agent."""
    stats = transport.shared_stats()
    _installed.append(ScriptCollectiveTimer(stats))
    if (place := own_place()) is not None:
        # attached without a beat, which would start the watchdog
        heartbeat = Heartbeat.attach(heartbeat_path(*place))
        collective_hooks.install_recorder(heartbeat, ScriptRecorder)
        # a child's collectives are not this rank's
        os.register_at_fork(after_in_child=collective_hooks.remove_recorder)


class ScriptRecorder(FlightRecorder):
    """Records a collective only until it has ended: a script may compute for long before it waits
    for it, or never wait.
    """

    def begin(self, op: str, tensors: Sequence[Tensor], group: ProcessGroup) -> PostHook | None:
        """Record a collective; only those of the training's threads can be what the rank waits
        for.
        """
        super().begin(op, tensors, group)
        if not is_training_thread(self._main):
            return None
        number = self._heartbeat.entered

        def post_hook(work: Work | None) -> None:
            if (tensors and tensors[0].is_cuda) or not on_completion(
                work, lambda _: self._heartbeat.leave(number)
            ):
                # its end is not reported: record it only while something waits for it
                self._heartbeat.leave(number)

        return post_hook


@dataclass(slots=True, eq=False)
class _Pending:
    """A collective of gloo's in flight."""

    kind: Op
    nbytes: int
    results: frozenset[int]
    """Ids of the storages that it fills."""
    started: float
    work: Work | None = None
    ended: bool = False


class ScriptCollectiveTimer:
    """Adds the collectives of the threads that train to `stats`. An error ends only the timing."""

    def __init__(self, stats: StepStats) -> None:
        self._stats = stats
        self._lock = threading.Lock()
        self._running = [0 for _ in Op]
        self._since = [0.0 for _ in Op]
        self._unfinished: deque[_Pending] = deque()
        self._device = _Device(stats)
        self._main = threading.main_thread().ident
        self._sender: threading.Thread | None = None
        collective_hooks.register_launch_hook(self)
        collective_hooks.register_wait_hook(self)

    def begin(self, op: str, tensors: Sequence[Tensor], group: ProcessGroup) -> PostHook | None:
        """Count a collective that a thread of the training is about to launch."""
        kind = KINDS.get(op)
        if kind is None or not is_training_thread(self._main):
            return None
        try:
            return self._begin(kind, tensors, group)
        except Exception as error:  # noqa: BLE001 - a failed measurement must never end a training
            self._stop_timing(error)
            return None

    def wait(self, wait: collective_hooks.Wait, awaited: Work | Tensor) -> Any:
        """Return what `wait` returns; the collective that it waited for has ended."""
        result = wait()
        if self._unfinished:
            try:
                self._end_awaited(awaited)
            except Exception as error:  # noqa: BLE001 - as above
                self._stop_timing(error)
        return result

    def close(self) -> None:
        collective_hooks.unregister_launch_hook(self)
        collective_hooks.unregister_wait_hook(self)

    def _begin(self, kind: Op, tensors: Sequence[Tensor], group: ProcessGroup) -> PostHook | None:
        if group.size() == 1 or not tensors:
            return None
        if self._sender is None:
            self._sender = start_thread(
                partial(_send_forever, self._stats), name="kdist metrics", on_error=OnError.RESTART
            )
        nbytes = payload(kind, tensors, group)
        if tensors[0].is_cuda:
            return self._device.begin(kind, nbytes, tensors[0].device)
        pending = _Pending(kind, nbytes, frozenset(map(storage_id, tensors)), perf_counter())
        with self._lock:
            if self._running[kind] == 0:
                self._since[kind] = pending.started
            self._running[kind] += 1
        return lambda work: self._end_later(pending, work)

    def _end_later(self, pending: _Pending, work: Work | None) -> None:
        try:
            if on_completion(work, lambda _: self._end(pending)):
                return
            pending.work = work
            self._unfinished.append(pending)
            # its wait was not seen
            if len(self._unfinished) > _MAX_UNFINISHED:
                self._end(self._unfinished.popleft())
        except Exception as error:  # noqa: BLE001 - as above
            self._stop_timing(error)

    def _end_awaited(self, awaited: Work | Tensor) -> None:
        filled = storage_id(awaited) if isinstance(awaited, Tensor) else None
        for pending in list(self._unfinished):
            if pending.work is awaited or filled in pending.results:
                self._unfinished.remove(pending)
                self._end(pending)

    def _end(self, pending: _Pending) -> None:
        now = perf_counter()
        pending.work = None  # it holds the tensors
        kind = pending.kind
        with self._lock:
            self._running[kind] -= 1
            busy = now - self._since[kind] if self._running[kind] == 0 else 0.0
            self._stats.add_collectives(kind, busy=busy, nbytes=pending.nbytes, count=1)
            if kind is Op.ALL_REDUCE:
                self._stats.observe_all_reduce(now - pending.started)

    def _stop_timing(self, error: Exception) -> None:
        self.close()
        log.warn(
            "timing-ended",
            message=f"collectives are no longer timed: {type(error).__name__}: {error}",
        )


@dataclass(slots=True)
class _Enqueued:
    """A collective on a device, between two events."""

    kind: Op
    nbytes: int
    begin: torch.cuda.Event
    end: torch.cuda.Event
    closed: bool = False
    """Whether the second event was recorded."""


class _Device:
    """Times the collectives of one CUDA device, the first that the process uses."""

    def __init__(self, stats: StepStats) -> None:
        self._stats = stats
        self._device: torch.device | None = None
        self._pool: list[torch.cuda.Event] = []
        self._open: deque[_Enqueued] = deque()
        self._reached: list[torch.cuda.Event | None] = [None for _ in Op]

    def begin(self, kind: Op, nbytes: int, device: torch.device) -> PostHook | None:
        """Count a collective that is about to be enqueued on the current stream."""
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

        def post_hook(work: Work | None) -> None:
            if on_completion(work, ended):
                self._open.append(one)

        return post_hook

    def _read(self) -> None:
        """Add the collectives that the device has passed, in order, up to the first that it has
        not.
        """
        while self._open and self._open[0].closed and self._open[0].end.query():  # type: ignore[no-untyped-call]
            one = self._open.popleft()
            seconds = one.begin.elapsed_time(one.end) / 1e3
            before = self._reached[one.kind]
            # Seconds since the previous one of its kind ended: less than its own where both
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


def _send_forever(stats: StepStats) -> NoReturn:
    """Send the sums every `SEND_SECONDS`; the exit of the process sends the last ones."""
    reporter, pause = Reporter(stats, min_interval_seconds=0.0), threading.Event()
    while True:
        reporter.send()
        pause.wait(SEND_SECONDS)
