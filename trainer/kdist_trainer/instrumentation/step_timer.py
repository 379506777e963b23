"""Where a step's time goes: its phases by the clock, and its all-reduces from launch to end.

DDP averages as it does by itself, so the weights stay the same to the bit: a timer listens to what
passes torch's dispatcher and reads the clock twice per bucket. Latencies of buckets overlap: their
sum lies, so what is kept is the time with at least one all-reduce in flight (busy) and the tail
from the last one's launch to its end, which no computation hides (exposed).
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
from kdist_trainer.instrumentation.collective_hooks import Follow
from kdist_trainer.liveness import Heartbeat
from kdist_trainer.metrics.step_stats import StepPhase, StepStats


class StepTimer:
    """A stopwatch that hands every moment to one phase of the step, so that the phases sum to the
    time it ran.
    """

    def __init__(self, stats: StepStats) -> None:
        self._phase = stats.phase
        self._last = self._begun = perf_counter()

    def lap(self, phase: StepPhase) -> None:
        """The time since the last lap went to `phase`."""
        now = perf_counter()
        self._phase[phase] += now - self._last
        self._last = now

    def take(self, phase: StepPhase, seconds: float) -> None:
        """So much of the time since the last lap went to `phase`, whatever the next lap says."""
        self._phase[phase] += seconds
        self._last += seconds

    def end(self) -> float:
        """The last lap ended a step: its seconds, all laps since the step before together."""
        seconds, self._begun = self._last - self._begun, self._last
        return seconds

    def skip(self) -> float:
        """The time since the last lap belongs to no step (a save, an evaluation); it is returned,
        in seconds.
        """
        now = perf_counter()
        seconds = now - self._last
        self._last, self._begun = now, self._begun + seconds
        return seconds


class Timer(Protocol):
    """What the loop asks of a timer of collectives."""

    def start(self) -> None:
        """A step's passes begin: count the collectives that are launched from now on."""
        ...

    def settle(self) -> None:
        """The step's last backward pass has returned: add its collectives to the sums."""
        ...

    def close(self) -> None:
        """Listen no more."""
        ...


@dataclass(slots=True)
class _Passes:
    """The all-reduces of one step: [launched, ended] in seconds, 0 where it has not said so, and
    how many are under way.
    """

    spans: list[list[float]] = field(default_factory=list)
    running: int = 0
    nbytes: int = 0


class GlooAllReduceTimer:
    """Times all-reduces that end when their futures do: gloo's. Callbacks run on its threads."""

    def __init__(self, stats: StepStats, heartbeat: Heartbeat | None = None) -> None:
        self._stats = stats
        self._heartbeat = heartbeat
        self._lock = threading.Lock()
        self._passes: _Passes | None = None
        # Who listens last is told first: a span is open before the heartbeat enters, so that the
        # end of another all-reduce, on its own thread, does not take the rank for one that has
        # left.
        collective_hooks.listen(self)

    def begin(self, op: str, tensors: Sequence[Tensor], group: ProcessGroup) -> Follow | None:  # noqa: ARG002
        """An all-reduce is about to be launched: its span is open until its future ends."""
        passes = self._passes
        if passes is None or op != "all_reduce":
            return None
        span = [perf_counter(), 0.0]
        with self._lock:
            passes.spans.append(span)
            passes.running += 1
        for tensor in tensors:
            passes.nbytes += tensor.nbytes

        def ended(_: object) -> None:
            with self._lock:
                span[1] = perf_counter()
                passes.running -= 1
                if passes.running == 0 and passes is self._passes and self._heartbeat is not None:
                    self._heartbeat.leave()

        return lambda work: work.get_future().then(ended)

    def start(self) -> None:
        """Begin with no spans."""
        self._passes = _Passes()

    def settle(self) -> None:
        """Every all-reduce has ended, or backward would not have returned; the callback of the last
        may still be on its way.
        """
        now = perf_counter()
        with self._lock:
            passes, self._passes = self._passes, None
            if passes is None or not passes.spans:
                return
            if self._heartbeat is not None:
                self._heartbeat.leave()
        add_spans(
            self._stats, [(begun, ended or now) for begun, ended in passes.spans], passes.nbytes
        )

    def close(self) -> None:
        """Listen no more."""
        collective_hooks.ignore(self)


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
        self._settled: list[tuple[list[tuple[torch.cuda.Event, torch.cuda.Event]], int]] = []
        self._bytes = 0
        collective_hooks.listen(self)

    def begin(self, op: str, tensors: Sequence[Tensor], group: ProcessGroup) -> Follow | None:  # noqa: ARG002
        """An all-reduce is about to be launched between two events: a callback runs on a stream
        that waits for its end.
        """
        if self._open is None or op != "all_reduce":
            return None
        begin, end = self._event(), self._event()
        begin.record()
        self._open.append((begin, end))
        self._bytes += sum(tensor.nbytes for tensor in tensors)
        return lambda work: work.get_future().then(lambda _: end.record())

    def start(self) -> None:
        """Begin with no events."""
        self._open, self._bytes = [], 0

    def settle(self) -> None:
        """Put the step's events aside, and count those of an earlier step if the device has passed
        them.
        """
        if self._open:
            self._settled.append((self._open, self._bytes))
        self._open = None
        while len(self._settled) > self._READ_AFTER_STEPS and self._settled[0][0][-1][1].query():  # type: ignore[no-untyped-call]
            events, nbytes = self._settled.pop(0)
            origin = events[0][0]
            spans = [
                (origin.elapsed_time(begin) / 1e3, origin.elapsed_time(end) / 1e3)
                for begin, end in events
            ]
            add_spans(self._stats, spans, nbytes)
            self._pool.extend(event for pair in events for event in pair)
            if self._heartbeat is not None:
                self._heartbeat.leave()

    def close(self) -> None:
        """Listen no more."""
        collective_hooks.ignore(self)

    def _event(self) -> torch.cuda.Event:
        return self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class NullTimer:
    """Nobody listens."""

    def start(self) -> None:
        """Nothing will be measured."""

    def settle(self) -> None:
        """Nothing was measured."""

    def close(self) -> None:
        """Nobody listened."""


def add_spans(stats: StepStats, spans: Sequence[tuple[float, float]], nbytes: int) -> None:
    """Count one step's all-reduces, given when each was launched and when it ended, in seconds of
    one clock.
    """
    if not spans:
        return
    busy, reached = 0.0, 0.0
    ordered = sorted(spans)
    for begun, ended in ordered:
        busy += max(0.0, ended - max(begun, reached))
        reached = max(reached, ended)
    exposed = reached - ordered[-1][0]
    # it was waiting, inside of what the laps saw as backward
    stats.phase[StepPhase.BACKWARD] -= exposed
    stats.add_all_reduces(
        busy=busy,
        exposed=exposed,
        nbytes=nbytes,
        durations=[ended - begun for begun, ended in spans],
    )


class BandwidthProbe:
    """Measures now and then what the network between the ranks can do, all of them together and
    nothing else going on.

    A training's own all-reduces wait for the slowest rank, so they tell a bound; here every rank
    waits before the clock starts.
    """

    EVERY_SECONDS = 600.0
    _ROUNDS = 3

    def __init__(
        self, stats: StepStats, group: ProcessGroup, device: torch.device, *, enabled: bool = True
    ) -> None:
        self._stats = stats
        self._group = group
        self._device = device
        self._enabled = enabled and group.size() > 1
        self._seconds = 0.0

    def is_due(self, seconds: float) -> bool:
        """Whether it is time again, after so many more seconds of steps: the same answer on ranks
        that are told the same.
        """
        self._seconds += seconds
        return self._enabled and self._seconds >= self.EVERY_SECONDS

    def measure(self) -> None:
        """Put the bus bandwidth into the rank's sums: nccl-tests' S/t * 2(n-1)/n, bytes per second.
        Collective.
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
        self._group.allreduce([payload[:1]]).wait()  # a barrier, by the way that is measured
        self._finish()
        begun = perf_counter()
        self._group.allreduce([payload]).wait()
        self._finish()
        return perf_counter() - begun

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
