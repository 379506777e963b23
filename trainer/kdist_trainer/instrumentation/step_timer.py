"""Where a step's time goes: its phases by the clock, and its all-reduces from launch to end.

DDP averages as it does by itself, so the weights stay bitwise identical: a timer hooks the
collectives in torch's dispatcher and reads the clock twice per bucket. Buckets overlap, so the sum
of their latencies would mislead. What counts is the time with at least one all-reduce in flight
(busy), and the tail from the launch of the last one to its end, which no computation hides
(exposed).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from kdist_trainer.instrumentation import collective_hooks
from kdist_trainer.instrumentation.collective_hooks import PostHook, on_completion
from kdist_trainer.instrumentation.intervals import union_length
from kdist_trainer.instrumentation.torch_internals import count_bytes
from kdist_trainer.liveness import Heartbeat
from kdist_trainer.metrics.step_stats import StepPhase, StepStats


class StepTimer:
    """A stopwatch that attributes every moment to one phase of the step, so that the phases sum to
    the time it ran.
    """

    def __init__(self, stats: StepStats) -> None:
        self._phase = stats.phase
        now = perf_counter()
        self._last = now
        self._begun = now

    def record_phase(self, phase: StepPhase) -> None:
        """Attribute the time since the previous record to `phase`."""
        now = perf_counter()
        self._phase[phase] += now - self._last
        self._last = now

    def attribute(self, phase: StepPhase, seconds: float) -> None:
        """Attribute `seconds` of the time since the previous record to `phase`; the next record
        gets the rest.
        """
        self._phase[phase] += seconds
        self._last += seconds

    def finish_step(self) -> float:
        """End a step at its last record; returns its seconds, all phases together."""
        seconds = self._last - self._begun
        self._begun = self._last
        return seconds

    def exclude(self) -> float:
        """Leave the time since the previous record, such as a save or an evaluation, out of the
        step; returns it in seconds.
        """
        now = perf_counter()
        seconds = now - self._last
        self._last = now
        self._begun += seconds
        return seconds


class CollectiveTimer(Protocol):
    """A timer of the collectives of each step, called by the training loop."""

    def start(self) -> None:
        """Start a step: count the collectives that are launched from now on."""
        ...

    def finish_step(self) -> None:
        """Add the step's collectives to the sums; its last backward pass has returned."""
        ...

    def close(self) -> None:
        """Stop measuring."""
        ...


@dataclass(slots=True)
class _AllReduces:
    """The all-reduces of one step."""

    spans: list[list[float]] = field(default_factory=list)
    """Launch and end of each, in seconds of one clock; the end is 0 until it is known."""
    running: int = 0
    nbytes: int = 0


class GlooAllReduceTimer:
    """Times gloo's all-reduces, which end when their futures do, on gloo's threads."""

    def __init__(self, stats: StepStats, heartbeat: Heartbeat | None = None) -> None:
        self._stats = stats
        self._heartbeat = heartbeat
        self._lock = threading.Lock()
        self._step: _AllReduces | None = None
        # The hook registered last is called first: a span is open before the heartbeat enters, so
        # that the end of another all-reduce, on its own thread, does not mark the rank as having
        # left.
        collective_hooks.register_launch_hook(self)

    def begin(self, op: str, tensors: Sequence[Tensor], group: ProcessGroup) -> PostHook | None:  # noqa: ARG002
        """Open a span, which ends with the future of the all-reduce."""
        step = self._step
        if step is None or op != "all_reduce":
            return None
        span = [perf_counter(), 0.0]
        with self._lock:
            step.spans.append(span)
            step.running += 1
        step.nbytes += count_bytes(tensors)

        def ended(_: object) -> None:
            with self._lock:
                span[1] = perf_counter()
                step.running -= 1
                if step.running == 0 and step is self._step and self._heartbeat is not None:
                    self._heartbeat.leave()

        return lambda work: on_completion(work, ended)

    def start(self) -> None:
        """Start a step without spans."""
        self._step = _AllReduces()

    def finish_step(self) -> None:
        """Add the step's sums. Every all-reduce has ended, or backward would not have returned; the
        callback of the last one may still be running.
        """
        now = perf_counter()
        with self._lock:
            step = self._step
            self._step = None
            if step is None or not step.spans:
                return
            if self._heartbeat is not None:
                self._heartbeat.leave()
        spans = [(started, ended or now) for started, ended in step.spans]
        add_all_reduces(self._stats, spans, step.nbytes)

    def close(self) -> None:
        """Stop measuring."""
        collective_hooks.unregister_launch_hook(self)


class CudaAllReduceTimer:
    """Times all-reduces on a CUDA device by events that are read steps later: NCCL's futures end
    when they are enqueued.
    """

    _READ_AFTER_STEPS = 2

    def __init__(self, stats: StepStats, heartbeat: Heartbeat | None = None) -> None:
        self._stats = stats
        self._heartbeat = heartbeat
        self._pool: list[torch.cuda.Event] = []
        self._open: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None
        self._finished: list[tuple[list[tuple[torch.cuda.Event, torch.cuda.Event]], int]] = []
        self._bytes = 0
        collective_hooks.register_launch_hook(self)

    def begin(self, op: str, tensors: Sequence[Tensor], group: ProcessGroup) -> PostHook | None:  # noqa: ARG002
        """Put the all-reduce between two events: a callback runs on a stream that waits for its
        end.
        """
        if self._open is None or op != "all_reduce":
            return None
        begin, end = self._event(), self._event()
        begin.record()
        self._open.append((begin, end))
        self._bytes += count_bytes(tensors)
        return lambda work: on_completion(work, lambda _: end.record())

    def start(self) -> None:
        """Start a step without events."""
        self._open = []
        self._bytes = 0

    def finish_step(self) -> None:
        """Queue the step's events, and add those of an earlier step if the device has passed
        them.
        """
        if self._open:
            self._finished.append((self._open, self._bytes))
        self._open = None
        while len(self._finished) > self._READ_AFTER_STEPS and self._finished[0][0][-1][1].query():  # type: ignore[no-untyped-call]
            events, nbytes = self._finished.pop(0)
            origin = events[0][0]
            spans = [
                (origin.elapsed_time(begin) / 1e3, origin.elapsed_time(end) / 1e3)
                for begin, end in events
            ]
            add_all_reduces(self._stats, spans, nbytes)
            self._pool.extend(event for pair in events for event in pair)
            if self._heartbeat is not None:
                self._heartbeat.leave()

    def close(self) -> None:
        """Stop measuring."""
        collective_hooks.unregister_launch_hook(self)

    def _event(self) -> torch.cuda.Event:
        return self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class NullTimer:
    """A timer that measures nothing."""

    def start(self) -> None:
        """Do nothing."""

    def finish_step(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def add_all_reduces(stats: StepStats, spans: Sequence[tuple[float, float]], nbytes: int) -> None:
    """Add one step's all-reduces to the rank's sums.

    Args:
        stats: the sums.
        spans: when each was launched and when it ended, in seconds of one clock.
        nbytes: bytes of all of them together.
    """
    if not spans:
        return
    exposed = max(ended for _, ended in spans) - max(spans)[0]
    # the rank waited within what the step timer recorded as backward
    stats.phase[StepPhase.BACKWARD] -= exposed
    stats.add_all_reduces(
        busy=union_length(spans),
        exposed=exposed,
        nbytes=nbytes,
        durations=[ended - started for started, ended in spans],
    )


class BandwidthProbe:
    """Measures from time to time the network between the ranks, all of them together, while nothing
    else runs.

    A training's own all-reduces wait for the slowest rank, so they give a lower bound; here every
    rank waits before the clock starts.
    """

    EVERY_SECONDS = 600.0
    POSTPONED_SECONDS = 10.0
    _ROUNDS = 3

    def __init__(
        self, stats: StepStats, group: ProcessGroup, device: torch.device, *, enabled: bool = True
    ) -> None:
        """Probe `group` on `device`, unless it is not `enabled` or a rank is alone.

        Args:
            stats: gets the bandwidth.
            group: the ranks that are measured.
            device: where the measured tensors are.
            enabled: False to never measure.
        """
        self._stats = stats
        self._group = group
        self._device = device
        self._enabled = enabled and group.size() > 1
        self._seconds = 0.0

    def is_due(self, seconds: float) -> bool:
        """Whether to measure now, `seconds` of steps after the previous call.

        The answer is the same on all ranks if `seconds` is.
        """
        self._seconds += seconds
        return self._enabled and self._seconds >= self.EVERY_SECONDS

    def postpone(self) -> None:
        """Measure after some seconds of steps, for a group that others would wait for now. The same
        call on all ranks.
        """
        self._seconds = self.EVERY_SECONDS - self.POSTPONED_SECONDS

    def measure(self) -> None:
        """Measure the bus bandwidth, in bytes per second: S/t * 2(n-1)/n, as in nccl-tests
        (doc/PERFORMANCE.md). Collective.
        """
        self._seconds = 0.0
        if not self._enabled:
            return
        size = self._group.size()
        mebibytes = 64 if self._device.type == "cuda" else 4
        payload = torch.zeros(mebibytes * 2**18, dtype=torch.float32, device=self._device)
        seconds = min(self._time(payload) for _ in range(self._ROUNDS))
        self._stats.probe_bandwidth = payload.nbytes / seconds * 2 * (size - 1) / size

    def _time(self, payload: Tensor) -> float:
        self._group.allreduce([payload[:1]]).wait()  # a barrier over the measured transport
        self._finish()
        started = perf_counter()
        self._group.allreduce([payload]).wait()
        self._finish()
        return perf_counter() - started

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
