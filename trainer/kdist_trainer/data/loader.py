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

from kdist_trainer import config
from kdist_trainer.data.order import Part, Steps
from kdist_trainer.randomness import FETCH, derive, generators
from kdist_trainer.workload import Samples, Workload


class Piece(NamedTuple):
    """One forward pass with its samples."""

    shard: int
    chunk: int
    samples: int
    """0 for the stand-in of a rank without a sample, whose weight is 0 too."""
    weight: float
    batch: Any


class Batch(NamedTuple):
    """This rank's part of one step."""

    first: int
    """Position of the step's first sample in the stream."""
    samples: int
    """Samples in the step, over all ranks."""
    pieces: list[Piece]

    @property
    def own_samples(self) -> int:
        """Samples of this rank."""
        return sum([piece.samples for piece in self.pieces])


Fetch = Callable[[Tensor, int], Any]
"""(indices of samples, seed) -> batch."""


def fetcher(workload: Workload, samples: Samples) -> Fetch:
    """The fastest way to take a batch from these samples: one index where they are tensors, else one sample at a time."""
    if isinstance(samples, TensorDataset) and type(workload).collate is Workload.collate:
        tensors = samples.tensors
        return lambda indices, _: [tensor.index_select(0, indices) for tensor in tensors]
    set_generators = generators(torch.device("cpu"))
    whole = getattr(samples, "fetch", None)

    def fetch(indices: Tensor, seed: int) -> Any:
        set_generators(seed)
        if whole is not None:
            return whole(indices)
        return workload.collate([samples[index] for index in indices.tolist()])

    return fetch


class _Request(NamedTuple):
    part: Part
    indices: Tensor
    seed: int


class _Pieces(Dataset[Piece]):
    """What a loader process works on: a request is answered by its piece."""

    def __init__(self, workload: Workload, samples: Samples) -> None:
        self._workload, self._samples = workload, samples
        self._fetch: Fetch | None = None

    def __getitem__(self, request: _Request) -> Piece:
        if self._fetch is None:  # closures do not travel to another process
            self._fetch = fetcher(self._workload, self._samples)
        return _answer(request, self._fetch)


def _answer(request: _Request, fetch: Fetch) -> Piece:
    part = request.part
    samples = part.last - part.first if part.weight else 0
    return Piece(part.shard, part.chunk, samples, part.weight, fetch(request.indices, request.seed))


class _Requests:
    """All of a rank's requests from one position on, in order."""

    def __init__(self, steps: Steps, *, seed: int, step: int, position: int) -> None:
        self._steps, self._seed, self._step, self._position = steps, seed, step, position

    def __iter__(self) -> Iterator[_Request]:
        steps, step, position = self._steps, self._step, self._position
        while position < steps.total:
            for part in steps.parts(position):
                yield request_of(steps, part, seed=self._seed, step=step, position=position)
            step, position = step + 1, position + steps.size(position)


def request_of(steps: Steps, part: Part, *, seed: int, step: int, position: int) -> _Request:
    """What must be fetched for one part of the step that begins at `position`."""
    indices = steps.order.between(position + part.first, position + part.last)
    return _Request(part, indices, derive(seed, FETCH, step, part.shard, part.chunk))


def _unchanged(piece: Piece) -> Piece:
    return piece


class Loader:
    """The batches of one rank from any step on."""

    def __init__(self, steps: Steps, workload: Workload, samples: Samples, *, settings: config.Loader, seed: int) -> None:
        self._steps, self._workload, self._samples, self._settings, self._seed = steps, workload, samples, settings, seed
        self._on_cpu = workload.context.device.type == "cpu"

    def sample(self) -> Piece:
        """This rank's first piece of the run, fetched here and now: something to warm up with."""
        request = request_of(self._steps, self._steps.parts(0)[0], seed=self._seed, step=0, position=0)
        return self._moved(_answer(request, fetcher(self._workload, self._samples)))

    def batches(self, *, step: int, position: int) -> Iterator[Batch]:
        """Every step's batch, after `step` steps and `position` samples."""
        requests = _Requests(self._steps, seed=self._seed, step=step, position=position)
        pieces = self._ahead(requests) if self._settings.workers else self._at_once(requests)
        while position < self._steps.total:
            size = self._steps.size(position)
            yield Batch(position, size, [self._moved(next(pieces)) for _ in self._steps.parts(position)])
            position += size

    def _at_once(self, requests: _Requests) -> Iterator[Piece]:
        fetch = fetcher(self._workload, self._samples)
        return (_answer(request, fetch) for request in requests)

    def _ahead(self, requests: _Requests) -> Iterator[Piece]:
        loader: DataLoader[Piece] = DataLoader(
            _Pieces(self._workload, self._samples),
            batch_size=None,
            sampler=requests,  # torch speaks of indices, and passes on whatever it is given
            num_workers=self._settings.workers,
            prefetch_factor=self._settings.prefetch,
            collate_fn=_unchanged,  # type: ignore[arg-type]  # without a batch size it is handed single items
            pin_memory=not self._on_cpu,
            multiprocessing_context="forkserver",  # a fork would copy gloo's threads half-way
        )
        return iter(loader)

    def _moved(self, piece: Piece) -> Piece:
        return piece if self._on_cpu else piece._replace(batch=self._workload.to_device(piece.batch))
