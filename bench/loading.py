"""What it costs to bring a checkpoint to all ranks: each reads it, or rank 0 reads and sends.

    python -m bench.loading

The same state on the same disk, in turn: seconds until the slowest rank has it, bytes read from
files by all ranks together, and the peak memory of all ranks together in addition to
the state (their own pages, which sharing cannot make smaller).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.ranks import free_ports, launch, report
from bench.table import columns, interleave, title
from kdist_trainer.checkpoint.checkpointer import CheckpointManager
from kdist_trainer.config import Checkpointing

MEGABYTES = 256
RANKS = (2, 4)
ROUNDS = 3
LOADS = ("each", "broadcast")


class Alone:
    """A world of one rank, to save with."""

    rank, size, generation = 0, 1, 1


class Group:
    """The world of this bench's ranks."""

    def __init__(self, generation: int) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.generation = generation


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder))
        generation = iter(range(2, 10_000))
        for size in RANKS:
            title(
                f"Loading {MEGABYTES} MiB on {size} ranks of one machine, file in the "
                f"page cache, {ROUNDS} times each, in turn"
            )
            measures = {load: partial(measure, folder, load, size, generation) for load in LOADS}
            found = interleave(measures, rounds=ROUNDS)
            lines = []
            for load in LOADS:
                seconds, read, memory = (
                    statistics.median(values) for values in zip(*found[load], strict=True)
                )
                lines.append((load, f"{seconds:.2f} s", f"{read:.0f} MiB", f"{memory:.0f} MiB"))
            columns(("", "slowest rank", "read by all", "most memory of all"), lines)


def save(folder: Path) -> None:
    """A checkpoint with a state of so many megabytes."""
    config = Checkpointing(mode="blocking")
    store = CheckpointManager(folder, world=Alone(), run_id="bench", config=config, job={})
    store.save(make_state(1.0), {"step": 1, "samples_seen": 1}, step=1)
    store.close()


def make_state(value: float) -> dict[str, Any]:
    """Sixteen equal layers."""
    return {"model": {f"layer{i}": torch.full((MEGABYTES << 14,), value) for i in range(16)}}


def measure(folder: str, load: str, size: int, generation: Any) -> tuple[float, float, float]:
    """(seconds of the slowest rank, MiB read by all, MiB held by all at most)."""
    orders = {"folder": folder, "load": load, "generation": next(generation)}
    extra = {"KDIST_BENCH": json.dumps(orders), "MASTER_PORT": str(free_ports(1)[0])}
    ranks = launch("bench.loading", size, extra)
    return max(one[0] for one in ranks), sum(one[1] for one in ranks), sum(one[2] for one in ranks)


def rank() -> None:
    """One rank: load once."""
    orders = json.loads(os.environ["KDIST_BENCH"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    state = {"model": {name: value.clone() for name, value in make_state(0.0)["model"].items()}}
    config = Checkpointing(mode="blocking", load=orders["load"])
    world = Group(orders["generation"])
    store = CheckpointManager(
        Path(orders["folder"]), world=world, run_id="bench", config=config, job={}
    )
    dist.barrier()
    memory, read, began = Memory(), bytes_read(), time.perf_counter()
    store.load(state, fingerprint="")
    own = (time.perf_counter() - began, (bytes_read() - read) / 2**20, memory.close())
    assert all(float(value[0]) == 1.0 for value in state["model"].values())
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    store.close()
    report(every)
    dist.barrier()
    dist.destroy_process_group()


def bytes_read() -> int:
    """Bytes that this process took from files, from the page cache too."""
    return int(Path("/proc/self/io").read_text().split()[1])


class Memory:
    """How far this process's own memory grows while it is watched."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._before = self._most = own_memory()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> float:
        """MiB."""
        self._over.set()
        self._thread.join()
        return (self._most - self._before) / 1024

    def _watch(self) -> None:
        while not self._over.wait(0.003):
            self._most = max(self._most, own_memory())


def own_memory() -> int:
    """KiB of anonymous memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main()
