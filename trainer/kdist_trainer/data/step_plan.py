"""How the sample stream is divided into steps, virtual shards and ranks.

A step takes the next `batch` positions, across an epoch's end; only the run's last step may be
shorter. The positions are split over virtual shards, and the shards over ranks, so the content of a
shard never depends on the number of ranks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

from kdist_trainer.config import TrainConfig, Training
from kdist_trainer.data.sampler import Order, SequentialOrder, order_of
from kdist_trainer.errors import ConfigError, DataError
from kdist_trainer.stream import Stream, StreamSamples
from kdist_trainer.workload import Samples, Workload
from kdist_trainer.world import World


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
