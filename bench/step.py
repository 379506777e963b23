"""What kdist's loop adds to a step, next to a bare DDP loop and Lightning Fabric, on the same model
and samples.

    python -m bench.step

Two sizes: a step of about a millisecond on one rank, where every microsecond of the loop shows, and
one of some 20 ms on two ranks. The contestants take turns inside the same processes; a step is the
time between two forward passes of rank 0.
"""

from __future__ import annotations

import json
import os
import statistics
import sys

from bench.loops import BARE, CONTESTANTS
from bench.ranks import launch_measured, report
from bench.table import columns, title
from bench.work import take_marks

SIZES = {
    "short steps, one rank": {
        "ranks": 1,
        "width": 32,
        "depth": 1,
        "batch": 16,
        "steps": 500,
        "rounds": 40,
    },
    "long steps, two ranks": {
        "ranks": 2,
        "width": 384,
        "depth": 4,
        "batch": 512,
        "steps": 40,
        "rounds": 30,
    },
}
WARM = 10


def main() -> None:
    """Measure and print."""
    for name, size in SIZES.items():
        title(
            f"Step, {name}: {size['steps']} steps a block, {size['rounds']} blocks of each, in turn"
        )
        result = launch_measured("bench.step", size, len(CONTESTANTS))
        print()
        compare("all steps", result, at=0.5)
        print()
        compare("the fastest tenth", result, at=0.1)


def compare(what: str, tens: dict[str, list[float]], *, at: float) -> None:
    """Print where each contestant stands at a quantile of its means over ten steps, and how far it
    is from the bare loop.

    The lower quantile is the one to trust on a busy machine: those steps had the machine for
    themselves.
    """
    bare = sorted(tens[BARE])[int(at * len(tens[BARE]))]
    lines = []
    for name, seconds in tens.items():
        value = sorted(seconds)[int(at * len(seconds))]
        lines.append(
            (
                name,
                f"{value * 1e6:.1f} us",
                f"{(value - bare) * 1e6:+.1f} us",
                f"{value / bare - 1:+.2%}",
            )
        )
    columns((what, "a step", "more than bare", "share"), lines)


def rank() -> None:
    """One rank: every contestant in turn, each block in a group of its own."""
    size = json.loads(os.environ["KDIST_BENCH"])
    tens: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    ports = iter(size["ports"])
    for turn in range(size["rounds"]):
        order = list(CONTESTANTS.items())
        for name, contestant in order if turn % 2 else reversed(order):
            os.environ["MASTER_PORT"] = str(next(ports))
            contestant(size)
            seconds = take_marks(warm=WARM)
            # Means over ten steps, since kdist's ranks confer at every tenth.
            tens[name] += [
                statistics.fmean(seconds[at : at + 10]) for at in range(0, len(seconds) - 9, 10)
            ]
    report(tens)


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main()
