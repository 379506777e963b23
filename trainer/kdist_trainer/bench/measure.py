"""Measures the time of collectives over many rounds, and the latency between every pair of ranks.

A round lasts from the moment all ranks are ready until the last one has its result. A collective is
as slow as its slowest link but does not show which one that is. So each pair of ranks is also
measured alone, to find slow links and slow ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist

from kdist_trainer.bench.collectives import BenchCase, Collective
from kdist_trainer.world import World

LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Effort:
    """How long one size is measured: `rounds` of it, or fewer where these would take more than
    `seconds`.
    """

    rounds: int = 20
    warmup: int = 5
    seconds: float = 5.0


@dataclass(frozen=True)
class BenchRow:
    """One size, measured: the same on every rank. Times in seconds, bandwidths in bytes per second,
    None without bytes.
    """

    size: int
    rounds: int
    mean: float
    fastest: float
    p50: float
    p90: float
    p99: float
    algbw: float | None
    busbw: float | None
    wrong: int
    """Elements over all ranks and rounds that were not what they had to be."""


def sizes(least: int, most: int, factor: int) -> list[int]:
    """The ladder: `least`, and each `factor` times the one before it, up to `most`."""
    found = [least]
    while found[-1] * factor <= most:
        found.append(found[-1] * factor)
    return found


def measure(
    collective: Collective, size: int, world: World, effort: Effort, *, beat: Callable[[], object]
) -> BenchRow:
    """Measure one size; `beat` is called in every round. Collective."""
    case = collective.make(world, size)
    first = [_round(case, world)[0] for _ in range(max(1, effort.warmup))]
    rounds = _agree_on_rounds(min(first), world, effort)
    own, wrong = [], 0
    for _ in range(rounds):
        beat()
        seconds, mistakes = _round(case, world)
        own.append(seconds)
        wrong += mistakes
    table = torch.tensor([*own, float(wrong)], dtype=torch.float64)
    everyone = [torch.empty_like(table) for _ in range(world.size)]
    dist.all_gather(everyone, table)
    stacked = torch.stack(everyone)
    return summarize(
        stacked[:, :-1].max(dim=0).values,
        case.nbytes,
        collective.factor(world.size),
        int(stacked[:, -1].sum()),
    )


def summarize(times: torch.Tensor, nbytes: int, factor: float, wrong: int) -> BenchRow:
    """A row of the rounds' times: bandwidth from the mean as nccl-tests has it, percentiles of
    single rounds.
    """
    mean = float(times.mean())
    p50, p90, p99 = (float(torch.quantile(times, share)) for share in (0.5, 0.9, 0.99))
    algbw = nbytes / mean if nbytes else None
    busbw = None if algbw is None else algbw * factor
    return BenchRow(
        nbytes, len(times), mean, float(times.min()), p50, p90, p99, algbw, busbw, wrong
    )


def _round(case: BenchCase, world: World) -> tuple[float, int]:
    """Seconds and mistakes of one round on this rank."""
    case.reset()
    finish(world)
    dist.barrier()
    finish(world)
    begun = perf_counter()
    case.run()
    finish(world)
    return perf_counter() - begun, case.count_wrong()


def finish(world: World) -> None:
    """Wait until the device has done what it was given."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def _agree_on_rounds(seconds: float, world: World, effort: Effort) -> int:
    """As many rounds as fit into the time, by rank 0's clock."""
    fitting = int(effort.seconds / max(seconds, 1e-6))
    rounds: int = world.broadcast_object(max(LEAST_ROUNDS, min(effort.rounds, fitting)))
    return rounds


NBYTES = 1 << 20
ROUNDS = 10
_LOOKS = 3
MOST_ALONE = 8
"""Up to so many ranks each pair has the network for itself; above, pairs without a rank in common
are measured together.
"""

Pair = tuple[int, int]
Exchange = Callable[[torch.Tensor, int, bool], None]


class SlowLink(NamedTuple):
    """Who is slower than the others: one rank whatever its partner, or one pair. `ratio` is against
    the others' median.
    """

    ranks: tuple[int, ...]
    seconds: float
    ratio: float


def schedule(ranks: int) -> Iterator[list[Pair]]:
    """All pairs in turns; no rank is in two pairs of one turn. Beyond `MOST_ALONE` ranks a
    tournament's n-1 turns.
    """
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
) -> tuple[dict[Pair, float], SlowLink | None]:
    """What `measure_pairs` gives, and who is slow: only who still is when it is measured again.
    Collective.
    """
    pairs = measure_pairs(world, beat=beat, exchange=exchange)
    for _ in range(_LOOKS - 1):
        if find_slow(pairs, factor) is None:
            break
        again = measure_pairs(world, beat=beat, exchange=exchange)
        pairs = {pair: min(seconds, again[pair]) for pair, seconds in pairs.items()}
    return pairs, find_slow(pairs, factor)


def measure_pairs(
    world: World, *, beat: Callable[[], object], exchange: Exchange | None = None
) -> dict[Pair, float]:
    """Seconds of a message of `NBYTES` one way between each two ranks, the fastest of a few there
    and back. Collective.
    """
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


def find_slow(pairs: Mapping[Pair, float], factor: float) -> SlowLink | None:
    """The rank, else the pair, that takes more than `factor` times what the others do; None where
    there is none.

    A rank is to blame when even its fastest pair is slow. Two ranks have nobody to be compared
    with.
    """
    ranks = sorted({rank for pair in pairs for rank in pair})
    found = []
    for rank in ranks:
        own = [seconds for pair, seconds in pairs.items() if rank in pair]
        others = [seconds for pair, seconds in pairs.items() if rank not in pair]
        if others and min(own) > factor * median(others):
            found.append(SlowLink((rank,), median(own), median(own) / median(others)))
    if found:
        return max(found, key=lambda slow: slow.ratio)
    for pair, seconds in sorted(pairs.items(), key=lambda item: -item[1])[:1]:
        others = [other for one, other in pairs.items() if one != pair]
        if others and seconds > factor * median(others):
            return SlowLink(pair, seconds, seconds / median(others))
    return None
