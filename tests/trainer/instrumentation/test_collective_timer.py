"""What timers of several kinds of collectives add up to, by a clock that the test moves."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kdist_trainer.instrumentation import step_timer
from kdist_trainer.instrumentation.step_timer import (
    CudaAllReduceTimer,
    CudaCollectiveTimer,
    GlooCollectiveTimer,
    StepTimer,
)
from kdist_trainer.metrics.rank_metrics import StepPhase, StepStats


class Handle:
    """A collective that ends when a test says so, or, as gloo's reduce-scatter, has no future and
    ends when it is waited for.
    """

    def __init__(self, *, lazy: bool = False) -> None:
        self.future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._lazy = lazy

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """What the timer listens to."""
        if self._lazy:
            raise RuntimeError("Work::getFuture not implemented.")
        return self.future


class Group:
    """A group of so many ranks."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        """Ranks."""
        return self._size


class Clock:
    """Time as a test moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(step_timer, "perf_counter", lambda: self.now)

    def pass_by(self, seconds: float) -> None:
        """So long later."""
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def launch(timer: GlooCollectiveTimer, op: str, *, ranks: int = 2, lazy: bool = False) -> Any:
    """Launch one over four floats; its handle, or None where it is not followed."""
    follow = timer.begin(op, [torch.ones(4)], cast("Any", Group(ranks)))
    if follow is None:
        return None
    handle = Handle(lazy=lazy)
    follow(cast("Any", handle))
    return handle


def test_each_kind_is_timed_with_its_overlaps_once_and_waits_leave_the_phase_they_fell_in(
    clock: Clock,
) -> None:
    stats = StepStats()
    stopwatch = StepTimer(stats)
    timer = GlooCollectiveTimer(stats, stopwatch)
    assert launch(timer, "all_reduce") is None, "no step is under way"
    timer.start()
    first = launch(timer, "all_gather_single")
    clock.pass_by(1)
    second = launch(timer, "all_gather")
    reducing = launch(timer, "all_reduce_coalesced")
    clock.pass_by(2)
    first.future.set_result([])
    timer.wait(lambda: clock.pass_by(4), cast("Any", second))
    second.future.set_result([])
    clock.pass_by(8)
    stopwatch.record_phase(StepPhase.FORWARD)
    lazy = launch(timer, "reduce_scatter_single", lazy=True)
    clock.pass_by(16)
    timer.wait(lambda: clock.pass_by(32), cast("Any", lazy))
    clock.pass_by(64)
    timer.finish_step()
    stopwatch.record_phase(StepPhase.BACKWARD)
    reducing.future.set_result([])
    assert stats.collective_seconds == [126, 7, 48], "what has not ended did so with the passes"
    assert stats.collective_bytes == [16, 64, 32]
    assert stats.collectives == [1, 2, 1]
    exposed, forward, backward = (
        stats.phase[one] for one in (StepPhase.COMM_EXPOSED, StepPhase.FORWARD, StepPhase.BACKWARD)
    )
    assert (exposed, forward, backward) == (36, 11, 80)
    assert stopwatch.finish_step() == 127
    timer.close()


def test_what_goes_on_next_to_the_training_or_among_one_rank_is_not_counted(clock: Clock) -> None:
    stats = StepStats()
    timer = GlooCollectiveTimer(stats, StepTimer(stats))
    timer.start()
    found: list[object] = [
        launch(timer, "all_gather", ranks=1),
        launch(timer, "broadcast"),
        launch(timer, "barrier"),
    ]

    def concurrent() -> None:
        found.append(launch(timer, "all_reduce"))
        timer.wait(lambda: clock.pass_by(5), cast("Any", None))

    thread = threading.Thread(target=concurrent)
    thread.start()
    thread.join()
    timer.finish_step()
    timer.wait(lambda: clock.pass_by(5), cast("Any", None))
    timer.close()
    assert found == [None] * 4
    assert sum(stats.collectives) == sum(stats.collective_seconds) == sum(stats.phase) == 0


class OnDevice:
    """A tensor of sixteen bytes on a GPU that is not there."""

    is_cuda = True
    layout = torch.strided
    nbytes = 16


@pytest.fixture
def _events(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of a GPU that is not there."""

    class Event:
        """One that the device passes when it is recorded."""

        def __init__(self, **_: object) -> None:
            self.at = -1.0

        def record(self) -> None:
            self.at = clock.now

        def query(self) -> bool:
            return self.at >= 0

        def elapsed_time(self, other: Event) -> float:
            return (other.at - self.at) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)


@pytest.mark.usefixtures("_events")
def test_on_a_device_events_of_steps_that_are_over_are_read_steps_later(clock: Clock) -> None:
    stats = StepStats()
    timer = CudaCollectiveTimer(stats)
    group, tensors = cast("Any", Group(2)), [cast("Tensor", OnDevice())]
    for step in range(4):
        timer.start()
        assert timer.begin("all_reduce", [torch.ones(4)], group) is None, (
            "what a CPU exchanges is not the device's"
        )
        handles = [Handle(), Handle()]
        # NCCL gives no handle to a synchronous call, as FSDP's are
        for handle in (*handles, None):
            follow = timer.begin("all_gather_single", tensors, group)
            assert follow is not None
            follow(cast("Any", handle))
            clock.pass_by(1)
        for handle in handles:
            handle.future.set_result([])
            clock.pass_by(2)
        timer.finish_step()
        counted = max(0, step - 1)
        assert stats.collectives == [0, 3 * counted, 0]
        assert stats.collective_bytes == [0, 3 * 32 * counted, 0]
        assert stats.collective_seconds == [0, pytest.approx(5 * counted), 0], (
            "the second ended two seconds after the first"
        )
    assert sum(stats.phase) == 0, "what a computation hid of it is not known"
    timer.close()


@pytest.mark.usefixtures("_events")
def test_on_a_device_all_reduces_are_timed_whether_or_not_they_have_a_handle(clock: Clock) -> None:
    stats, group = StepStats(), cast("Any", Group(2))
    timer = CudaAllReduceTimer(stats)
    for _ in range(3):
        timer.start()
        handle = Handle()
        for each in (handle, None):
            follow = timer.begin("all_reduce", [cast("Tensor", OnDevice())], group)
            clock.pass_by(1)
            assert follow is not None
            follow(cast("Any", each))
        clock.pass_by(2)
        handle.future.set_result([])
        timer.finish_step()
    assert (stats.collectives[0], stats.collective_bytes[0]) == (2, 32)
    assert stats.all_reduce_duration[-1] == pytest.approx(4 + 1)
    timer.close()
