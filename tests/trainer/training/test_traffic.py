"""What the ranks of each strategy exchange in a step is counted to the byte, timed, and taken out of the phase it fell in."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from kdist_trainer import loop, timing, traffic
from kdist_trainer.run import Run
from kdist_trainer.stats import StepPhase, StepStats
from kdist_trainer.timing import Laps
from kdist_trainer.traffic import HostTraffic
from tests.trainer.training.cells import document, layout
from tests.trainer.training.group import run_group
from tests.trainer.training.tasks import train

STEPS = 6


class Handle:
    """A collective that ends when a test says so, or, as gloo's reduce-scatter, has no future and ends when it is waited for."""

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
        for module in (timing, traffic):
            monkeypatch.setattr(module, "perf_counter", lambda: self.now)

    def pass_by(self, seconds: float) -> None:
        """So long later."""
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def launch(timer: HostTraffic, op: str, *, ranks: int = 2, lazy: bool = False) -> Any:
    """Launch one over four floats; its handle, or None where it is not followed."""
    follow = timer.begin(op, [torch.ones(4)], cast("Any", Group(ranks)))
    if follow is None:
        return None
    handle = Handle(lazy=lazy)
    follow(cast("Any", handle))
    return handle


def test_each_kind_is_timed_with_its_overlaps_once_and_waits_leave_the_phase_they_fell_in(clock: Clock) -> None:
    stats = StepStats()
    laps = Laps(stats)
    timer = HostTraffic(stats, laps)
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
    laps.lap(StepPhase.FORWARD)
    lazy = launch(timer, "reduce_scatter_single", lazy=True)
    clock.pass_by(16)
    timer.wait(lambda: clock.pass_by(32), cast("Any", lazy))
    clock.pass_by(64)
    timer.settle()
    laps.lap(StepPhase.BACKWARD)
    reducing.future.set_result([])
    assert stats.collective_seconds == [126, 7, 48], "what has not ended did so with the passes"
    assert stats.collective_bytes == [16, 64, 32]
    assert stats.collectives == [1, 2, 1]
    exposed, forward, backward = (stats.phase[one] for one in (StepPhase.COMM_EXPOSED, StepPhase.FORWARD, StepPhase.BACKWARD))
    assert (exposed, forward, backward) == (36, 11, 80)
    assert laps.end() == 127
    timer.close()


def test_what_goes_on_beside_the_training_or_among_one_rank_is_not_counted(clock: Clock) -> None:
    stats = StepStats()
    timer = HostTraffic(stats, Laps(stats))
    timer.start()
    found: list[object] = [launch(timer, "all_gather", ranks=1), launch(timer, "broadcast"), launch(timer, "barrier")]

    def beside() -> None:
        found.append(launch(timer, "all_reduce"))
        timer.wait(lambda: clock.pass_by(5), cast("Any", None))

    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
    timer.settle()
    timer.wait(lambda: clock.pass_by(5), cast("Any", None))
    timer.close()
    assert found == [None] * 4
    assert sum(stats.collectives) == sum(stats.collective_seconds) == sum(stats.phase) == 0


def weights_of(module: nn.Module) -> list[int]:
    """Bytes of what each part holds that is gathered as one; last the rest of the model, which stays gathered."""
    blocks = [part for part in module.modules() if isinstance(part, FSDPModule) and part is not module]
    held = [sum(weight.nbytes for weight in block.parameters()) for block in blocks]
    return [*held, sum(weight.nbytes for weight in module.parameters()) - sum(held)]


def train_and_tell(strategy: str, size: int, folder: Path) -> dict[str, Any]:
    """Train `gpt` as one rank, and return what it counted over its steps."""
    kept: list[Run] = []
    seconds: list[float] = []
    original = loop.begin

    def begin(run: Run) -> None:
        kept.append(run)
        run.report = lambda: seconds.append(run.records[-1].seconds)
        original(run)

    loop.begin = begin
    ranks = layout(strategy, size)
    section = {"steps": STEPS, "virtualShards": size // ranks.get("modelParallel", 1), **ranks}
    train(document("gpt", strategy, "fp32", **section), folder)
    run = kept[0]
    return {
        "phase": list(run.stats.phase),
        "seconds": sum(seconds),
        "count": [count / STEPS for count in run.stats.collectives],
        "bytes": [nbytes / STEPS for nbytes in run.stats.collective_bytes],
        "busy": list(run.stats.collective_seconds),
        "weights": weights_of(run.module),
        "own": [weight.nbytes for weight in run.module.parameters()],
    }


def told(strategy: str, size: int, folder: Path) -> list[dict[str, Any]]:
    """What each rank counted, checked for what holds under any strategy."""
    found = run_group(train_and_tell, size, strategy, size, folder, environment={"LOCAL_WORLD_SIZE": "2"})
    for rank in found:
        assert sum(rank["phase"]) == pytest.approx(rank["seconds"], rel=1e-3)
        assert all(seconds >= 0 for seconds in rank["phase"])
        assert 0 < rank["phase"][StepPhase.COMM_EXPOSED] < rank["seconds"]
        for count, nbytes, busy in zip(rank["count"], rank["bytes"], rank["busy"], strict=True):
            assert (count > 0) == (nbytes > 0) == (busy > 0)
            assert busy < rank["seconds"]
    return found


@pytest.mark.processes
def test_fsdp_gathers_each_block_twice_and_scatters_every_gradient_once(tmp_path: Path) -> None:
    for rank in told("fsdp", 2, tmp_path):
        *blocks, rest = rank["weights"]
        assert rank["count"] == [0, 2 * len(blocks) + 1, len(blocks) + 1]
        assert rank["bytes"] == [0, 2 * sum(blocks) + rest, sum(blocks) + rest]


@pytest.mark.processes
@pytest.mark.chaos
def test_hsdp_also_reduces_each_ranks_part_over_the_nodes(tmp_path: Path) -> None:
    for rank in told("hsdp", 4, tmp_path):
        *blocks, rest = rank["weights"]
        assert rank["count"] == [len(blocks) + 1, 2 * len(blocks) + 1, len(blocks) + 1]
        assert rank["bytes"] == [(sum(blocks) + rest) / 2, 2 * sum(blocks) + rest, sum(blocks) + rest]


@pytest.mark.processes
def test_tensor_reduces_activations_twice_in_each_layer_forward_and_backward_and_gathers_the_scores(tmp_path: Path) -> None:
    samples, block, width, layers, scores = 8, 16, 16, 2, 256
    reduced = 2 * 2 * layers + 1  # and the gradient of what the head takes
    for rank in told("tensor", 2, tmp_path):
        assert rank["count"] == [reduced, 1, 0]
        assert rank["bytes"] == [4 * samples * block * width * reduced, 4 * samples * block * scores, 0]


@pytest.mark.processes
@pytest.mark.chaos
def test_pipeline_reduces_each_stage_over_its_copies(tmp_path: Path) -> None:
    for rank in told("pipeline", 4, tmp_path):
        assert rank["count"] == [1, 0, 0], "a bucket"
        assert rank["bytes"] == [sum(rank["own"]), 0, 0]
