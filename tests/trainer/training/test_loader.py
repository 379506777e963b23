"""How samples reach a rank: the same batches whoever fetches them, and wherever the run goes on."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kdist_trainer import config, torch_internals
from kdist_trainer.data.loader import Batch, Loader, fetcher
from kdist_trainer.data.sampler import Order
from kdist_trainer.data.step_plan import ShardAssignment, StepPlan
from kdist_trainer.workload import Samples, Split, WorkloadContext
from tests.patience import soon
from tests.trainer.training.tasks import Small


class Noisy:
    """Draws from every generator while it makes a sample."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[int, Tensor, float, float]:
        return index, torch.rand(2), float(np.random.rand()), random.random()


class NoisyWhole(Noisy):
    """The same by the batch."""

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return indices, torch.rand(len(indices), 2)


class Augmented(Small):
    """A workload over `Noisy` samples."""

    def dataset(self, split: Split) -> Samples:  # type: ignore[override]  # noqa: ARG002
        return Noisy()


class Stuck(Noisy):
    """The first sample comes, and no other one."""

    def __getitem__(self, index: int) -> tuple[int, Tensor, float, float]:
        if len(self.given):
            threading.Event().wait()
        self.given.append(index)
        return super().__getitem__(index)

    def __init__(self) -> None:
        self.given: list[int] = []


def make_loader(samples: Samples, *, workers: int = 0, size: int = 2, rank: int = 0) -> Loader:
    workload = Augmented(WorkloadContext())
    steps = StepPlan(
        Order(length=len(samples), seed=1),
        ShardAssignment(6, 3, rank, size, micro_batch=1),
        total=2 * len(samples),
    )
    return Loader(steps, workload, samples, settings=config.LoaderConfig(workers=workers), seed=9)


def plain(batches: Iterator[Batch]) -> list[Any]:
    return [
        (
            batch.first,
            batch.samples,
            [
                (*piece[:4], *(values_of(part) for part in piece.batch))
                for piece in batch.micro_batches
            ],
        )
        for batch in batches
    ]


def values_of(part: Any) -> Any:
    return part.tolist() if isinstance(part, Tensor) else part


@pytest.mark.processes
def test_loader_processes_give_the_batches_that_the_rank_would_fetch_itself() -> None:
    here, ahead = (
        plain(make_loader(Noisy(), workers=workers).batches(step=0, position=0))
        for workers in (0, 2)
    )
    assert len(here) == 8
    assert here == ahead


@pytest.mark.parametrize("samples", [Noisy(), NoisyWhole()])
def test_a_loader_that_goes_on_gives_what_the_first_one_would_have(samples: Samples) -> None:
    whole = plain(make_loader(samples).batches(step=0, position=0))
    for step in range(1, len(whole)):
        assert plain(make_loader(samples).batches(step=step, position=6 * step)) == whole[step:]


def test_randomness_follows_the_shard_and_not_the_rank() -> None:
    def by_shard(size: int) -> dict[tuple[int, int, int], Any]:
        found: dict[tuple[int, int, int], Any] = {}
        for rank in range(size):
            for first, _, pieces in plain(
                make_loader(Noisy(), size=size, rank=rank).batches(step=0, position=0)
            ):
                found |= {(first, piece[0], piece[1]): piece for piece in pieces if piece[2]}
        return found

    assert by_shard(1) == by_shard(2) == by_shard(3)


def test_no_two_pieces_draw_the_same() -> None:
    drawn = [
        tuple(piece[6])
        for *_, pieces in plain(make_loader(Noisy()).batches(step=0, position=0))
        for piece in pieces
    ]
    assert len(drawn) == len(set(drawn)) > 20


def test_tensors_are_taken_with_one_index_as_their_samples_one_by_one() -> None:
    workload = Small(WorkloadContext())
    samples = workload.dataset("train")
    indices = torch.tensor([4, 1, 1, 30])
    at_once = fetcher(workload, samples)(indices, 0)
    one_by_one = workload.collate([samples[index] for index in indices.tolist()])
    assert all(torch.equal(a, b) for a, b in zip(at_once, one_by_one, strict=True))


def test_the_first_sample_serves_a_warm_up_even_where_the_run_is_shorter_than_a_batch() -> None:
    steps = StepPlan(Order(length=2, seed=1), ShardAssignment(6, 3, 2, 3), total=2)
    workload = Small(WorkloadContext({"length": 2}))
    piece = Loader(
        steps, workload, workload.dataset("train"), settings=config.LoaderConfig(), seed=0
    ).first_micro_batch()
    assert (piece.weight, len(piece.batch[0])) == (0.0, 1)


@pytest.mark.sampled
@pytest.mark.processes
def test_a_loader_process_that_hangs_in_the_users_code_ends_with_the_loader() -> None:
    loader = make_loader(Stuck(), workers=1)
    loader._fetch_from(0, 0)
    assert soon(loader.prefetched, seconds=60), "it has begun, and hangs at the second sample"
    (process,) = torch_internals.workers_of(loader._prefetching)
    loader.close()
    process.join(60)
    assert not process.is_alive()
