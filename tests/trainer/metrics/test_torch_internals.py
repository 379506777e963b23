"""torch's own count of the time that it compiles is where metrics look for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kdist_trainer.metrics.torch_internals import compile_seconds


@pytest.mark.sampled
def test_the_time_in_torch_compile_is_torchs_own_and_rises_with_what_is_compiled() -> None:
    from torch._dynamo.utils import calculate_time_spent

    before = compile_seconds()

    @torch.compile(backend="aot_eager")
    def double(values: Tensor) -> Tensor:
        return values * 2

    double(torch.ones(3, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]  # torch's own gap
    assert compile_seconds() > before
    moved = "torch._dynamo.utils.cumulative_time_spent_ns has moved"
    total = pytest.approx(calculate_time_spent()["total_wall_time"])  # added in another order
    assert compile_seconds() == total, moved
