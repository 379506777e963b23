"""Where a step's time goes: its phases by the clock, and its collectives from launch to end.

With `ddp` only all-reduces are timed. DDP averages as it does by itself, so the weights stay
bitwise identical: a timer hooks the collectives in torch's dispatcher and reads the clock twice per
bucket. Buckets overlap, so the sum of their latencies would mislead. What counts is the time with
at least one all-reduce in flight (busy), and the tail from the launch of the last one to its end,
which no computation hides (exposed).

For every other strategy, collectives are counted and timed by their kind. `fsdp`, `hsdp` and
`tensor` gather, reduce and scatter in forward and backward passes; `pipeline` reduces over its
copies. On a CPU the rank itself waits for each collective: that time is taken out of the phase that
it fell in. On a GPU a stream waits, next to others that compute. How much of that no computation
hides is not known here, so it stays in its phase.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from kdist_trainer.instrumentation import collective_hooks, device_memory
from kdist_trainer.instrumentation.collective_hooks import PostHook, on_completion
from kdist_trainer.instrumentation.torch_internals import count_bytes, storage_id
from kdist_trainer.metrics.rank_metrics import Op, StepPhase, StepStats
from kdist_trainer.processes.liveness import Heartbeat


def union_length(spans: Iterable[tuple[float, float]]) -> float:
    """Length that at least one of the spans (start, end) covers; overlaps count once."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


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
        """Attribute the time since the previous record to `phase`, which ends."""
        device_memory.record_phase_peak(phase)
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


class CollectiveTimer:
    """A timer of the collectives of each step, called by the training loop. This one measures
    nothing.
    """

    def start(self) -> None:
        """Start a step: count the collectives that are launched from now on."""

    def finish_step(self) -> None:
        """Add the step's collectives to the sums; its last backward pass has returned."""

    def close(self) -> None:
        """Stop measuring."""
        collective_hooks.unregister_launch_hook(self)
        collective_hooks.unregister_wait_hook(self)


@dataclass(slots=True)
class _AllReduces:
    """The all-reduces of one step."""

    spans: list[list[float]] = field(default_factory=list)
    """Launch and end of each, in seconds of one clock; the end is 0 until it is known."""
    running: int = 0
    nbytes: int = 0


class GlooAllReduceTimer(CollectiveTimer):
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


class CudaAllReduceTimer(CollectiveTimer):
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

    def _event(self) -> torch.cuda.Event:
        return self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def add_all_reduces(stats: StepStats, spans: Sequence[tuple[float, float]], nbytes: int) -> None:
    """Add one step's all-reduces, of `nbytes` together, to the rank's sums: when each was launched
    and when it ended, in seconds of one clock.
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
        """Probe `group` on `device`, unless it is not `enabled` or a rank is alone."""
        self._stats = stats
        self._group = group
        self._device = device
        self._enabled = enabled and group.size() > 1
        self._seconds = 0.0

    def is_due(self, seconds: float) -> bool:
        """Whether to measure now, `seconds` of steps after the previous call; the same on all ranks
        if `seconds` is.
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


KINDS: dict[str, Op] = {
    f"{op.name.lower()}{form}": op for op in Op for form in ("", "_single", "_coalesced", "_uneven")
}
"""Kind of each timed collective, by its name in `collective_hooks`."""


def payload(kind: Op, tensors: Sequence[Tensor], group: ProcessGroup) -> int:
    """Bytes of a collective as nccl-tests counts them (S): the largest buffer of a rank. `tensors`
    are the rank's part of what is gathered or scattered, all of what is reduced.
    """
    return count_bytes(tensors) * (1 if kind is Op.ALL_REDUCE else group.size())


@dataclass(slots=True, eq=False)
class _Pending:
    """A collective in flight."""

    kind: Op
    results: frozenset[int]
    """Ids of the storages that it fills, by which a rank may wait for it."""
    work: Work | None = None


@dataclass(slots=True)
class _Sums:
    """The sums of one kind in one step."""

    count: int = 0
    nbytes: int = 0
    running: int = 0
    since: float = 0.0
    """When the first of the running ones was launched, in seconds of the clock."""
    busy: float = 0.0
    """Seconds with at least one in flight."""


@dataclass(slots=True)
class _Step:
    """The collectives of one step."""

    sums: list[_Sums] = field(default_factory=lambda: [_Sums() for _ in Op])
    pending: list[_Pending] = field(default_factory=list)


class GlooCollectiveTimer(CollectiveTimer):
    """Times gloo's collectives. One ends when its future does, on a thread of gloo's, or when the
    rank has waited for it.
    """

    def __init__(self, stats: StepStats, step_timer: StepTimer) -> None:
        self._stats = stats
        self._step_timer = step_timer
        self._lock = threading.Lock()
        self._step: _Step | None = None
        self._main = threading.main_thread().ident
        collective_hooks.register_launch_hook(self)
        collective_hooks.register_wait_hook(self)

    def begin(self, op: str, tensors: Sequence[Tensor], group: ProcessGroup) -> PostHook | None:
        """Count a collective that is about to be launched on the main thread."""
        step, kind = self._step, KINDS.get(op)
        if step is None or kind is None or threading.get_ident() != self._main or group.size() == 1:
            return None
        pending = _Pending(kind, frozenset(map(storage_id, tensors)))
        sums = step.sums[kind]
        sums.count += 1
        sums.nbytes += payload(kind, tensors, group)
        with self._lock:
            step.pending.append(pending)
            if sums.running == 0:
                sums.since = perf_counter()
            sums.running += 1

        def post_hook(work: Work | None) -> None:
            pending.work = work
            on_completion(work, lambda _: self._end(step, pending))

        return post_hook

    def wait(self, wait: collective_hooks.Wait, awaited: Work | Tensor) -> Any:
        """Return what `wait` returns; the time of the main thread's waits is exposed."""
        step = self._step
        if step is None or threading.get_ident() != self._main:
            return wait()
        started = perf_counter()
        result = wait()
        self._step_timer.attribute(StepPhase.COMM_EXPOSED, perf_counter() - started)
        filled = storage_id(awaited) if isinstance(awaited, Tensor) else None
        for pending in step.pending[:]:
            if pending.work is awaited or filled in pending.results:
                self._end(step, pending)
        return result

    def _end(self, step: _Step, pending: _Pending) -> None:
        with self._lock:
            if pending not in step.pending:
                return
            step.pending.remove(pending)
            pending.work = None  # it holds the tensors
            sums = step.sums[pending.kind]
            sums.running -= 1
            if sums.running == 0:
                sums.busy += perf_counter() - sums.since

    def start(self) -> None:
        self._step = _Step()

    def finish_step(self) -> None:
        """Add the step's sums; collectives still in flight count up to now."""
        step = self._step
        self._step = None
        if step is None:
            return
        for pending in step.pending[:]:
            self._end(step, pending)
        for kind, sums in zip(Op, step.sums, strict=True):
            self._stats.add_collectives(kind, busy=sums.busy, nbytes=sums.nbytes, count=sums.count)


@dataclass(slots=True)
class _Enqueued:
    """The collectives of one step on a device."""

    spans: list[tuple[Op, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    """Events around each collective whose end can be known."""
    count: list[int] = field(default_factory=lambda: [0 for _ in Op])
    nbytes: list[int] = field(default_factory=lambda: [0 for _ in Op])


class CudaCollectiveTimer(CollectiveTimer):
    """Times collectives on a CUDA device by events that are read steps later."""

    _READ_AFTER_STEPS = 2

    def __init__(self, stats: StepStats) -> None:
        self._stats = stats
        self._open: _Enqueued | None = None
        self._finished: list[_Enqueued] = []
        collective_hooks.register_launch_hook(self)

    def begin(self, op: str, tensors: Sequence[Tensor], group: ProcessGroup) -> PostHook | None:
        """Count a collective that is about to be enqueued on the current stream."""
        step, kind = self._open, KINDS.get(op)
        if (
            step is None
            or kind is None
            or group.size() == 1
            or not tensors
            or not tensors[0].is_cuda
        ):
            return None
        step.count[kind] += 1
        step.nbytes[kind] += payload(kind, tensors, group)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()

        def ended(_: object) -> None:
            end.record()
            step.spans.append((kind, begin, end))

        return lambda work: on_completion(work, ended)

    def start(self) -> None:
        self._open = _Enqueued()

    def finish_step(self) -> None:
        """Queue the step, and add an earlier one if the device has passed it."""
        if self._open is not None:
            self._finished.append(self._open)
        self._open = None
        while len(self._finished) > self._READ_AFTER_STEPS and all(
            end.query()  # type: ignore[no-untyped-call]
            for _, _, end in self._finished[0].spans
        ):
            step = self._finished.pop(0)
            for kind in Op:
                own = [span[1:] for span in step.spans if span[0] is kind]
                spans = [tuple(own[0][0].elapsed_time(event) for event in span) for span in own]
                busy = union_length(spans) / 1e3
                self._stats.add_collectives(
                    kind, busy=busy, nbytes=step.nbytes[kind], count=step.count[kind]
                )
