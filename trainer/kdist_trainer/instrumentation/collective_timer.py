"""What a step's ranks exchange where not all of it is DDP's all-reduces: counted and timed by the
kind of collective.

`fsdp`, `hsdp` and `tensor` gather, reduce and scatter in forward and backward passes, `pipeline`
reduces over its copies. On a CPU the rank itself waits for each: that time is taken out of the
phase that it fell in. On a GPU a stream waits, beside others that compute, and what of it no
computation hides is not known here: it stays where it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Work

from kdist_trainer.instrumentation import collective_hooks
from kdist_trainer.instrumentation.collective_hooks import Follow
from kdist_trainer.instrumentation.step_timer import StepTimer
from kdist_trainer.metrics.step_stats import Op, StepPhase, StepStats

KINDS: dict[str, Op] = {
    f"{op.name.lower()}{form}": op for op in Op for form in ("", "_single", "_coalesced", "_uneven")
}
"""Which of the timed collectives a launched one is."""


def payload(kind: Op, tensors: Sequence[Tensor], group: ProcessGroup) -> int:
    """The S of nccl-tests, bytes: what a rank holds whole. `tensors` are its part of what is
    gathered or scattered.
    """
    return sum(tensor.nbytes for tensor in tensors) * (1 if kind is Op.ALL_REDUCE else group.size())


def when_done(work: Work, call: Callable[[object], object]) -> bool:
    """Call `call` at the end of `work`; False if it has no future: gloo's reduce_scatter is
    finished by who waits for it.
    """
    try:
        future = work.get_future()
    except RuntimeError:
        return False
    future.then(call)
    return True


def storage(tensor: Tensor) -> int:
    """Which memory it is, also where it lies nowhere while a compiler looks on."""
    return int(tensor.untyped_storage()._cdata)


@dataclass(slots=True, eq=False)
class _Flight:
    """A collective under way."""

    kind: Op
    results: frozenset[int]
    """The memory that it fills, by which it may be waited for."""
    work: Work | None = None


@dataclass(slots=True)
class _Sums:
    """One kind's sums of one step."""

    count: int = 0
    nbytes: int = 0
    running: int = 0
    since: float = 0.0
    busy: float = 0.0


@dataclass(slots=True)
class _Passes:
    """One step's collectives."""

    sums: list[_Sums] = field(default_factory=lambda: [_Sums() for _ in Op])
    flights: list[_Flight] = field(default_factory=list)


class GlooCollectiveTimer:
    """Times gloo's collectives. One ends when its future does, on a thread of gloo's, or when the
    rank has waited for it.
    """

    def __init__(self, stats: StepStats, laps: StepTimer) -> None:
        self._stats = stats
        self._laps = laps
        self._lock = threading.Lock()
        self._passes: _Passes | None = None
        self._main = threading.main_thread().ident
        collective_hooks.listen(self)
        collective_hooks.surround(self)

    def begin(self, op: str, tensors: Sequence[Tensor], group: ProcessGroup) -> Follow | None:
        """A collective is about to be launched; those of threads beside the training are not
        counted.
        """
        passes, kind = self._passes, KINDS.get(op)
        if (
            passes is None
            or kind is None
            or threading.get_ident() != self._main
            or group.size() == 1
        ):
            return None
        flight = _Flight(kind, frozenset(map(storage, tensors)))
        sums = passes.sums[kind]
        sums.count += 1
        sums.nbytes += payload(kind, tensors, group)
        with self._lock:
            passes.flights.append(flight)
            if sums.running == 0:
                sums.since = perf_counter()
            sums.running += 1

        def follow(work: Work) -> None:
            flight.work = work
            when_done(work, lambda _: self._end(passes, flight))

        return follow

    def wait(self, wait: collective_hooks.Wait, awaited: Work | Tensor) -> Any:
        """What `wait` returns; the time of the rank's own waits is exposed."""
        passes = self._passes
        if passes is None or threading.get_ident() != self._main:
            return wait()
        begun = perf_counter()
        result = wait()
        self._laps.take(StepPhase.COMM_EXPOSED, perf_counter() - begun)
        filled = storage(awaited) if isinstance(awaited, Tensor) else None
        for flight in passes.flights[:]:
            if flight.work is awaited or filled in flight.results:
                self._end(passes, flight)
        return result

    def _end(self, passes: _Passes, flight: _Flight) -> None:
        with self._lock:
            if flight not in passes.flights:
                return
            passes.flights.remove(flight)
            flight.work = None  # which holds what it was about
            sums = passes.sums[flight.kind]
            sums.running -= 1
            if sums.running == 0:
                sums.busy += perf_counter() - sums.since

    def start(self) -> None:
        """Begin with nothing."""
        self._passes = _Passes()

    def settle(self) -> None:
        """Add the step's sums; what is still in flight was so until now."""
        passes, self._passes = self._passes, None
        if passes is None:
            return
        for flight in passes.flights[:]:
            self._end(passes, flight)
        for kind, sums in zip(Op, passes.sums, strict=True):
            self._stats.add_collectives(kind, busy=sums.busy, nbytes=sums.nbytes, count=sums.count)

    def close(self) -> None:
        """Listen no more."""
        collective_hooks.ignore(self)
        collective_hooks.leave(self)


@dataclass(slots=True)
class _Enqueued:
    """One step's collectives on a device: each one's events, the second only where its end can be
    known.
    """

    spans: list[tuple[Op, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    count: list[int] = field(default_factory=lambda: [0 for _ in Op])
    nbytes: list[int] = field(default_factory=lambda: [0 for _ in Op])


class CudaCollectiveTimer:
    """Times collectives on a CUDA device by events that are read steps later."""

    _READ_AFTER_STEPS = 2

    def __init__(self, stats: StepStats) -> None:
        self._stats = stats
        self._open: _Enqueued | None = None
        self._settled: list[_Enqueued] = []
        collective_hooks.listen(self)

    def begin(self, op: str, tensors: Sequence[Tensor], group: ProcessGroup) -> Follow | None:
        """A collective is about to be enqueued on the present stream."""
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

        return lambda work: when_done(work, ended)

    def start(self) -> None:
        """Begin with nothing."""
        self._open = _Enqueued()

    def settle(self) -> None:
        """Put the step aside, and count an earlier one if the device has passed it."""
        if self._open is not None:
            self._settled.append(self._open)
        self._open = None
        while len(self._settled) > self._READ_AFTER_STEPS and all(
            end.query()  # type: ignore[no-untyped-call]
            for _, _, end in self._settled[0].spans
        ):
            step = self._settled.pop(0)
            for kind in Op:
                busy = covered([(begin, end) for its, begin, end in step.spans if its is kind])
                self._stats.add_collectives(
                    kind, busy=busy, nbytes=step.nbytes[kind], count=step.count[kind]
                )

    def close(self) -> None:
        """Listen no more."""
        collective_hooks.ignore(self)


def covered(spans: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
    """Seconds in which at least one span was under way, overlaps counted once."""
    origin = spans[0][0] if spans else None
    times = sorted(
        (origin.elapsed_time(begin), origin.elapsed_time(end))
        for begin, end in spans
        if origin is not None
    )
    busy, reached = 0.0, -float("inf")
    for begun, ended in times:
        busy += max(0.0, ended - max(begun, reached))
        reached = max(reached, ended)
    return busy / 1e3
