"""Bring the samples of step after step to a rank: in the rank itself, or ahead of time in processes.

Whatever a data set draws at random while it makes a sample follows from (seed, step, shard, chunk), so the batches are the
same with any number of loader processes and after any resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from kdist_trainer.data.order import Deal, Order, Part
from kdist_trainer.randomness import FETCH, derive, generators
from kdist_trainer.workload import Samples, Workload


class Piece(NamedTuple):
    """One forward pass with its samples."""

    shard: int
    chunk: int
    samples: int
    weight: float
    batch: Any


class Batch(NamedTuple):
    """This rank's part of one step."""

    first: int
    """Position of the step's first sample in the stream."""
    samples: int
    """Samples in the step, over all ranks."""
    pieces: list[Piece]


Fetch = Callable[[Tensor, int], Any]
"""(indices, seed) -> batch."""


def fetcher(workload: Workload, samples: Samples) -> Fetch:
    """The fastest way to take a batch from these samples: one index where they are tensors, else one sample at a time."""
    if isinstance(samples, TensorDataset):
        tensors = samples.tensors
        return lambda indices, _: tuple(tensor.index_select(0, indices) for tensor in tensors)
    seed_all = generators(torch.device("cpu"))
    whole = getattr(samples, "fetch", None)

    def fetch(indices: Tensor, seed: int) -> Any:
        seed_all(seed)
        if whole is not None:
            return whole(indices)
        return workload.collate([samples[index] for index in indices.tolist()])

    return fetch


class Steps:
    """What each step asks of the data set, from any position to the end of the run."""

    def __init__(self, order: Order, deal: Deal, *, total: int, seed: int) -> None:
        self.order, self.deal, self.total, self.seed = order, deal, total, seed
        self._full = deal.parts(deal.batch)

    def count(self) -> int:
        """Steps in the whole run."""
        return -(-self.total // self.deal.batch)

    def size(self, position: int) -> int:
        """Samples of the step that starts at `position`."""
        return min(self.deal.batch, self.total - position)

    def parts(self, position: int) -> list[Part]:
        """This rank's forward passes in the step that starts at `position`."""
        size = self.size(position)
        return self._full if size == self.deal.batch else self.deal.parts(size)


def batches(
    steps: Steps, fetch: Fetch, *, step: int, position: int, move: Callable[[Any], Any]
) -> Iterator[Batch]:
    """Every step's batch from `position` on, fetched when it is asked for."""
    between, seed, total = steps.order.between, steps.seed, steps.total
    while position < total:
        step += 1
        pieces = [
            Piece(
                part.shard,
                part.chunk,
                part.last - part.first,
                part.weight,
                move(
                    fetch(
                        between(position + part.first, position + part.last),
                        derive(seed, FETCH, step, part.shard, part.chunk),
                    )
                ),
            )
            for part in steps.parts(position)
        ]
        size = steps.size(position)
        yield Batch(position, size, pieces)
        position += size
