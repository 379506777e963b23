"""What measuring costs: the hook, the laps, the heartbeat and the records for the exporter, beside the same loop without them.

    python -m bench.cost

Two ranks, a step of some 20 ms. Both take turns inside the same processes. On a busy machine the time on the clock says little:
beside it stands the time that rank 0's process computes in a step, all of its threads together.
"""

from __future__ import annotations

import json
import os
import statistics
import sys

from bench.loops import kdist_off, kdist_on
from bench.ranks import launch_measured, report
from bench.table import columns, title
from bench.work import take_both

SIZE = {"ranks": 2, "width": 384, "depth": 4, "batch": 512, "steps": 40, "rounds": 8}
CONTESTANTS = {"nothing measured": kdist_off, "hook and metrics": kdist_on}
STEP_SECONDS = 0.02
WARM = 10


def main() -> None:
    """Measure and print."""
    title(f"Cost of measuring: {SIZE['steps']} steps a block, {SIZE['rounds']} blocks of each, in turn, two ranks")
    blocks = launch_measured("bench.cost", SIZE, len(CONTESTANTS))
    for index, what in enumerate(("on the clock", "computed")):
        print()
        compare(what, {name: [block[index] for block in found] for name, found in blocks.items()})


def compare(what: str, blocks: dict[str, list[float]]) -> None:
    """Print medians over the blocks, and of the differences between neighbours, which a busy machine shifts alike."""
    off, on = (blocks[name] for name in CONTESTANTS)
    extra = statistics.median(b - a for a, b in zip(off, on, strict=True))
    lines = [(name, f"{statistics.median(found) * 1e3:.2f} ms") for name, found in blocks.items()]
    columns((what, "a step"), [*lines, ("more", f"{extra * 1e6:+.0f} us"), ("of 20 ms", f"{extra / STEP_SECONDS:+.2%}")])


def rank() -> None:
    """One rank: both in turn, each block in a group of its own."""
    size = json.loads(os.environ["KDIST_BENCH"])
    blocks: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTESTANTS}
    ports = iter(size["ports"])
    for _ in range(size["rounds"]):
        for name, contestant in CONTESTANTS.items():
            os.environ["MASTER_PORT"] = str(next(ports))
            contestant(size)
            clock, computed = take_both(warm=WARM)
            blocks[name].append((statistics.median(clock), statistics.fmean(computed)))
    report(blocks)


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main()
