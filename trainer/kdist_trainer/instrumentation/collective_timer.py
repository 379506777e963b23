"""Counts and times a step's collectives by their kind, for every strategy but `ddp`.

`fsdp`, `hsdp` and `tensor` gather, reduce and scatter in forward and backward passes; `pipeline`
reduces over its copies. On a CPU the rank itself waits for each collective: that time is taken out
of the phase that it fell in. On a GPU a stream waits, next to others that compute. How much of that
no computation hides is not known here, so it stays in its phase.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from kdist_trainer.instrumentation import collective_hooks
from kdist_trainer.instrumentation.collective_hooks import PostHook, on_completion
from kdist_trainer.instrumentation.intervals import union_length
from kdist_trainer.instrumentation.step_timer import StepTimer
from kdist_trainer.instrumentation.torch_internals import count_bytes, storage_id
from kdist_trainer.metrics.step_stats import Op, StepPhase, StepStats

KINDS: dict[str, Op] = {
    f"{op.name.lower()}{form}": op for op in Op for form in ("", "_single", "_coalesced", "_uneven")
}
"""Kind of each timed collective, by its name in `collective_hooks`."""


def payload(kind: Op, tensors: Sequence[Tensor], group: ProcessGroup) -> int:
    """Bytes of a collective as nccl-tests counts them (S): the largest buffer of a rank.

    Args:
        kind: what is done.
        tensors: the rank's part of what is gathered or scattered, all of what is reduced.
        group: the ranks that take part.
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


class GlooCollectiveTimer:
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
        """Start a step without collectives."""
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

    def close(self) -> None:
        """Stop measuring."""
        collective_hooks.unregister_launch_hook(self)
        collective_hooks.unregister_wait_hook(self)


@dataclass(slots=True)
class _Enqueued:
    """The collectives of one step on a device."""

    spans: list[tuple[Op, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    """Events around each collective whose end can be known."""
    count: list[int] = field(default_factory=lambda: [0 for _ in Op])
    nbytes: list[int] = field(default_factory=lambda: [0 for _ in Op])


class CudaCollectiveTimer:
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
        """Start a step without collectives."""
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
                busy = _busy_seconds([span[1:] for span in step.spans if span[0] is kind])
                self._stats.add_collectives(
                    kind, busy=busy, nbytes=step.nbytes[kind], count=step.count[kind]
                )

    def close(self) -> None:
        """Stop measuring."""
        collective_hooks.unregister_launch_hook(self)


def _busy_seconds(spans: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
    """Seconds with at least one of the spans under way."""
    if not spans:
        return 0.0
    origin = spans[0][0]
    return (
        union_length((origin.elapsed_time(begin), origin.elapsed_time(end)) for begin, end in spans)
        / 1e3
    )
