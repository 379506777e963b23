"""What a rank tells when its GPU is out of memory. No GPU is needed: torch's numbers are given, and
the errors are raised where torch raises them.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kdist_trainer.instrumentation import device_memory, torch_internals
from kdist_trainer.ipc import failure
from kdist_trainer.metrics.rank_metrics import StepPhase, StepStats

WORDS = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Full(torch.autograd.Function):
    """Is out of memory in its backward pass."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError(WORDS)


def fill(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError(WORDS)


def forward() -> None:
    model = nn.Linear(1, 1)
    model.register_forward_hook(fill)
    model(torch.zeros(1))


def backward() -> None:
    Full.apply(torch.zeros(1, requires_grad=True)).backward()


def raised(call: Callable[[], None]) -> BaseException:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(
    ("call", "where"),
    [(forward, "the forward pass"), (backward, "the backward pass"), (fill, "")],
)
def test_it_says_where_in_a_step_the_memory_ran_out(call: Callable[[], None], where: str) -> None:
    assert device_memory.find_phase(raised(call)) == where


def test_the_optimizers_own_step_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["torch.optim.sgd"], "sgd", fill)
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    optimizer = torch.optim.SGD([parameter])
    assert device_memory.find_phase(raised(optimizer.step)) == "the optimizer's step"


def test_without_the_field_the_way_to_a_snapshot_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(device_memory.VARIABLE, raising=False)
    told = device_memory.explain(raised(backward))
    way = 'set spec.memorySnapshot: "on" to get a memory snapshot next time'
    assert told == f"in the backward pass; {way}"
    assert device_memory.explain(ValueError("out of luck")) == ""


def test_a_snapshot_and_the_peak_of_each_phase_are_left_next_to_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = iter([2 << 30, 5 << 30, 3 << 30, 4 << 30])
    monkeypatch.setenv(device_memory.VARIABLE, "on")
    monkeypatch.setenv("KDIST_CHECKPOINTS", str(tmp_path))
    monkeypatch.setenv("KDIST_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(device_memory, "_peaks", {})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peaks))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch_internals, "take_memory_snapshot", lambda: {"segments": []})
    from kdist_trainer.instrumentation.step_timer import StepTimer

    timer = StepTimer(StepStats(rank=3, generation=1))
    for phase in (StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.FORWARD):
        timer.record_phase(phase)
    told = device_memory.explain(raised(backward))
    path = tmp_path / "memory" / "rank-3.pickle"
    assert told == (
        "in the backward pass; peak of allocated memory 5.00 GiB, forward 3.00 GiB, "
        f"backward 5.00 GiB; snapshot for pytorch.org/memory_viz: {path}"
    )
    assert pickle.loads(path.read_bytes()) == {"segments": []}  # noqa: S301 - our own file
    assert path.stat().st_mode & 0o077 == 0
    found = failure.record(torch.OutOfMemoryError(WORDS), remark=told)
    assert found.message.endswith(f"Tried to allocate 2.00 GiB.; {told}")


def test_what_cannot_be_written_does_not_hide_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device_memory.VARIABLE, "on")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", fill)
    assert "no snapshot: OutOfMemoryError" in device_memory.explain(raised(backward))
