"""The stream of samples, and the part of each step that belongs to a rank.

The stream is the concatenation of the epochs' permutations. A step takes the next `batch`
positions, across an epoch's end; only the run's last step may be shorter. They are dealt to virtual
shards, and the shards to ranks, so that what a shard holds never depends on how many ranks there
are.

The course of a run through its data: which samples there are, in which order, and how each step
deals them out.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kdist_trainer.config import TrainConfig, Training
from kdist_trainer.errors import ConfigError, DataError
from kdist_trainer.rng import ORDER, derive
from kdist_trainer.stream import Stream, StreamSamples
from kdist_trainer.workload import Samples, Workload
from kdist_trainer.world import World


class Order:
    """The samples at stream positions 0, 1, 2, …: one permutation of the whole set after the
    other.
    """

    marking = ""

    def __init__(self, *, length: int, seed: int) -> None:
        if length < 1:
            raise DataError("the data set is empty")
        self.length = length
        self._seed = seed
        self._cached: dict[int, Tensor] = {}
        self._current = torch.empty(0, dtype=torch.int64)
        self._begin = 0

    def epoch(self, number: int) -> Tensor:
        """Permutation of epoch `number` (0 = first): int64, shape [length]."""
        if number not in self._cached:
            seed = derive(self._seed, ORDER, number)
            # NumPy promises that RandomState's streams never change, torch does not: the order must
            # survive an upgrade.
            drawn = self._draw(np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32]))
            self._cached = {key: value for key, value in self._cached.items() if key == number - 1}
            self._cached[number] = torch.from_numpy(drawn)
        return self._cached[number]

    def _draw(self, random: np.random.RandomState) -> npt.NDArray[np.int64]:
        drawn: npt.NDArray[np.int64] = random.permutation(self.length).astype(np.int64, copy=False)
        return drawn

    def between(self, first: int, last: int) -> Tensor:
        """Indices of the samples at positions `first` (included) to `last` (excluded): int64, shape
        [last - first].
        """
        start, stop = first - self._begin, last - self._begin
        if start >= 0 and stop <= len(self._current):
            return self._current[start:stop]
        number, start = divmod(first, self.length)
        stop = start + last - first
        if stop <= self.length:
            self._current, self._begin = self.epoch(number), first - start
            return self._current[start:stop]
        rest = self.between((number + 1) * self.length, last)
        return torch.cat([self.epoch(number)[start:], rest])


LARGE = 2**22
"""Samples from which on no list of a permutation is made: at 1e8 it takes 43 s and 763 MiB, in
every rank.
"""
_BLOCK = 2**14


class Computed(Order):
    """An order of which any position is computed where it is asked for, a block of them at a
    time.
    """

    def between(self, first: int, last: int) -> Tensor:
        """Indices of the samples at positions `first` (included) to `last` (excluded): int64, shape
        [last - first].
        """
        start, stop = first - self._begin, last - self._begin
        if start < 0 or stop > len(self._current):
            ahead = min(first + _BLOCK, (first // self.length + 1) * self.length)
            self._current, self._begin = self._compute(first, max(last, ahead)), first
            start, stop = 0, last - first
        return self._current[start:stop]

    def _compute(self, first: int, last: int) -> Tensor:
        raise NotImplementedError


class Keyed(Computed):
    """The order of a large set: each epoch a keyed bijection of its positions, computed where it is
    asked for.

    A Feistel network over the smallest power of two that holds the set, applied again while it
    leads outside of the set (cycle walking): J. Black and P. Rogaway, Ciphers with Arbitrary Finite
    Domains, CT-RSA 2002. Its round function is the finisher of splitmix64 (G. Steele, D. Lea, C.
    Flood, OOPSLA 2014). Any position costs the same, so a resume waits for none.
    """

    rounds = 12
    marking = "feistel-splitmix64-12"
    """What this order is called in a fingerprint: a position means other samples under another
    one.
    """

    def __init__(self, *, length: int, seed: int) -> None:
        super().__init__(length=length, seed=seed)
        bits = max(2, (length - 1).bit_length())
        self._low = np.uint64(bits // 2)
        self._masks = np.uint64((1 << (bits // 2)) - 1), np.uint64((1 << (bits - bits // 2)) - 1)
        self._keyed = -1
        self._keys: list[np.uint64] = []

    def _compute(self, first: int, last: int) -> Tensor:
        parts = []
        for number in range(first // self.length, (last - 1) // self.length + 1):
            begin = number * self.length
            own = np.arange(
                max(first, begin) - begin, min(last, begin + self.length) - begin, dtype=np.uint64
            )
            parts.append(torch.from_numpy(self._permuted(number, own).astype(np.int64)))
        return torch.cat(parts)

    def _permuted(self, number: int, places: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Where epoch `number` leads from these places, each in [0, length)."""
        if number != self._keyed:
            seed = derive(self._seed, ORDER, number)
            self._keys, self._keyed = (
                [np.uint64(derive(seed, ORDER, index)) for index in range(self.rounds)],
                number,
            )
        found = self._network(places)
        while (outside := np.flatnonzero(found >= np.uint64(self.length))).size:
            found[outside] = self._network(found[outside])
        return found

    def _network(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """One pass: the halves in turn are changed by what the key makes of the other, which can be
        taken back.
        """
        low, high = values & self._masks[0], values >> self._low
        for first, second in zip(self._keys[::2], self._keys[1::2], strict=True):
            high = high ^ (_mix(low ^ first) & self._masks[1])
            low = low ^ (_mix(high ^ second) & self._masks[0])
        return (high << self._low) | low


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Weighted(Order):
    """Samples drawn with replacement, each as often as its weight says; an epoch is as many draws
    as there are samples.
    """

    def __init__(self, *, weights: Tensor, length: int, seed: int) -> None:
        """Raises `DataError` for weights that are no weights of `length` samples."""
        super().__init__(length=length, seed=seed)
        if weights.shape != (length,):
            raise DataError(
                f"weights() must give one number for each of {length} samples, and gave "
                f"{tuple(weights.shape)}"
            )
        values = weights.detach().cpu().numpy().astype(np.float64, copy=False)
        if not np.isfinite(values).all() or (values < 0).any() or not values.any():
            raise DataError("weights() must give numbers of 0 or more, finite and not all 0")
        self._ends = np.cumsum(values)
        self._last = length - 1 - int(np.argmax(values[::-1] != 0))

    def _draw(self, random: np.random.RandomState) -> npt.NDArray[np.int64]:
        return self._fall(random.random_sample(self.length))

    def _fall(self, places: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """The samples on which places in [0, 1) fall."""
        # A draw that falls on the border belongs to the next sample, so that weight 0 is never
        # drawn.
        drawn = np.searchsorted(self._ends, places * self._ends[-1], side="right")
        kept: npt.NDArray[np.int64] = np.minimum(drawn, self._last).astype(np.int64, copy=False)
        return kept


class WeightedByPosition(Weighted, Computed):
    """The same for a large set: the draw at a position follows from it alone, by splitmix64, and no
    epoch is drawn as a whole.
    """

    marking = "splitmix64"

    def _compute(self, first: int, last: int) -> Tensor:
        key = np.uint64(derive(self._seed, ORDER, self.length))
        states = key + np.arange(first + 1, last + 1, dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        places = (_mix(states) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return torch.from_numpy(self._fall(places))


def order_of(length: int, *, seed: int, weights: Tensor | None = None) -> Order:
    """The order of a set of so many samples. Raises `DataError` for weights that are none."""
    large = length >= LARGE
    if weights is not None:
        return (WeightedByPosition if large else Weighted)(
            weights=weights, length=length, seed=seed
        )
    return (Keyed if large else Order)(length=length, seed=seed)


class SequentialOrder(Order):
    """The order of a stream, which has no other: position 0, 1, 2, …."""

    def between(self, first: int, last: int) -> Tensor:
        """These positions: int64, shape [last - first]."""
        return torch.arange(first, last)


class Chunk(NamedTuple):
    """One forward pass: a chunk of a shard, as offsets into the step's batch."""

    shard: int
    chunk: int
    first: int
    last: int
    samples: int
    weight: float
    """1, or 0 (with 0 samples) for the stand-in of a rank that has none in a short last step but
    must join its all-reduce.
    """
    scant: bool = False
    """Too few samples for statistics of their own: a stand-in, or a single sample in a short step
    whose like is larger.
    """


@dataclass(frozen=True)
class ShardAssignment:
    """How `batch` samples are dealt to `shards` virtual shards, and the shards to the ranks."""

    batch: int
    shards: int
    rank: int
    world_size: int
    micro_batch: int | None = None
    even: bool = False
    """Give every rank equally many parts, by stand-ins where need be: a sharded model's forward
    pass is collective.
    """

    def __post_init__(self) -> None:
        if self.shards < self.world_size:
            raise ConfigError(
                f"train.virtualShards: {self.shards} shards cannot be dealt to "
                f"{self.world_size} ranks"
            )
        if self.batch < self.shards:
            raise ConfigError(
                f"train.globalBatch: {self.batch} samples cannot be dealt to "
                f"{self.shards} virtual shards"
            )

    def own_shards(self) -> range:
        """Shards of this rank: neighbours, so that a rank reads neighbouring positions. The first
        ranks get one more.
        """
        return share_of(self.shards, self.world_size, self.rank)

    def parts(self, samples: int) -> list[Chunk]:
        """This rank's forward passes in a step of `samples` samples; never empty."""
        parts = self._parts_of(self.rank, samples)
        wanted = (
            max(len(self._parts_of(rank, samples)) for rank in range(self.world_size))
            if self.even
            else 1
        )
        stand_in = Chunk(self.own_shards().start, 0, 0, 1, 0, 0.0, scant=True)
        return [*parts, *[stand_in] * (max(1, wanted) - len(parts))]

    def _parts_of(self, rank: int, samples: int) -> list[Chunk]:
        parts = []
        lone = 1 if samples < self.batch and self._least() > 1 else 0
        for shard in share_of(self.shards, self.world_size, rank):
            own = share_of(samples, self.shards, shard)
            size = self.micro_batch or max(1, len(own))
            for chunk, start in enumerate(range(own.start, own.stop, size)):
                count = min(size, own.stop - start)
                parts.append(
                    Chunk(shard, chunk, start, start + count, count, 1.0, scant=count <= lone)
                )
        return parts

    def _least(self) -> int:
        """Samples of the smallest part of a full step, over all ranks."""
        sizes = {len(share_of(self.batch, self.shards, shard)) for shard in (0, self.shards - 1)}
        return min(
            (size % self.micro_batch or self.micro_batch) if self.micro_batch else size
            for size in sizes
        )


def share_of(total: int, holders: int, holder: int) -> range:
    """The contiguous share of one holder when `total` things are dealt; the first holders get one
    more.
    """
    each, rest = divmod(total, holders)
    start = holder * each + min(holder, rest)
    return range(start, start + each + (holder < rest))


class StepPlan:
    """What each step takes from the stream, from any position to the end of a run of `total`
    samples, or of `last` steps.
    """

    def __init__(
        self, order: Order, deal: ShardAssignment, *, total: int, last: int | None = None
    ) -> None:
        self.order = order
        self.deal = deal
        self.total = total
        self._last = last
        self._full = deal.parts(deal.batch)

    def count(self, position: int = 0) -> int:
        """Steps from `position` to the end."""
        return max(0, -(-(self.total - position) // self.deal.batch))

    def go_on(self, *, step: int, position: int) -> int:
        """Go on after `step` steps that used `position` samples, whatever their batches were;
        returns the run's last step.
        """
        if self._last is not None:
            self.total = position + max(0, self._last - step) * self.deal.batch
        return step + self.count(position)

    def past_end(self, *, step: int, position: int) -> str:
        """What a run asks for, if `step` steps over `position` samples are more than that; empty
        where they are not.
        """
        if self._last is not None:
            return f"{self._last} steps" if step > self._last else ""
        return (
            f"{self.total} samples ({self.total // self.order.length} epochs)"
            if position > self.total
            else ""
        )

    def size(self, position: int) -> int:
        """Samples, over all ranks, of the step that begins at `position`."""
        return min(self.deal.batch, self.total - position)

    def parts(self, position: int) -> list[Chunk]:
        """This rank's forward passes in the step that begins at `position`."""
        size = self.size(position)
        return self._full if size == self.deal.batch else self.deal.parts(size)


class DataPlan(NamedTuple):
    """What a rank's loop needs of the data."""

    samples: Samples
    steps: StepPlan
    fingerprint: str
    """Identity of the data and of what else a position in it depends on."""

    @property
    def is_stream(self) -> bool:
        """Whether a position goes by steps of equal batches."""
        return isinstance(self.samples, StreamSamples)


def plan(
    config: TrainConfig, train: Training, workload: Workload, world: World, *, even: bool
) -> DataPlan:
    """The run's course.

    Raises `DataError` where there are no samples, `ConfigError` where the batch cannot be dealt to
    shards and ranks.
    """
    deal = deal_steps(config, train, world, even=even)
    name, found = f"{type(workload).__name__}.dataset('train')", workload.dataset("train")
    if isinstance(found, Stream):
        if train.steps is None:
            raise ConfigError(
                f"train.epochs: {name} is a stream, whose end nobody knows; say how many "
                "steps instead"
            )
        stream = StreamSamples(found, batch=deal.batch, shards=deal.shards, seed=train.seed)
        total = train.steps * deal.batch
        fingerprint = _digest(workload.fingerprint(stream), stream.describe())
        return DataPlan(
            stream,
            StepPlan(
                SequentialOrder(length=len(stream), seed=train.seed),
                deal,
                total=total,
                last=train.steps,
            ),
            fingerprint,
        )
    if found is None or len(found) == 0:
        raise DataError(f"{name} has no samples")
    total = (
        train.epochs * len(found) if train.epochs is not None else (train.steps or 0) * deal.batch
    )
    weights = workload.weights(found)
    order, fingerprint = (
        order_of(len(found), seed=train.seed, weights=weights),
        workload.fingerprint(found),
    )
    if weights is not None:
        # no copy: of 1e8 samples that is 763 MiB
        held = weights.detach().cpu().double().contiguous().numpy().data
        fingerprint = _digest(fingerprint, hashlib.sha256(held).hexdigest())
    if order.marking:
        fingerprint = _digest(fingerprint, order.marking)
    return DataPlan(found, StepPlan(order, deal, total=total, last=train.steps), fingerprint)


def deal_steps(
    config: TrainConfig, train: Training, world: World, *, even: bool
) -> ShardAssignment:
    """How each step is dealt. Raises `ConfigError` where the batch cannot be dealt to shards and
    ranks.
    """
    copies = max(world.data_size, config.max_world_size(world.local_size) // world.model_parallel)
    shards = train.virtual_shards or copies
    micro_batch = (
        pipelined_batch(train, shards, copies)
        if train.strategy == "pipeline"
        else train.micro_batch
    )
    return ShardAssignment(
        train.global_batch, shards, world.data_rank, world.data_size, micro_batch, even
    )


def pipelined_batch(train: Training, shards: int, copies: int) -> int:
    """Samples in a microbatch, so that each of at most `copies` pipelines has as many as the job
    asks for.

    It does not depend on how many there are now, since what a step draws at random goes by
    microbatches.
    """
    share = -(-train.global_batch // shards)
    chunks = -(-train.pipeline.microbatches * copies // shards)
    return min(train.micro_batch or share, -(-share // chunks))


def _digest(*parts: str) -> str:
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]
