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

MIN_ROUNDS = 3


@dataclass(frozen=True)
class Effort:
    """How long one size is measured: for `rounds` rounds, but not much longer than `seconds`."""

    rounds: int = 20
    warmup: int = 5
    seconds: float = 5.0


@dataclass(frozen=True)
class BenchRow:
    """The measurement of one size, the same on every rank.

    Times are in seconds; bandwidths are in bytes per second, None if no bytes are sent.
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
    """Wrong elements, over all ranks and rounds."""


def sizes(least: int, most: int, factor: int) -> list[int]:
    """Sizes from `least` to at most `most`, each `factor` times the previous one."""
    found = [least]
    while found[-1] * factor <= most:
        found.append(found[-1] * factor)
    return found


def measure(
    collective: Collective, size: int, world: World, effort: Effort, *, beat: Callable[[], object]
) -> BenchRow:
    """Measure a collective at one size. Collective.

    Args:
        collective: what is measured.
        size: in bytes.
        world: the ranks.
        effort: how long.
        beat: called in every round, for the heartbeat.
    """
    case = collective.make(world, size)
    first = [_round(case, world)[0] for _ in range(max(1, effort.warmup))]
    rounds = _agree_on_rounds(min(first), world, effort)
    own, wrong = [], 0
    for _ in range(rounds):
        beat()
        seconds, errors = _round(case, world)
        own.append(seconds)
        wrong += errors
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
    """Summarize the rounds of one size.

    Args:
        times: of the rounds, in seconds, of shape (rounds,).
        nbytes: S of nccl-tests.
        factor: busbw / algbw.
        wrong: number of wrong elements.

    Returns:
        Bandwidths from the mean, as in nccl-tests, and percentiles of single rounds.
    """
    mean = float(times.mean())
    p50, p90, p99 = (float(torch.quantile(times, share)) for share in (0.5, 0.9, 0.99))
    algbw = nbytes / mean if nbytes else None
    busbw = None if algbw is None else algbw * factor
    return BenchRow(
        nbytes, len(times), mean, float(times.min()), p50, p90, p99, algbw, busbw, wrong
    )


def _round(case: BenchCase, world: World) -> tuple[float, int]:
    """Seconds and wrong elements of one round on this rank."""
    case.reset()
    finish(world)
    dist.barrier()
    finish(world)
    started = perf_counter()
    case.run()
    finish(world)
    return perf_counter() - started, case.count_wrong()


def finish(world: World) -> None:
    """Wait until the device has completed its work."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def _agree_on_rounds(seconds: float, world: World, effort: Effort) -> int:
    """The number of rounds that fit into the time by rank 0's clock, the same on every rank."""
    fitting = int(effort.seconds / max(seconds, 1e-6))
    rounds: int = world.broadcast_object(max(MIN_ROUNDS, min(effort.rounds, fitting)))
    return rounds


NBYTES = 1 << 20
ROUNDS = 10
_ATTEMPTS = 3
MAX_SEQUENTIAL = 8
"""Up to this number of ranks, pairs are measured one after the other; above it, pairs without a
common rank are measured at the same time.
"""

Pair = tuple[int, int]
Exchange = Callable[[torch.Tensor, int, bool], None]


class SlowLink(NamedTuple):
    """A rank that is slow with every other one, or one slow pair."""

    ranks: tuple[int, ...]
    seconds: float
    ratio: float
    """To the median of the others."""


def schedule(ranks: int) -> Iterator[list[Pair]]:
    """Yield all pairs in turns, with each rank in at most one pair of a turn.

    Beyond `MAX_SEQUENTIAL` ranks this is a round-robin tournament by the circle method.
    """
    if ranks <= MAX_SEQUENTIAL:
        yield from ([pair] for pair in combinations(range(ranks), 2))
        return
    slots = [*range(ranks), *([-1] if ranks % 2 else [])]
    for _ in range(len(slots) - 1):
        half = len(slots) // 2
        turn = zip(slots[:half], reversed(slots[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in turn if -1 not in pair]
        slots = [slots[0], slots[-1], *slots[1:-1]]


def find_slow_link(
    world: World, factor: float, *, beat: Callable[[], object], exchange: Exchange | None = None
) -> tuple[dict[Pair, float], SlowLink | None]:
    """Measure all pairs of ranks and find a slow rank or pair. Collective.

    What is slow is measured again, because a busy machine may be slow for a moment.

    Args:
        world: the ranks.
        factor: times the others' median that make a rank or pair slow.
        beat: called in every turn, for the heartbeat.
        exchange: sends a message to the other rank and back; by default over the process group.

    Returns:
        The result of `measure_pairs`, and what is slow.
    """
    pairs = measure_pairs(world, beat=beat, exchange=exchange)
    for _ in range(_ATTEMPTS - 1):
        if find_slow(pairs, factor) is None:
            break
        again = measure_pairs(world, beat=beat, exchange=exchange)
        pairs = {pair: min(seconds, again[pair]) for pair, seconds in pairs.items()}
    return pairs, find_slow(pairs, factor)


def measure_pairs(
    world: World, *, beat: Callable[[], object], exchange: Exchange | None = None
) -> dict[Pair, float]:
    """Measure the latency between every pair of ranks. Collective.

    Args:
        world: the ranks.
        beat: called in every turn, for the heartbeat.
        exchange: sends a message to the other rank and back; by default over the process group.

    Returns:
        Seconds that a message of `NBYTES` takes one way, by pair: half of the fastest round trip.
    """
    payload = torch.zeros(NBYTES // 4, dtype=torch.float32, device=world.device)
    own: dict[Pair, float] = {}
    for turn in schedule(world.size):
        beat()
        world.barrier()
        for pair in turn:
            if world.rank in pair:
                seconds = _time(payload, pair, world, exchange or _round_trip)
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
        started = perf_counter()
        exchange(payload, other, first)
        finish(world)
        times.append(perf_counter() - started)
    return min(times[1:]) / 2  # a busy machine makes some slow; a slow link makes all slow


def _round_trip(payload: torch.Tensor, other: int, first: bool) -> None:
    if first:
        dist.send(payload, other)
        dist.recv(payload, other)
    else:
        dist.recv(payload, other)
        dist.send(payload, other)


def find_slow(pairs: Mapping[Pair, float], factor: float) -> SlowLink | None:
    """Find the rank, else the pair, that takes more than `factor` times the median of the others.

    A rank is slow if even its fastest pair is. Two ranks cannot be compared with others.
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
