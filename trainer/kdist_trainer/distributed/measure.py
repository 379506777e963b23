"""Measures the time of collectives over many rounds, and the latency between every pair of ranks.

`COLLECTIVES` has their inputs, expected results, and nccl-tests' factors from algorithm to bus
bandwidth. Inputs differ from element to element and from rank to rank, and are small integers,
whose sums are exact: a result is bitwise identical to the expected one or wrong.

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
from torch import Tensor

from kdist_trainer.distributed.world import World

_PERIOD = 251
_ELEMENT = 4  # bytes of a float32


@dataclass
class BenchCase:
    """One collective at one size, to run repeatedly."""

    nbytes: int
    """S of nccl-tests: bytes of a rank's largest buffer."""
    run: Callable[[], object]
    reset: Callable[[], object]
    """Called before each `run`."""
    count_wrong: Callable[[], int]
    """Called after each `run`: number of wrong elements in this rank's result."""


Make = Callable[[World, int], BenchCase]


@dataclass(frozen=True)
class Collective:
    """A collective that can be measured."""

    make: Make
    factor: Callable[[int], float]
    """busbw / algbw for a number of ranks."""
    sized: bool = True
    """Whether it sends data of a given size."""


def pattern(rank: int, count: int, device: torch.device, *, start: int = 0) -> Tensor:
    """The input of `rank`: `count` elements from `start` on, of shape (count,)."""
    return (
        torch.arange(start, start + count, device=device)
        .remainder_(_PERIOD)
        .add_(rank)
        .to(torch.float32)
    )


def summed(ranks: int, count: int, device: torch.device, *, start: int = 0) -> Tensor:
    """The sum of the inputs of all `ranks`, of shape (count,)."""
    return pattern(0, count, device, start=start).mul_(ranks).add_(ranks * (ranks - 1) / 2)


def _whole(size: int) -> int:
    return max(1, size // _ELEMENT)


def _part(world: World, size: int) -> int:
    """Elements of one rank's share of a buffer of `size` bytes."""
    return max(1, size // _ELEMENT // world.size)


def _compare(found: Tensor, wanted: Tensor) -> Callable[[], int]:
    return lambda: int((found != wanted).sum())


def _nothing() -> int:
    return 0


def _receive(found: Tensor, wanted: Tensor, nbytes: int, run: Callable[[], object]) -> BenchCase:
    """A collective that fills `found`, which should equal `wanted`."""
    return BenchCase(nbytes, run, lambda: found.fill_(-1), _compare(found, wanted))


def all_reduce(world: World, size: int) -> BenchCase:
    """`size` bytes of every rank, added up on every rank."""
    count = _whole(size)
    own, wanted = pattern(world.rank, count, world.device), summed(world.size, count, world.device)
    buffer = torch.empty_like(own)
    return BenchCase(
        buffer.nbytes,
        lambda: dist.all_reduce(buffer),
        lambda: buffer.copy_(own),
        _compare(buffer, wanted),
    )


def all_gather(world: World, size: int) -> BenchCase:
    """Every rank's part, concatenated to `size` bytes on every rank."""
    count = _part(world, size)
    own = pattern(world.rank, count, world.device)
    wanted = torch.cat([pattern(rank, count, world.device) for rank in range(world.size)])
    found = torch.empty_like(wanted)
    return _receive(found, wanted, found.nbytes, lambda: dist.all_gather_single(found, own))


def reduce_scatter(world: World, size: int) -> BenchCase:
    """`size` bytes of every rank, added up, one part to each rank."""
    count = _part(world, size)
    own = pattern(world.rank, count * world.size, world.device)
    wanted = summed(world.size, count, world.device, start=world.rank * count)
    found = torch.empty_like(wanted)
    return _receive(found, wanted, own.nbytes, lambda: dist.reduce_scatter_single(found, own))


def broadcast(world: World, size: int) -> BenchCase:
    """`size` bytes from rank 0 to all."""
    wanted = pattern(0, _whole(size), world.device)
    buffer = wanted.clone()

    def reset() -> None:
        if world.rank != 0:
            buffer.fill_(-1)

    return BenchCase(
        buffer.nbytes, lambda: dist.broadcast(buffer, 0), reset, _compare(buffer, wanted)
    )


def all_to_all(world: World, size: int) -> BenchCase:
    """`size` bytes of every rank, one part to each rank."""
    count = _part(world, size)
    own = pattern(world.rank, count * world.size, world.device)
    wanted = torch.cat(
        [pattern(rank, count, world.device, start=world.rank * count) for rank in range(world.size)]
    )
    found = torch.empty_like(wanted)
    return _receive(found, wanted, own.nbytes, lambda: dist.all_to_all_single(found, own))


def barrier(world: World, size: int) -> BenchCase:  # noqa: ARG001 - the signature of all collectives
    """No data: every rank waits for all others."""
    return BenchCase(0, dist.barrier, _nothing, _nothing)


def _all_but_one(ranks: int) -> float:
    return (ranks - 1) / ranks


def _once(ranks: int) -> float:  # noqa: ARG001
    return 1.0


COLLECTIVES = {
    "all_reduce": Collective(all_reduce, lambda ranks: 2 * _all_but_one(ranks)),
    "all_gather": Collective(all_gather, _all_but_one),
    "reduce_scatter": Collective(reduce_scatter, _all_but_one),
    "broadcast": Collective(broadcast, _once),
    "all_to_all": Collective(all_to_all, _all_but_one),
    "barrier": Collective(barrier, _once, sized=False),
}
"""By name in `kdist bench`."""


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
    """Measure a collective at one size in bytes; `beat` is called in every round, for the
    heartbeat. Collective.
    """
    case = collective.make(world, size)
    first = [_round(case, world)[0] for _ in range(max(1, effort.warmup))]
    # as many as fit into the time by rank 0's clock
    fitting = int(effort.seconds / max(min(first), 1e-6))
    rounds: int = world.broadcast_object(max(MIN_ROUNDS, min(effort.rounds, fitting)))
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
    """Summarize the rounds of one size, by their times in seconds, S of nccl-tests, and busbw /
    algbw: bandwidths from the mean, as in nccl-tests, and percentiles of single rounds.
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

    What is slow, by this factor to the median of the others, is measured again, because a busy
    machine may be slow for a moment. Returns the result of `measure_pairs`, and what is slow.
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
    """Measure the latency between every pair of ranks: the seconds that a message of `NBYTES` takes
    one way, which is half of the fastest round trip. `beat` is called in every turn; `exchange`
    sends a message to the other rank and back, by default over the process group. Collective.
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
