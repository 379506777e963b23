"""The undocumented part of torch that metrics use, its own count of the time that it compiles, if
the process has imported it. `tests/trainer/metrics/test_torch_internals.py` compares the two.
"""

import sys
from typing import Any


def compile_seconds() -> float:
    """For how long torch.compile has worked in this process, what it found in a cache included."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    spent: dict[str, float] = getattr(utils, "cumulative_time_spent_ns", {})
    return (spent.get("entire_frame_compile", 0) + spent.get("entire_backward_compile", 0)) / 1e9
