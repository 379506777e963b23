"""The FLOPs of a token, what share of a device they use, and the batch that fits on it."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bench.gpu.precision import flops_per_token, utilization
from bench.gpu.training import SHAPES, fit
from kdist_trainer.config.workload_options import GptOptions
from kdist_trainer.workloads.gpt import Transformer


@pytest.mark.parametrize(
    "options",
    [
        GptOptions(layers=2, width=64, heads=4, block=32),
        GptOptions(layers=3, width=32, heads=2, block=128),
    ],
    ids=str,
)
def test_the_formula_agrees_with_torchs_counter(options: GptOptions) -> None:
    model, text = Transformer(options), torch.zeros(2, options.block, dtype=torch.int64)
    # as matrix products, which the counter knows on a CPU too
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(text).sum().backward()
    assert counter.get_total_flops() == flops_per_token(options) * text.numel()


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [
        ("NVIDIA H200", "bf16", 0.5),
        ("NVIDIA H100 80GB HBM3", "fp16", 0.5),
        ("NVIDIA H200", "tf32", 1.0),
        ("NVIDIA H200", "fp32", None),
        ("NVIDIA GeForce RTX 4090", "bf16", None),
    ],
)
def test_utilization_is_a_share_of_the_data_sheets_peak(
    device: str, precision: str, expected: float | None
) -> None:
    assert utilization(989e12 / 2, device, precision) == expected


def test_a_small_gpu_gets_a_quarter_of_the_batch() -> None:
    shape = SHAPES["cuda"]["long"]
    assert fit(shape, 80 * 2**30) == shape
    assert fit(shape, int(39.4 * 2**30)) == shape  # what an A100 of 40 GB has
    small = fit(shape, 24 * 2**30)
    assert (small.options, small.batch) == (shape.options, 8)
