"""Every pair of ranks by itself: how long a message takes between them, and which pair or rank is slower than the others.

A collective is as slow as its slowest link and does not say which one that is; a message between two ranks meets no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist

from kdist_trainer.bench.measure import finish
from kdist_trainer.world import World

NBYTES = 1 << 20
ROUNDS = 10
_LOOKS = 3
MOST_ALONE = 8
"""Up to so many ranks each pair has the network for itself; above, pairs without a rank in common are measured together."""

Pair = tuple[int, int]
Exchange = Callable[[torch.Tensor, int, bool], None]


class Slow(NamedTuple):
    """Who is slower than the others: one rank whatever its partner, or one pair. `ratio` is against the others' median."""

    ranks: tuple[int, ...]
    seconds: float
    ratio: float


def schedule(ranks: int) -> Iterator[list[Pair]]:
    """All pairs in turns; no rank is in two pairs of one turn. Beyond `MOST_ALONE` ranks a tournament's n-1 turns."""
    if ranks <= MOST_ALONE:
        yield from ([pair] for pair in combinations(range(ranks), 2))
        return
    places = [*range(ranks), *([-1] if ranks % 2 else [])]
    for _ in range(len(places) - 1):
        half = len(places) // 2
        turn = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in turn if -1 not in pair]
        places = [places[0], places[-1], *places[1:-1]]


def judge_pairs(
    world: World, factor: float, *, beat: Callable[[], object], exchange: Exchange | None = None
) -> tuple[dict[Pair, float], Slow | None]:
    """What `measure_pairs` gives, and who is slow: only who still is when it is measured again. Collective."""
    pairs = measure_pairs(world, beat=beat, exchange=exchange)
    for _ in range(_LOOKS - 1):
        if find_slow(pairs, factor) is None:
            break
        again = measure_pairs(world, beat=beat, exchange=exchange)
        pairs = {pair: min(seconds, again[pair]) for pair, seconds in pairs.items()}
    return pairs, find_slow(pairs, factor)


def measure_pairs(world: World, *, beat: Callable[[], object], exchange: Exchange | None = None) -> dict[Pair, float]:
    """Seconds of a message of `NBYTES` one way between each two ranks, the fastest of a few there and back. Collective."""
    payload = torch.zeros(NBYTES // 4, dtype=torch.float32, device=world.device)
    own: dict[Pair, float] = {}
    for turn in schedule(world.size):
        beat()
        world.barrier()
        for pair in turn:
            if world.rank in pair:
                seconds = _time(payload, pair, world, exchange or _there_and_back)
                if world.rank == pair[0]:
                    own[pair] = seconds
    found: dict[Pair, float] = {}
    for part in world.all_gather_object(own):
        found.update(part)
    return found


def _time(payload: torch.Tensor, pair: Pair, world: World, exchange: Exchange) -> float:
    first = world.rank == pair[0]
    other = pair[1] if first else pair[0]
    times = []
    for _ in range(ROUNDS + 1):  # the first one opens the connection
        begun = perf_counter()
        exchange(payload, other, first)
        finish(world)
        times.append(perf_counter() - begun)
    return min(times[1:]) / 2  # a busy machine makes some slow; a slow link makes all slow


def _there_and_back(payload: torch.Tensor, other: int, first: bool) -> None:
    if first:
        dist.send(payload, other)
        dist.recv(payload, other)
    else:
        dist.recv(payload, other)
        dist.send(payload, other)


def find_slow(pairs: Mapping[Pair, float], factor: float) -> Slow | None:
    """The rank, else the pair, that takes more than `factor` times what the others do; None where there is none.

    A rank is to blame when even its fastest pair is slow. Two ranks have nobody to be compared with.
    """
    ranks = sorted({rank for pair in pairs for rank in pair})
    found = []
    for rank in ranks:
        own = [seconds for pair, seconds in pairs.items() if rank in pair]
        others = [seconds for pair, seconds in pairs.items() if rank not in pair]
        if others and min(own) > factor * median(others):
            found.append(Slow((rank,), median(own), median(own) / median(others)))
    if found:
        return max(found, key=lambda slow: slow.ratio)
    for pair, seconds in sorted(pairs.items(), key=lambda item: -item[1])[:1]:
        others = [other for one, other in pairs.items() if one != pair]
        if others and seconds > factor * median(others):
            return Slow(pair, seconds, seconds / median(others))
    return None
