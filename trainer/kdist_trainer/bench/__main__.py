"""One rank of the bench: measures the ladder of sizes, then every pair of ranks; rank 0 logs what
all have found.

Events: `bench-begun`, `bench-row` for each size, `bench-pairs` for each rank (seconds to each other
rank, null for itself), `bench-slow` where somebody is slow, `bench-done`.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch

from kdist_trainer import log
from kdist_trainer.bench.collectives import COLLECTIVES
from kdist_trainer.bench.measure import NBYTES, Effort, Pair, SlowLink, judge_pairs, measure, sizes
from kdist_trainer.instrumentation.flight_recorder import find_heartbeat, note_collectives
from kdist_trainer.liveness import Phase
from kdist_trainer.world import World

Tell = Callable[..., None]

_MOST_SHOWN = 128  # ranks whose pairs fit into lines of a log


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure. Raises `RuntimeError` if a result was wrong."""
    given = _parser().parse_args(arguments)
    heartbeat, step = find_heartbeat(), 0
    note_collectives(heartbeat)

    def beat() -> None:
        nonlocal step
        step += 1
        if heartbeat is not None:
            heartbeat.beat(Phase.STEP, step)

    beat()
    with World.from_environment(timeout_seconds=given.timeout) as world:
        effort = Effort(given.rounds, given.warmup, given.seconds)
        nodes = world.all_gather_object(os.environ.get("KDIST_NODE") or socket.gethostname())
        tell: Tell = log.event if world.is_leader else _say_nothing
        tell(
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
            tell("bench-row", **asdict(row))
        if world.size > 1:
            _tell_pairs(*judge_pairs(world, given.slow, beat=beat), nodes, tell)
        tell("bench-done", wrong=wrong)
    if wrong:
        raise RuntimeError(f"{wrong} elements that {given.collective} gave are wrong")


def _tell_pairs(
    pairs: dict[Pair, float], slow: SlowLink | None, nodes: list[str], tell: Tell
) -> None:
    ranks = len(nodes)
    for rank in range(min(ranks, _MOST_SHOWN)):
        row = [
            pairs.get((min(rank, other), max(rank, other)))
            for other in range(min(ranks, _MOST_SHOWN))
        ]
        seconds = [value and float(f"{value:.4g}") for value in row]
        tell("bench-pairs", rank=rank, node=nodes[rank], size=NBYTES, seconds=seconds)
    if slow is not None:
        where = [nodes[rank] for rank in slow.ranks]
        tell("bench-slow", ranks=slow.ranks, nodes=where, seconds=slow.seconds, ratio=slow.ratio)


def _say_nothing(name: str, /, **fields: object) -> None:
    """What is the same on all ranks is told by one."""


def _device(world: World) -> str:
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kdist_trainer.bench", description=__doc__)
    parser.add_argument("collective", choices=sorted(COLLECTIVES))
    parser.add_argument("--min", type=int, default=1 << 10, help="bytes of the smallest size")
    parser.add_argument("--max", type=int, default=1 << 26, help="bytes of the largest size")
    parser.add_argument("--factor", type=int, default=4, help="from one size to the next")
    parser.add_argument("--rounds", type=int, default=20, help="measured rounds of each size")
    parser.add_argument("--warmup", type=int, default=5, help="rounds before them")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="a size is measured for so long at most"
    )
    parser.add_argument(
        "--slow", type=float, default=2.0, help="times the others' median that make a pair slow"
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds that a collective may take"
    )
    return parser


if __name__ == "__main__":
    main()
