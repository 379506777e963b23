"""How long a training stalls when a worker is killed: from kill -9 to the next finished step,
next to stock torchrun and, where it is installed, torchft.

    python -m bench.recovery [KILLS]

The same plain script under `torchrun` and under `kdist run`, and kdist's managed loop; two ranks on
one node, a checkpoint every 20 steps. Ranks say in a file when they have finished a step. Each kill
has a launch of its own, since the workers that torchrun restarts may meet the addresses of the dead
ones and fail again; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 avoids that. Under torchft each rank is a
replica group, and the next step is that of the other one alone.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from bench.marks import Mark, environment, read, running, write_job
from bench.table import columns, quantile, title

KILLS = 5
KILLS_OF_PEERS = 10
STEPS_BEFORE = 30
PATIENCE = 90.0
BIN = Path(sys.executable).parent
TORCHRUN, OWN_STORE = "torchrun, a plain script", "torchrun, workers with a store of their own"
SCRIPT, PRELOADED = "kdist run, new interpreters", "kdist run, the same script"
TORCHFT = "torchft, two replica groups"
RESTART, IN_PLACE = "kdist run, managed loop, all restart", "kdist run, managed loop, in place"
LAYOUT = {"nodes": 1, "procsPerNode": 2}
HAS_TORCHFT = find_spec("torchft") is not None
NAMES = (
    TORCHRUN,
    OWN_STORE,
    *([TORCHFT] if HAS_TORCHFT else []),
    SCRIPT,
    PRELOADED,
    RESTART,
    IN_PLACE,
)
PEERS = {TORCHRUN, OWN_STORE, TORCHFT}


def main(kills: int) -> None:
    """Measure and print."""
    title(f"Recovery: kill -9 of rank 1 of 2 to the next finished step, {kills} kills of each")
    rows: dict[str, list[float]] = {name: [] for name in NAMES}
    for number in range(kills):
        for name, seconds in rows.items():
            if number < KILLS_OF_PEERS or name not in PEERS:
                with tempfile.TemporaryDirectory() as folder:
                    seconds.append(measure(name, Path(folder)))
    if not HAS_TORCHFT:
        print("  torchft is not installed here: pip install torchft")
    base = statistics.median(rows[TORCHRUN])
    columns(("", "kills", "p50", "p95", "to torchrun"), [line(*row, base) for row in rows.items()])
    for name, seconds in rows.items():
        if lost := sum(math.isinf(value) for value in seconds):
            print(f"  {name}: no step within {PATIENCE:.0f} s in {lost} of {len(seconds)} (inf)")


def line(name: str, seconds: list[float], base: float) -> tuple[str, ...]:
    """A line of the table."""
    middle, late = quantile(seconds, 0.5), quantile(seconds, 0.95)
    return (name, str(len(seconds)), f"{middle:.2f} s", f"{late:.2f} s", f"{middle / base:.2f}x")


def command(name: str, folder: Path) -> list[str]:
    """The command line of a contestant, with whatever file it needs in `folder`."""
    script = str(Path(__file__).with_name("script.py"))
    if name in {TORCHRUN, OWN_STORE}:
        return [
            str(BIN / "torchrun"),
            "--standalone",
            "--nproc-per-node=2",
            "--max-restarts=100",
            script,
        ]
    if name == TORCHFT:
        return [sys.executable, "-m", "bench.replica_groups"]
    if name in {SCRIPT, PRELOADED}:
        words = ["--nodes", "1", "--procs-per-node", "2", "--set", "spec.maxRestarts=100"]
        words += ["--set", "spec.script.preload=none"] if name == SCRIPT else []
        return [str(BIN / "kdist"), "run", *words, script]
    train = {
        "workload": "bench.steady:Steady",
        "steps": 10**6,
        "globalBatch": 128,
        "evaluate": "never",
        "checkpoint": {"every": {"steps": 20}},
        "recovery": "restart" if name == RESTART else "inPlace",
    }
    return [str(BIN / "kdist"), "run", write_job(folder, {**LAYOUT, "train": train})]


def measure(name: str, folder: Path) -> float:
    """Seconds of one recovery; infinite if the training does not come back."""
    marks, env = folder / "marks", environment(folder)
    if name == OWN_STORE:
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with (
        (folder / "log").open("w") as output,
        running(command(name, folder), env, output) as process,
    ):
        if follow(marks, process, after=0.0, known=set(), steps=STEPS_BEFORE) is None:
            raise RuntimeError(f"{name} does not train\n{(folder / 'log').read_text()[-4000:]}")
        known = {(mark.pid, mark.generation) for mark in read(marks)}
        victim = next(mark.pid for mark in reversed(read(marks)) if mark.rank == 1)
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        first = follow(marks, process, after=killed, known=known)
        return math.inf if first is None else first.time - killed


def follow(
    marks: Path,
    process: subprocess.Popen[bytes],
    *,
    after: float,
    known: set[tuple[int, int]],
    steps: int = 1,
) -> Mark | None:
    """The `steps`-th mark of rank 0 after a moment, by a process or in a generation that was not
    known; None if it does not come.
    """
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        new = [
            mark
            for mark in read(marks)
            if mark.rank == 0 and mark.time > after and (mark.pid, mark.generation) not in known
        ]
        if len(new) >= steps:
            return new[steps - 1]
        time.sleep(0.02)
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else KILLS)
