"""What kdist's loop adds to a step: beside a bare DDP loop and Lightning Fabric, on the same model and samples.

    python -m bench.step

Two sizes: a step of about a millisecond on one rank, where every microsecond of the loop shows, and one of some 20 ms on two
ranks. The contestants take turns inside the same processes; a step is the time between two forward passes of rank 0.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from bench.loops import BARE, CONTESTANTS
from bench.ranks import free_ports, launch, report
from bench.table import columns, spread, title
from bench.work import take_marks
from kdist_trainer.exporter import Exporter

SIZES = {
    "short steps, one rank": {"ranks": 1, "width": 32, "depth": 1, "batch": 16, "steps": 1000, "rounds": 21},
    "long steps, two ranks": {"ranks": 2, "width": 384, "depth": 4, "batch": 512, "steps": 40, "rounds": 21},
}
WARM = 10


def main() -> None:
    """Measure and print."""
    for name, size in SIZES.items():
        title(f"Step, {name}: {size['steps']} steps a block, {size['rounds']} blocks of each, in turn")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "metrics.sock")
            exporter = Exporter(job="bench", run_id="bench", socket_path=path, port=0, host="127.0.0.1", info={})
            exporter.start()
            try:
                orders = size | {"folder": folder, "ports": free_ports(len(CONTESTANTS) * int(size["rounds"]))}
                result = launch("bench.step", int(size["ranks"]), {"KDIST_BENCH": json.dumps(orders)})
            finally:
                exporter.close()
        for what, blocks in result.items():
            print()
            compare(what, blocks)


def compare(what: str, blocks: dict[str, list[float]]) -> None:
    """Print each contestant's median, and how far it is from the bare loop's of the same round: the median over the rounds."""
    lines = []
    for name, seconds in blocks.items():
        pairs = list(zip(seconds, blocks[BARE], strict=True))
        more = statistics.median(ours - bare for ours, bare in pairs)
        share = statistics.median(ours / bare - 1 for ours, bare in pairs)
        low, high = spread(seconds)
        values = f"{statistics.median(seconds) * 1e6:.1f} us", f"{low * 1e6:.0f} … {high * 1e6:.0f}"
        lines.append((name, *values, f"{more * 1e6:+.1f} us", f"{share:+.2%}"))
    columns((what, "median", "p10 … p90", "more than bare", "share"), lines)


def rank() -> None:
    """One rank: every contestant in turn, each block in a group of its own."""
    size = json.loads(os.environ["KDIST_BENCH"])
    taken: dict[str, dict[str, list[float]]] = {
        what: {name: [] for name in CONTESTANTS} for what in ("mean step", "median step", "median step, own work alone")
    }
    ports = iter(size["ports"])
    for turn in range(size["rounds"]):
        order = list(CONTESTANTS.items())
        for name, contestant in order if turn % 2 else reversed(order):
            os.environ["MASTER_PORT"] = str(next(ports))
            contestant(size)
            clock, work = take_marks(warm=WARM)
            numbers = (statistics.fmean(clock), statistics.median(clock), statistics.median(work))
            for blocks, number in zip(taken.values(), numbers, strict=True):
                blocks[name].append(number)
    report(taken)


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main()
