"""The preflight: what a job demands of the network is measured by each new group of ranks, before it loads or trains anything.

Each group, not only the first: after a restart the ranks may be on other machines. What counts is the fastest of a few
rounds, so a moment's disturbance ends no job; a link that is slow is slow in every round.
"""

from __future__ import annotations

from collections.abc import Callable

from kdist_trainer import log
from kdist_trainer.bench.cases import COLLECTIVES
from kdist_trainer.bench.measure import Effort, measure
from kdist_trainer.bench.pairs import Exchange, Slow, judge_pairs
from kdist_trainer.config import AllReduceCheck, count_bytes
from kdist_trainer.failure import TooSlow
from kdist_trainer.world import World

_EFFORT = Effort(rounds=10, warmup=2, seconds=20.0)
_SLOW_FACTOR = 2.0


def check(
    wanted: AllReduceCheck, world: World, *, node: str, beat: Callable[[], object], exchange: Exchange | None = None
) -> None:
    """Measure the all-reduce that the job demands. Collective.

    Raises `TooSlow` where the ranks do not reach it: first on the rank that is slow, as far as one is.
    """
    if world.size == 1:
        return
    collective = COLLECTIVES["all_reduce"]
    row = measure(collective, count_bytes(wanted.size), world, _EFFORT, beat=beat)
    reached, demanded = row.size / row.fastest * collective.factor(world.size), count_bytes(wanted.min_bus_bandwidth)
    if world.is_leader:
        log.event("preflight", busbw=round(reached), demanded=demanded, size=row.size, ranks=world.size)
    if reached >= demanded:
        return
    _, slow = judge_pairs(world, _SLOW_FACTOR, beat=beat, exchange=exchange)
    nodes = world.all_gather_object(node)
    if world.rank != (slow.ranks[0] if slow is not None else 0):
        world.barrier()  # the rank to blame speaks first, and this one ends with it
    raise TooSlow(
        f"an all-reduce of {wanted.size} among {world.size} ranks reaches a bus bandwidth of {reached / 1e9:.3g} GB/s, "
        f"spec.preflight.allReduce.minBusBandwidth demands {wanted.min_bus_bandwidth} ({demanded / 1e9:.3g} GB/s); "
        + _name(slow, nodes)
    )


def _name(slow: Slow | None, nodes: list[str]) -> str:
    if slow is None:
        return "no pair of ranks is slower than the others"
    who = " and ".join(f"rank {rank} on {nodes[rank]}" for rank in slow.ranks)
    what = "the pair " if len(slow.ranks) > 1 else ""
    return f"slow is {what}{who}: {slow.ratio:.1f} times the median of the others"
