"""The course of a run through its data: which samples there are, in which order, and how each step deals them out."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from kdist_trainer.config import TrainConfig, Training
from kdist_trainer.data.order import Deal, Positions, Steps, order_of
from kdist_trainer.failure import ConfigProblem, DataProblem
from kdist_trainer.stream import Stream, StreamSamples
from kdist_trainer.workload import Samples, Workload
from kdist_trainer.world import World


class Course(NamedTuple):
    """What a rank's loop needs of the data."""

    samples: Samples
    steps: Steps
    fingerprint: str
    """Identity of the data and of what else a position in it depends on."""

    @property
    def is_stream(self) -> bool:
        """Whether a position goes by steps of equal batches."""
        return isinstance(self.samples, StreamSamples)


def plan(config: TrainConfig, train: Training, workload: Workload, world: World, *, even: bool) -> Course:
    """The run's course.

    Raises `DataProblem` where there are no samples, `ConfigProblem` where the batch cannot be dealt to shards and ranks.
    """
    deal = deal_steps(config, train, world, even=even)
    name, found = f"{type(workload).__name__}.dataset('train')", workload.dataset("train")
    if isinstance(found, Stream):
        if train.steps is None:
            raise ConfigProblem(f"train.epochs: {name} is a stream, whose end nobody knows; say how many steps instead")
        stream = StreamSamples(found, batch=deal.batch, shards=deal.shards, seed=train.seed)
        total = train.steps * deal.batch
        fingerprint = _digest(workload.fingerprint(stream), stream.describe())
        return Course(
            stream, Steps(Positions(length=len(stream), seed=train.seed), deal, total=total, last=train.steps), fingerprint
        )
    if found is None or len(found) == 0:
        raise DataProblem(f"{name} has no samples")
    total = train.epochs * len(found) if train.epochs is not None else (train.steps or 0) * deal.batch
    weights = workload.weights(found)
    order, fingerprint = order_of(len(found), seed=train.seed, weights=weights), workload.fingerprint(found)
    if weights is not None:
        held = weights.detach().cpu().double().contiguous().numpy().data  # no copy: of 1e8 samples that is 763 MiB
        fingerprint = _digest(fingerprint, hashlib.sha256(held).hexdigest())
    if order.marking:
        fingerprint = _digest(fingerprint, order.marking)
    return Course(found, Steps(order, deal, total=total, last=train.steps), fingerprint)


def deal_steps(config: TrainConfig, train: Training, world: World, *, even: bool) -> Deal:
    """How each step is dealt. Raises `ConfigProblem` where the batch cannot be dealt to shards and ranks."""
    copies = max(world.data_size, config.max_world_size(world.local_size) // world.model_parallel)
    shards = train.virtual_shards or copies
    micro_batch = pipelined_batch(train, shards, copies) if train.strategy == "pipeline" else train.micro_batch
    return Deal(train.global_batch, shards, world.data_rank, world.data_size, micro_batch, even)


def pipelined_batch(train: Training, shards: int, copies: int) -> int:
    """Samples in a microbatch, so that each of at most `copies` pipelines has as many as the job asks for.

    It does not depend on how many there are now, since what a step draws at random goes by microbatches.
    """
    share = -(-train.global_batch // shards)
    chunks = -(-train.pipeline.microbatches * copies // shards)
    return min(train.micro_batch or share, -(-share // chunks))


def _digest(*parts: str) -> str:
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]
