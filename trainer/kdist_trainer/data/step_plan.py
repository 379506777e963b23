"""Splits the sample stream into steps, virtual shards and ranks.

A step takes the next `batch` positions, across an epoch's end; only the run's last step may be
shorter. The positions are split over virtual shards, and the shards over ranks, so the content of a
shard never depends on the number of ranks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

from kdist_trainer.config import TrainConfig, Training
from kdist_trainer.data.sampler import Order, SequentialOrder, make_order
from kdist_trainer.distributed.world import World
from kdist_trainer.errors import ConfigError, DataError
from kdist_trainer.stream import Stream, StreamSamples
from kdist_trainer.workload import Samples, Workload


class Chunk(NamedTuple):
    """The samples of one micro-batch, as offsets into the step's batch."""

    shard: int
    chunk: int
    """Number of the micro-batch within the shard."""
    first: int
    last: int
    """Offset after the last sample."""
    samples: int
    weight: float
    """1; 0 (with 0 samples) for the stand-in of a rank that has none in a short last step but
    must join its all-reduce.
    """
    too_small: bool = False
    """Too few samples for batch statistics: a stand-in, or a single sample in a short step where
    full steps have more.
    """


@dataclass(frozen=True)
class ShardAssignment:
    """How `batch` samples are split over `shards` virtual shards, and the shards over the ranks."""

    batch: int
    shards: int
    rank: int
    world_size: int
    micro_batch: int | None = None
    """Most samples in a micro-batch; None for whole shards."""
    even: bool = False
    """Give every rank equally many micro-batches, with stand-ins if necessary: a sharded model's
    forward pass is collective.
    """

    def __post_init__(self) -> None:
        if self.shards < self.world_size:
            raise ConfigError(
                f"train.virtualShards: {self.shards} shards cannot be split over "
                f"{self.world_size} ranks"
            )
        if self.batch < self.shards:
            raise ConfigError(
                f"train.globalBatch: {self.batch} samples cannot be split over "
                f"{self.shards} virtual shards"
            )

    def chunks(self, samples: int) -> list[Chunk]:
        """This rank's micro-batches in a step of `samples` samples; never empty."""
        chunks = self._chunks_of(self.rank, samples)
        wanted = (
            max(len(self._chunks_of(rank, samples)) for rank in range(self.world_size))
            if self.even
            else 1
        )
        # of consecutive shards, so that a rank reads consecutive positions
        first = split_range(self.shards, self.world_size, self.rank).start
        stand_in = Chunk(first, 0, 0, 1, 0, 0.0, too_small=True)
        return [*chunks, *[stand_in] * (max(1, wanted) - len(chunks))]

    def _chunks_of(self, rank: int, samples: int) -> list[Chunk]:
        chunks = []
        too_few = 1 if samples < self.batch and self._smallest() > 1 else 0
        for shard in split_range(self.shards, self.world_size, rank):
            own = split_range(samples, self.shards, shard)
            size = self.micro_batch or max(1, len(own))
            for chunk, start in enumerate(range(own.start, own.stop, size)):
                count = min(size, own.stop - start)
                chunks.append(
                    Chunk(
                        shard, chunk, start, start + count, count, 1.0, too_small=count <= too_few
                    )
                )
        return chunks

    def _smallest(self) -> int:
        """Samples of the smallest micro-batch of a full step, over all ranks."""
        sizes = {len(split_range(self.batch, self.shards, shard)) for shard in (0, self.shards - 1)}
        return min(
            (size % self.micro_batch or self.micro_batch) if self.micro_batch else size
            for size in sizes
        )


def split_range(total: int, parts: int, index: int) -> range:
    """Part `index` of `range(total)`, split into `parts` contiguous parts of equal length; the
    first parts get one more.
    """
    each, rest = divmod(total, parts)
    start = index * each + min(index, rest)
    return range(start, start + each + (index < rest))


class StepPlan:
    """What each step takes from the sample stream, from any position to the end of the run."""

    def __init__(
        self, order: Order, assignment: ShardAssignment, *, total: int, last: int | None = None
    ) -> None:
        """Plan a run of `total` samples. `last` is the last step of a run whose length is given in
        steps, which then determines `total`.
        """
        self.order = order
        self.assignment = assignment
        self.total = total
        self._last = last
        self._full_step = assignment.chunks(assignment.batch)

    def count(self, position: int = 0) -> int:
        """Steps from `position` to the end."""
        return max(0, -(-(self.total - position) // self.assignment.batch))

    def resume_at(self, *, step: int, position: int) -> int:
        """Continue after `step` steps that used `position` samples, whatever their batches were;
        returns the run's last step.
        """
        if self._last is not None:
            self.total = position + max(0, self._last - step) * self.assignment.batch
        return step + self.count(position)

    def past_end(self, *, step: int, position: int) -> str:
        """The length of the run in words, if `step` steps over `position` samples exceed it; empty
        otherwise.
        """
        if self._last is not None:
            return f"{self._last} steps" if step > self._last else ""
        return (
            f"{self.total} samples ({self.total // self.order.length} epochs)"
            if position > self.total
            else ""
        )

    def step_size(self, position: int) -> int:
        """Samples, over all ranks, of the step that starts at `position`."""
        return min(self.assignment.batch, self.total - position)

    def chunks(self, position: int) -> list[Chunk]:
        """This rank's micro-batches in the step that starts at `position`."""
        return self.chunks_of(self.step_size(position))

    def chunks_of(self, size: int) -> list[Chunk]:
        """This rank's micro-batches in a step of `size` samples."""
        return self._full_step if size == self.assignment.batch else self.assignment.chunks(size)


class DataPlan(NamedTuple):
    """The data of a run, as one rank reads it."""

    samples: Samples
    steps: StepPlan
    fingerprint: str
    """Identity of the data, and of everything else that the meaning of a position depends on."""

    @property
    def is_stream(self) -> bool:
        """Whether the data set is a stream, in which positions count steps of equal batches."""
        return isinstance(self.samples, StreamSamples)


def plan(
    config: TrainConfig,
    train: Training,
    workload: Workload,
    world: World,
    *,
    even: bool,
    opened: Samples | Stream | None = None,
) -> DataPlan:
    """Plan the data of a run; `opened` is the training split, if it was opened before. With `even`
    every rank runs equally many forward passes.

    Raises:
        DataError: If there are no samples.
        ConfigError: If the batch cannot be split over shards and ranks, or the samples are a stream
            and the length of the run is not given in steps.
    """
    # with as many shards as the job may have replicas, unless it says how many
    replicas = max(world.data_size, config.max_world_size(world.local_size) // world.model_parallel)
    shards = train.virtual_shards or replicas
    micro_batch = train.micro_batch
    if train.strategy == "pipeline":
        # Each pipeline gets as many micro-batches as the job asks for, whatever the present number
        # of replicas: what a step draws at random depends on the micro-batches.
        most = -(-train.global_batch // shards)
        chunks = -(-train.pipeline.microbatches * replicas // shards)
        micro_batch = min(train.micro_batch or most, -(-most // chunks))
    assignment = ShardAssignment(
        train.global_batch, shards, world.data_rank, world.data_size, micro_batch, even
    )
    name = f"{type(workload).__name__}.dataset('train')"
    samples = workload.dataset("train") if opened is None else opened
    if isinstance(samples, Stream):
        if train.steps is None:
            raise ConfigError(
                f"train.epochs: {name} is a stream, whose length is unknown; set train.steps "
                "instead"
            )
        read = StreamSamples(
            samples, batch=assignment.batch, shards=assignment.shards, seed=train.seed
        )
        in_order = SequentialOrder(length=len(read), seed=train.seed)
        total = train.steps * assignment.batch
        steps = StepPlan(in_order, assignment, total=total, last=train.steps)
        return DataPlan(read, steps, _digest(workload.fingerprint(read), read.describe()))
    if samples is None or len(samples) == 0:
        raise DataError(f"{name} has no samples")
    total = (train.steps or 0) * assignment.batch
    if train.epochs is not None:
        total = train.epochs * len(samples)
    weights = workload.weights(samples)
    order = make_order(len(samples), seed=train.seed, weights=weights)
    fingerprint = workload.fingerprint(samples)
    if weights is not None:
        # hashed in place: a copy of 1e8 weights would take 763 MiB
        values = weights.detach().cpu().double().contiguous().numpy().data
        fingerprint = _digest(fingerprint, hashlib.sha256(values).hexdigest())
    if order.algorithm:
        fingerprint = _digest(fingerprint, order.algorithm)
    steps = StepPlan(order, assignment, total=total, last=train.steps)
    return DataPlan(samples, steps, fingerprint)


def _digest(*parts: str) -> str:
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]
