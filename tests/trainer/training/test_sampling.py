"""Weighted draws and streams: the same samples at any number of ranks and after any resume, and
none lost or doubled.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import TensorDataset

from kdist_trainer import config
from kdist_trainer.data.loader import Loader, fetcher
from kdist_trainer.data.sampler import (
    LARGE,
    ComputedWeightedOrder,
    SequentialOrder,
    WeightedOrder,
    make_order,
)
from kdist_trainer.data.step_plan import ShardAssignment, StepPlan
from kdist_trainer.errors import ConfigError, DataError
from kdist_trainer.stream import Stream, StreamSamples
from kdist_trainer.workload import Samples, Split, WorkloadContext
from tests.trainer.training.group import RankFailed
from tests.trainer.training.tasks import (
    FEATURES,
    Small,
    Unseeded,
    describe,
    done,
    losses,
    train_here,
)


class Numbered(Stream):
    """Files that hold so many samples each; a sample is (file, number)."""

    def __init__(self, counts: Sequence[int], *, known: bool) -> None:
        self.counts = list(counts)
        self.known = known
        self.reads = 0

    def files(self) -> list[str]:
        return [str(index) for index in range(len(self.counts))]

    def read(self, file: str) -> Iterator[tuple[int, int]]:
        for number in range(self.counts[int(file)]):
            self.reads += 1
            yield int(file), number

    def count(self, file: str) -> int | None:
        return self.counts[int(file)] if self.known else None


class Drawn(Small):
    """Draws the samples of even number only, and those of number 0 four times as often."""

    def weights(self, samples: Samples) -> Tensor:
        found = (torch.arange(len(samples)) % 2 == 0).double()
        found[0] = 4
        return found


class Streamed(Small):
    """Reads its samples from a stream. Options: files."""

    def dataset(self, split: Split) -> Any:
        whole: TensorDataset = super().dataset("train")
        if split == "train":
            return Files(whole, self.context.options.get("files", 6))
        return super().dataset(split)


class Files(Stream):
    """A data set as if it were in files; of how many samples each is not known beforehand."""

    def __init__(self, whole: TensorDataset, files: int) -> None:
        self.whole = whole
        self.number = files

    def files(self) -> list[str]:
        return [f"part-{index}" for index in range(self.number)]

    def read(self, file: str) -> Iterator[Any]:
        for index in range(int(file.removeprefix("part-")), len(self.whole), self.number):
            yield self.whole[index]


# shards, samples a shard and step, further files
shapes = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 5))


KINDS = pytest.mark.parametrize("kind", [WeightedOrder, ComputedWeightedOrder])


@KINDS
@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.integers(0, 9), min_size=1, max_size=30).filter(any),
    seed=st.integers(0, 2**62),
)
def test_draws_follow_the_weights_and_nothing_of_weight_0_is_drawn(
    kind: type[WeightedOrder], weights: list[int], seed: int
) -> None:
    order = kind(weights=torch.tensor(weights), length=len(weights), seed=seed)
    drawn = Counter(order.between(0, 40 * len(weights)).tolist())
    assert all(weights[index] > 0 for index in drawn)
    assert sum(drawn.values()) == 40 * len(weights)


@KINDS
def test_a_sample_is_drawn_as_often_as_its_share_of_the_weights_says(
    kind: type[WeightedOrder],
) -> None:
    order = kind(weights=torch.tensor([1.0, 3.0, 0.0, 4.0]), length=4, seed=1)
    drawn = Counter(
        index
        for epoch in range(10_000)
        for index in order.between(4 * epoch, 4 * epoch + 4).tolist()
    )
    assert [round(drawn[index] / 40_000, 1) for index in range(4)] == [0.1, 0.4, 0.0, 0.5]


@KINDS
@settings(max_examples=60, deadline=None)
@given(length=st.integers(1, 20), first=st.integers(0, 100), count=st.integers(0, 60))
def test_draws_depend_on_the_position_alone(
    kind: type[WeightedOrder], length: int, first: int, count: int
) -> None:
    weights = torch.arange(1, length + 1)
    whole = kind(weights=weights, length=length, seed=3).between(0, first + count).tolist()
    part = kind(weights=weights, length=length, seed=3).between(first, first + count).tolist()
    assert part == whole[first:]


@pytest.mark.parametrize(
    "weights", [[1.0], [1.0, -1.0], [0.0, 0.0], [1.0, float("nan")], [1.0, float("inf")]]
)
def test_numbers_that_are_no_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(DataError, match=r"weights\(\)"):
        WeightedOrder(weights=torch.tensor(weights), length=2, seed=0)


def test_the_draws_stay_what_they_were_when_libraries_are_upgraded() -> None:
    for kind, golden in GOLDEN.items():
        order = kind(weights=torch.tensor([1.0, 2.0, 3.0, 4.0]), length=4, seed=2)
        assert order.between(0, 12).tolist() == golden


GOLDEN = {
    WeightedOrder: [2, 1, 1, 3, 2, 0, 3, 3, 2, 1, 2, 3],
    ComputedWeightedOrder: [3, 2, 3, 3, 1, 3, 3, 2, 3, 1, 1, 1],
}


def test_only_the_draws_of_a_large_set_are_computed_one_by_one() -> None:
    kinds = [
        type(make_order(length, seed=0, weights=torch.ones(length)))
        for length in (1, LARGE - 1, LARGE)
    ]
    assert kinds == [WeightedOrder, WeightedOrder, ComputedWeightedOrder]


def read_by(
    ranks: int, stream: Numbered, *, batch: int, shards: int, first: int, last: int
) -> list[tuple[int, int]]:
    """What all ranks together read in the steps from `first` up to `last`, each with a reader of
    its own.
    """
    found = []
    for rank in range(ranks):
        samples = StreamSamples(stream, batch=batch, shards=shards, seed=5)
        order = SequentialOrder(length=len(samples), seed=5)
        deal = ShardAssignment(batch, shards, rank, ranks)
        steps = StepPlan(order, deal, total=last * batch)
        for position in range(first * batch, last * batch, batch):
            for part in steps.chunks(position):
                if part.samples:
                    indices = order.between(position + part.first, position + part.last)
                    found += [samples[index] for index in indices.tolist()]
    return found


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_ranks_that_come_and_go_read_what_one_rank_would_have_and_nothing_twice(
    data: st.DataObject,
) -> None:
    shards, share, more = data.draw(shapes)
    counts = data.draw(st.lists(st.integers(1, 6), min_size=shards + more, max_size=shards + more))
    stream = Numbered(counts, known=data.draw(st.booleans()))
    batch = shards * share + data.draw(st.integers(0, shards - 1))
    cuts = sorted(data.draw(st.lists(st.integers(0, 8), max_size=3)))
    expected = Counter(read_by(1, stream, batch=batch, shards=shards, first=0, last=8))
    found: Counter[tuple[int, int]] = Counter()
    for first, last in zip([0, *cuts], [*cuts, 8], strict=True):
        ranks = data.draw(st.integers(1, shards))
        found.update(read_by(ranks, stream, batch=batch, shards=shards, first=first, last=last))
    assert found == expected


@settings(max_examples=80, deadline=None)
@given(shape=shapes, known=st.booleans())
def test_a_pass_over_equal_files_reads_each_sample_once(
    shape: tuple[int, int, int], known: bool
) -> None:
    shards, share, _ = shape
    stream = Numbered([share] * shards * 3, known=known)
    found = read_by(1, stream, batch=shards * share, shards=shards, first=0, last=3)
    assert Counter(found) == Counter(
        (file, number) for file in range(shards * 3) for number in range(share)
    )


def test_a_resume_passes_over_files_of_known_length_unread() -> None:
    stream = Numbered([1000] * 4, known=True)
    samples = StreamSamples(stream, batch=10, shards=2, seed=0)
    fresh = StreamSamples(Numbered([1000] * 4, known=False), batch=10, shards=2, seed=0)
    assert samples[3500] == fresh[3500]
    assert stream.reads <= 1000


@pytest.mark.parametrize("known", [True, False])
def test_whoever_reads_every_other_step_of_a_stream_reads_each_sample_once(known: bool) -> None:
    """What one of two loader processes does where a rank has one shard."""
    stream = Numbered([50] * 8, known=known)
    samples = StreamSamples(stream, batch=2, shards=1, seed=5)
    expected = StreamSamples(Numbered([50] * 8, known=known), batch=2, shards=1, seed=5)
    for step in range(0, 200, 2):
        assert samples[2 * step] == expected[2 * step]
    assert stream.reads <= 400


@pytest.mark.parametrize(
    ("workers", "shards", "expected"), [(4, 1, 1), (2, 4, 2), (3, 4, 2), (4, 4, 4), (8, 6, 6)]
)
def test_a_shard_is_always_read_by_the_same_loader_process(
    workers: int, shards: int, expected: int
) -> None:
    samples = StreamSamples(Numbered([50] * 8, known=True), batch=12, shards=shards, seed=5)
    order = SequentialOrder(length=len(samples), seed=5)
    steps = StepPlan(order, ShardAssignment(12, shards, 0, 1), total=120)
    chosen = config.LoaderConfig(workers=workers)
    loader = Loader(steps, Streamed(WorkloadContext()), samples, settings=chosen, seed=5)
    assert loader._useful_processes() == expected


def test_a_stream_travels_to_loader_processes_without_its_open_files() -> None:
    samples = StreamSamples(Numbered([5, 5], known=False), batch=2, shards=1, seed=0)
    expected = [samples[position] for position in range(6)]
    assert [pickle.loads(pickle.dumps(samples))[position] for position in range(6)] == expected  # noqa: S301 - our own


def test_streams_that_cannot_be_dealt_or_hold_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 files, too few for 3 shards"):
        StreamSamples(Numbered([1, 1], known=True), batch=6, shards=3, seed=0)
    for known in (True, False):
        samples = StreamSamples(Numbered([0, 0], known=known), batch=1, shards=1, seed=0)
        with pytest.raises(DataError, match="contain no samples"):
            samples[3 if known else 0]


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize("kind", [pytest.param("Drawn", marks=pytest.mark.chaos), "Streamed"])
def test_a_training_goes_on_on_fewer_ranks_with_the_samples_that_come_next(
    tmp_path: Path, kind: str
) -> None:
    reported: dict[str, Any] = {
        "workload": f"{Drawn.__module__}:{kind}",
        "steps": 9,
        "epochs": None,
    }
    reported["checkpoint"] = {"every": {"steps": 4}, "mode": "blocking", "keep": 1000}
    reported["optimizer"] = {"name": "sgd", "learningRate": 0.01}
    section = describe(**reported, virtualShards=4, options={"dropout": 0.0})
    train_here(section, tmp_path, 2)
    whole = losses(tmp_path)
    for name in ("DONE", "step-00000008-e1", "step-00000009-e1"):
        if (tmp_path / "checkpoints" / name).exists():
            (tmp_path / "checkpoints" / name).rename(tmp_path / name)
    train_here(section, tmp_path, 1, generation=2)
    again = losses(tmp_path, generation=2)
    assert sorted(again) == [5, 6, 7, 8, 9]
    for step, loss in again.items():
        assert float.fromhex(loss) == pytest.approx(float.fromhex(whole[step]), rel=1e-5), FEATURES
    assert done(tmp_path)["step"] == 9


@pytest.mark.processes
def test_a_stream_has_no_epochs(tmp_path: Path) -> None:
    refused = r"ConfigError: train.epochs: Streamed.dataset\('train'\) is a stream"
    with pytest.raises(RankFailed, match=refused):
        train_here(describe(workload=f"{Drawn.__module__}:Streamed"), tmp_path, 1)


class Augmented(Stream):
    """A file whose samples are changed at random as they are read."""

    def files(self) -> list[str]:
        return ["only"]

    def read(self, file: str) -> Iterator[Tensor]:  # noqa: ARG002 - Stream's signature
        for number in range(20):
            yield torch.tensor([float(number)]) + torch.rand(1)


def test_a_batch_is_drawn_alike_whatever_was_skipped_before_it() -> None:
    """Two batches of three, one after the other, and the second by a rank that resumes there."""

    def samples() -> StreamSamples:
        return StreamSamples(Augmented(), batch=3, shards=1, seed=5)

    read = fetcher(AsRead(WorkloadContext()), samples())
    read(torch.tensor([0, 1, 2]), 1)
    whole = read(torch.tensor([3, 4, 5]), 2)
    resumed = fetcher(AsRead(WorkloadContext()), samples())(torch.tensor([3, 4, 5]), 2)
    again = read(torch.tensor([3, 4, 5]), 2)
    assert [part.tolist() for part in whole] == [part.tolist() for part in resumed]
    assert [part.tolist() for part in whole] == [part.tolist() for part in again]


class AsRead(Small):
    """Takes samples as they are."""

    def collate(self, samples: list[Tensor]) -> list[Tensor]:
        return samples


@pytest.mark.processes
def test_ranks_that_have_different_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"dataset\('train'\), .* not the same on ranks 0 and 1"):
        train_here(describe(workload=f"{Unseeded.__module__}:Unseeded"), tmp_path, 2)
