"""Which of the profiler's events are NCCL at work."""

from __future__ import annotations

import pytest
from torch.autograd.profiler_util import FunctionEvent

from bench.gpu.timers import covered, is_collective


def make(name: str, begin: float = 0.0, end: float = 1.0, *, gpu: bool = True) -> FunctionEvent:
    event = FunctionEvent(0, name, 0, begin, end)  # type: ignore[no-untyped-call]  # torch's own gap
    kinds = type(event.device_type)
    event.device_type = kinds.CUDA if gpu else kinds.CPU
    return event


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (make("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"), True),
        (make("void oneRankReduce<FuncPreMulSum<float>>(void*, void*, unsigned long)"), True),
        (make("nccl:all_reduce"), False),
        (make("sm90_xmma_gemm_bf16bf16_bf16f32"), False),
        (make("ncclDevKernel_AllReduce_Sum_f32_RING_LL", gpu=False), False),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_only_nccls_kernels_are_collectives_on_a_gpu(event: FunctionEvent, expected: bool) -> None:
    assert is_collective(event, "cuda") is expected


def test_kernels_that_overlap_count_once() -> None:
    events = [make("a", 0, 10), make("b", 5, 15), make("c", 20, 30)]
    assert covered(events) == pytest.approx(25e-6)
