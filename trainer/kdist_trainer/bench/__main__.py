"""One rank of the benchmark: measures all sizes, then every pair of ranks; rank 0 logs the results.

Events: `bench-begun`, `bench-row` for each size, `bench-pairs` for each rank (seconds to each other
rank, null for itself), `bench-slow` if a rank or a pair is slow, `bench-done`.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch

from kdist_trainer import log
from kdist_trainer.distributed.measure import (
    COLLECTIVES,
    NBYTES,
    Effort,
    Pair,
    SlowLink,
    find_slow_link,
    measure,
    sizes,
)
from kdist_trainer.distributed.world import World
from kdist_trainer.instrumentation.collective_hooks import find_heartbeat, record_collectives
from kdist_trainer.processes.liveness import Phase

LogEvent = Callable[..., None]

_MAX_SHOWN = 128  # ranks whose pairs fit into lines of a log


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and log. Raises `RuntimeError` if a result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m kdist_trainer.bench", description=__doc__)
    add = parser.add_argument
    add("collective", choices=sorted(COLLECTIVES))
    add("--min", type=int, default=1 << 10, help="bytes of the smallest size")
    add("--max", type=int, default=1 << 26, help="bytes of the largest size")
    add("--factor", type=int, default=4, help="between successive sizes")
    add("--rounds", type=int, default=20, help="measured rounds per size")
    add("--warmup", type=int, default=5, help="rounds before these")
    add("--seconds", type=float, default=5.0, help="maximum time per size")
    add("--slow", type=float, default=2.0, help="a pair is slow from this multiple of the median")
    add("--timeout", type=float, default=300.0, help="seconds that a collective may take")
    given = parser.parse_args(arguments)
    heartbeat, step = find_heartbeat(), 0
    record_collectives(heartbeat)

    def beat() -> None:
        nonlocal step
        step += 1
        if heartbeat is not None:
            heartbeat.beat(Phase.STEP, step)

    beat()
    with World.from_environment(timeout_seconds=given.timeout) as world:
        effort = Effort(given.rounds, given.warmup, given.seconds)
        nodes = world.all_gather_object(os.environ.get("KDIST_NODE") or socket.gethostname())
        log_event: LogEvent = log.event if world.is_rank_zero else _log_nothing
        log_event(
            "bench-begun",
            collective=given.collective,
            ranks=world.size,
            device=_device(world),
            backend=world.backend,
        )
        wrong = 0
        collective = COLLECTIVES[given.collective]
        for size in sizes(given.min, given.max, given.factor) if collective.sized else [0]:
            row = measure(collective, size, world, effort, beat=beat)
            wrong += row.wrong
            log_event("bench-row", **asdict(row))
        if world.size > 1:
            _log_pairs(*find_slow_link(world, given.slow, beat=beat), nodes, log_event)
        log_event("bench-done", wrong=wrong)
    if wrong:
        raise RuntimeError(f"{wrong} wrong elements in the results of {given.collective}")


def _log_pairs(
    pairs: dict[Pair, float], slow: SlowLink | None, nodes: list[str], log_event: LogEvent
) -> None:
    ranks = len(nodes)
    for rank in range(min(ranks, _MAX_SHOWN)):
        row = [
            pairs.get((min(rank, other), max(rank, other)))
            for other in range(min(ranks, _MAX_SHOWN))
        ]
        seconds = [value and float(f"{value:.4g}") for value in row]
        # `rank` and `node` are those of the rank that logs
        log_event("bench-pairs", row=rank, row_node=nodes[rank], size=NBYTES, seconds=seconds)
    if slow is not None:
        slow_nodes = [nodes[rank] for rank in slow.ranks]
        log_event(
            "bench-slow", ranks=slow.ranks, nodes=slow_nodes, seconds=slow.seconds, ratio=slow.ratio
        )


def _log_nothing(name: str, /, **fields: object) -> None:
    """Results are the same on all ranks, so only rank 0 logs them."""


def _device(world: World) -> str:
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"


if __name__ == "__main__":
    main()
