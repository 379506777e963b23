"""Several real ranks over gloo, for tests: each a process of its own that runs one function of a
test.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 120
_PRELOADED = [
    "torch.distributed.checkpoint.state_dict",
    "torch.nn.parallel",
    "torch._dynamo",  # the first DDP of a process would import it
    "kdist_trainer.script.api",
    # one server serves all tests of a process, those of the training loop too
    "kdist_trainer.worker",
]


@dataclass(frozen=True)
class Rank:
    """The world as one rank sees it."""

    rank: int
    size: int
    generation: int


def prepared_context() -> ForkServerContext:
    """Where processes come from that have torch already imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def run_ranks(
    size: int, work: Callable[..., Any], folder: Path, *arguments: Any, generation: int = 1
) -> list[Any]:
    """Run `work(rank, *arguments)` on `size` ranks at once; returns their results by rank.

    `work` must be a function of a module. `folder` holds the group's rendezvous file. An error on
    any rank fails the test.
    """
    context = prepared_context()
    results: Queue[tuple[int, bool, Any]] = context.Queue()
    store = folder / f"rendezvous-{time.monotonic_ns()}"
    ranks = [Rank(rank, size, generation) for rank in range(size)]
    processes = [
        context.Process(target=_enter, args=(one, store, work, arguments, results), daemon=True)
        for one in ranks
    ]
    for process in processes:
        process.start()
    try:
        return _collect(processes, results)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(processes: list[Any], results: Queue[tuple[int, bool, Any]]) -> list[Any]:
    found: dict[int, Any] = {}
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(found) < len(processes):
        try:
            rank, ok, value = results.get(timeout=1)
        except queue.Empty:
            ended = [
                rank
                for rank, one in enumerate(processes)
                if one.exitcode is not None and rank not in found
            ]
            assert time.monotonic() < deadline, (
                f"ranks {sorted(set(range(len(processes))) - set(found))} take too long"
            )
            assert not ended or any(one.is_alive() for one in processes), (
                f"ranks {ended} ended without a result"
            )
            continue
        assert ok, f"rank {rank} failed:\n{value}"
        found[rank] = value
    return [found[rank] for rank in range(len(processes))]


def _enter(
    rank: Rank,
    store: Path,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
    results: Queue[tuple[int, bool, Any]],
) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank.rank)
    file_store = FileStore(str(store), rank.size)
    dist.init_process_group(
        "gloo",
        store=file_store,
        rank=rank.rank,
        world_size=rank.size,
        timeout=timedelta(seconds=60),
    )
    try:
        value = work(rank, *arguments)
        dist.barrier()
        results.put((rank.rank, True, value))
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - whatever it is, the test must show it
        results.put((rank.rank, False, traceback.format_exc()))
