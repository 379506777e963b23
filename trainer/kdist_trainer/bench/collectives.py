"""The collectives: their inputs, expected results, and nccl-tests' factors from algorithm to bus
bandwidth.

Inputs differ from element to element and from rank to rank, and are small integers, whose sums are
exact: a result is bitwise identical to the expected one or wrong.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kdist_trainer.world import World

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
    return BenchCase(
        found.nbytes,
        lambda: dist.all_gather_single(found, own),
        lambda: found.fill_(-1),
        _compare(found, wanted),
    )


def reduce_scatter(world: World, size: int) -> BenchCase:
    """`size` bytes of every rank, added up, one part to each rank."""
    count = _part(world, size)
    own = pattern(world.rank, count * world.size, world.device)
    wanted = summed(world.size, count, world.device, start=world.rank * count)
    found = torch.empty_like(wanted)
    return BenchCase(
        own.nbytes,
        lambda: dist.reduce_scatter_single(found, own),
        lambda: found.fill_(-1),
        _compare(found, wanted),
    )


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


def reduce(world: World, size: int) -> BenchCase:
    """`size` bytes of every rank, added up on rank 0."""
    count = _whole(size)
    own, wanted = pattern(world.rank, count, world.device), summed(world.size, count, world.device)
    buffer = torch.empty_like(own)
    check = _compare(buffer, wanted) if world.rank == 0 else _nothing
    return BenchCase(
        buffer.nbytes, lambda: dist.reduce(buffer, 0), lambda: buffer.copy_(own), check
    )


def gather(world: World, size: int) -> BenchCase:
    """Every rank's part, concatenated to `size` bytes on rank 0."""
    count = _part(world, size)
    own = pattern(world.rank, count, world.device)
    nbytes = own.nbytes * world.size
    if world.rank != 0:
        return BenchCase(nbytes, lambda: dist.gather(own, dst=0), _nothing, _nothing)
    wanted = torch.cat([pattern(rank, count, world.device) for rank in range(world.size)])
    found = torch.empty_like(wanted)
    parts = list(found.chunk(world.size))
    return BenchCase(
        nbytes,
        lambda: dist.gather(own, parts, dst=0),
        lambda: found.fill_(-1),
        _compare(found, wanted),
    )


def scatter(world: World, size: int) -> BenchCase:
    """`size` bytes of rank 0, one part to each rank."""
    count = _part(world, size)
    wanted = pattern(world.rank, count, world.device)
    found = torch.empty_like(wanted)
    parts = (
        [pattern(rank, count, world.device) for rank in range(world.size)]
        if world.rank == 0
        else None
    )
    nbytes = found.nbytes * world.size
    return BenchCase(
        nbytes,
        lambda: dist.scatter(found, parts, src=0),
        lambda: found.fill_(-1),
        _compare(found, wanted),
    )


def all_to_all(world: World, size: int) -> BenchCase:
    """`size` bytes of every rank, one part to each rank."""
    count = _part(world, size)
    own = pattern(world.rank, count * world.size, world.device)
    wanted = torch.cat(
        [pattern(rank, count, world.device, start=world.rank * count) for rank in range(world.size)]
    )
    found = torch.empty_like(wanted)
    return BenchCase(
        own.nbytes,
        lambda: dist.all_to_all_single(found, own),
        lambda: found.fill_(-1),
        _compare(found, wanted),
    )


def barrier(world: World, size: int) -> BenchCase:  # noqa: ARG001 - the signature of all collectives
    """No data: every rank waits for all others."""
    return BenchCase(0, dist.barrier, _nothing, _nothing)


def broadcast_object(world: World, size: int) -> BenchCase:
    """An object of `size` bytes from rank 0 to all, by `broadcast_object_list`: pickled, sent on
    the CPU, unpickled.
    """
    wanted = bytes(index % _PERIOD for index in range(size))
    box: list[Any] = [None]

    def reset() -> None:
        box[0] = wanted if world.rank == 0 else None

    return BenchCase(
        len(pickle.dumps(wanted)),
        lambda: dist.broadcast_object_list(box, src=0, device=torch.device("cpu")),
        reset,
        lambda: int(box[0] != wanted),
    )


def _all_but_one(ranks: int) -> float:
    return (ranks - 1) / ranks


def _once(ranks: int) -> float:  # noqa: ARG001
    return 1.0


COLLECTIVES = {
    "all_reduce": Collective(all_reduce, lambda ranks: 2 * _all_but_one(ranks)),
    "all_gather": Collective(all_gather, _all_but_one),
    "reduce_scatter": Collective(reduce_scatter, _all_but_one),
    "broadcast": Collective(broadcast, _once),
    "reduce": Collective(reduce, _once),
    "gather": Collective(gather, _all_but_one),
    "scatter": Collective(scatter, _all_but_one),
    "all_to_all": Collective(all_to_all, _all_but_one),
    "barrier": Collective(barrier, _once, sized=False),
    "object": Collective(broadcast_object, _once),
}
"""By name in `kdist bench`."""
