"""The page: ratios to fp32, the aim, unknown peaks, and what failed."""

from __future__ import annotations

from typing import Any

import pytest

from bench.gpu.page import draw, last_error
from bench.gpu.panels import look_up, state_of
from bench.gpu.parts import PARTS
from tools.dashboards.training.operations import DEVICES

MACHINE = {"device": "NVIDIA H200", "torch": "2.13.0"}
SHAPE = {"options": {"layers": 12, "width": 768, "block": 1024}, "batch": 32}


def record(figures: dict[str, Any]) -> dict[str, Any]:
    return {"figures": {"shape": SHAPE, **figures}, "seconds": 12.3, "commit": "abc"}


def trained(precision: str, rate: float, mfu: float | None) -> dict[str, Any]:
    return record(
        {
            "precision": precision,
            "device": "cuda",
            "tokens_per_second": rate,
            "low": rate,
            "high": rate,
            "blocks": 8,
            "step_seconds": 0.1,
            "memory_mib": 1000.0,
            "flops_per_token": 6e8,
            "counted_flops_per_token": 6e8,
            "flops_per_second": rate * 6e8,
            "mfu": mfu,
            "matmul": "highest",
        }
    )


def test_the_page_compares_with_fp32() -> None:
    done = {
        "precision-fp32": trained("fp32", 1000.0, None),
        "precision-bf16": trained("bf16", 4000.0, 0.412),
        "precision-fp16": {"error": "x\ntorch.OutOfMemoryError: full", "seconds": 1, "commit": "a"},
    }
    page = draw(PARTS, done, MACHINE, "python -m bench.gpu")
    assert page.startswith("# kdist on NVIDIA H200\n\n`python -m bench.gpu`\n")
    assert "From fp32 to bf16: 4.00x; the aim of more than 3x is reached." in page
    assert "| fp32 | 1,000 (1,000 … 1,000) | 1.00x | 100.0 ms | 1,000 MiB | 0.6 | unknown |" in page
    assert "| 4.00x | 100.0 ms | 1,000 MiB | 2.4 | 41.2% |" in page
    assert "| precision-fp16 | failed: torch.OutOfMemoryError: full | 1 s | a |" in page
    assert "| restart | not run: the same command runs it |" in page


def test_an_aim_that_was_missed_is_said_and_one_without_a_base_is_not() -> None:
    bf16 = {"precision-bf16": trained("bf16", 2900.0, None)}
    fp32 = {"precision-fp32": trained("fp32", 1000.0, None)}
    assert "2.90x; the aim of more than 3x is missed" in draw(PARTS, fp32 | bf16, MACHINE, "")
    assert "aim" not in draw(PARTS, bf16, MACHINE, "")


def test_timers_without_kernels_are_not_compared() -> None:
    row = {"what": "DDP's sums in a step", "timed": 140, "timer_seconds": 0.001}
    row |= {"profiled": 0, "profiler_seconds": 0.0, "names": []}
    page = draw(PARTS, {"timers": record({"steps": 10, "rows": [row]})}, MACHINE, "")
    assert "| 140 | 100.0 us | 0 | 0.0 us | no kernels to compare with |" in page


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Traceback\nValueError: wrong\n  at x", "ValueError: wrong"),
        ("torch.OutOfMemoryError: a\nWarning\nTimeoutError: b", "TimeoutError: b"),
        ("it ended\n", "it ended"),
        ("", "no message"),
    ],
)
def test_an_error_is_told_by_its_last_line(text: str, line: str) -> None:
    assert last_error(text) == line


def test_every_series_of_the_gpu_panels_is_looked_up() -> None:
    page = {"kdist_device_memory_allocated_bytes": [5.0], "kdist_model_flops_total": [9.0]}
    rows = list(look_up(DEVICES, {"kdist_model_flops_total": [4.0]}, page))
    assert {row["panel"] for row in rows} == {panel.title for panel in DEVICES.panels}
    found = {row["series"]: row for row in rows}
    assert found["kdist_model_flops_total"]["increase"] == 5.0
    assert found["kdist_device_memory_allocated_bytes"]["state"] == "fed"
    assert found["kdist_device_peak_flops"]["state"] == "absent"
    assert state_of("kdist_device_peak_flops", [0.0]) == "present, but zero"
