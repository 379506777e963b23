"""A streaming set of Hugging Face in the managed loop: each sample once, on any number of ranks and
in loader processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset, interleave_datasets, load_dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

from kdist_trainer.errors import ConfigError, DataError
from kdist_trainer.integrations import HfStream
from kdist_trainer.stream import StreamSamples

FILES, EACH = 6, 5


def streaming() -> IterableDataset:
    whole = Dataset.from_dict({"id": list(range(FILES * EACH))})
    return whole.to_iterable_dataset(num_shards=FILES)


def is_even(sample: dict[str, Any]) -> bool:
    return bool(sample["id"] % 2 == 0)


SETS = {
    "plain": lambda: streaming(),
    "tensors": lambda: streaming().with_format("torch"),
    "filtered": lambda: streaming().filter(is_even),
    "shuffled": lambda: streaming().shuffle(seed=1, buffer_size=3),
}


@pytest.mark.parametrize("name", SETS)
def test_each_sample_is_read_once_from_any_position_on(name: str) -> None:
    stream = HfStream(SETS[name]())
    for file in stream.files():
        whole = [int(one["id"]) for one in stream.read(file)]
        for count in range(len(whole) + 1):
            assert [int(one["id"]) for one in stream.skip(file, count)] == whole[count:]
    samples = StreamSamples(stream, batch=6, shards=2, seed=0)
    total = sum(len(list(stream.read(file))) for file in stream.files())
    one_pass = [int(samples[position]["id"]) for position in range(total)]
    if name != "filtered":  # of which shards have different lengths
        assert sorted(one_pass) == list(range(FILES * EACH))
    resumed = StreamSamples(HfStream(SETS[name]()), batch=6, shards=2, seed=0)
    assert [int(resumed[position]["id"]) for position in range(9, total)] == one_pass[9:]


class InProcesses(torch.utils.data.Dataset[Any]):
    """Reads files in whatever loader process it is."""

    def __init__(self, stream: HfStream) -> None:
        self.stream = stream

    def __getitem__(self, file: int) -> list[int]:
        return [one["id"] for one in self.stream.read(str(file))]

    def __len__(self) -> int:
        return FILES


@pytest.mark.processes
def test_every_loader_process_reads_the_whole_of_a_shard() -> None:
    loader: Iterator[list[int]] = iter(
        DataLoader(InProcesses(HfStream(streaming())), batch_size=None, num_workers=2)
    )
    assert [list(one) for one in loader] == [
        list(range(file * EACH, (file + 1) * EACH)) for file in range(FILES)
    ]


def test_counts_spare_a_resume_the_shards_before_and_are_checked() -> None:
    read: list[str] = []

    class Noting(HfStream):
        def skip(self, file: str, count: int) -> Iterator[Any]:
            read.append(file)
            return super().skip(file, count)

    known = StreamSamples(Noting(streaming(), [EACH] * FILES), batch=1, shards=1, seed=0)
    whole = StreamSamples(HfStream(streaming()), batch=1, shards=1, seed=0)
    assert known[23] == whole[23]
    assert len(read) == 1
    with pytest.raises(DataError, match="shard 0 has 5 samples, and counts says 4"):
        list(HfStream(streaming(), [EACH - 1] * FILES).read("0"))


def test_a_set_that_is_split_already_is_refused() -> None:
    with pytest.raises(ConfigError, match="without split_dataset_by_node"):
        HfStream(split_dataset_by_node(streaming(), 0, 2))
    with pytest.raises(ConfigError, match="2 counts for 6 shards"):
        HfStream(streaming(), [1, 2])


@pytest.mark.sampled
def test_what_decides_which_samples_there_are_tells_sets_apart_and_nothing_else(
    tmp_path: Path,
) -> None:
    def parquet(folder: str, *lengths: int) -> IterableDataset:
        (tmp_path / folder).mkdir(exist_ok=True)
        names = [str(tmp_path / folder / f"{number}.parquet") for number in range(len(lengths))]
        for name, length in zip(names, lengths, strict=True):
            Dataset.from_dict({"id": list(range(length))}).to_parquet(name)
        found: IterableDataset = load_dataset(
            "parquet", data_files=names, split="train", streaming=True, cache_dir=str(tmp_path)
        )
        return found

    def identify(dataset: IterableDataset) -> str:
        return StreamSamples(HfStream(dataset), batch=2, shards=1, seed=0).describe()

    one = parquet("one", 5, 5)
    same = [one, parquet("one", 5, 5), parquet("moved", 5, 5)]
    others = [
        parquet("longer", 5, 600),
        parquet("more", 5, 5, 5),
        one.shuffle(seed=1),
        one.shuffle(seed=2),
        one.shuffle(seed=1, buffer_size=7),
        one.shuffle(),
        one.shuffle(),
        one.filter(is_even),
        one.take(3),
        interleave_datasets([one, parquet("second", 9)], [0.5, 0.5], seed=1),
        interleave_datasets([one, parquet("second", 9)], [0.4, 0.6], seed=1),
    ]
    assert len({identify(each) for each in same}) == 1
    assert len({identify(each) for each in [one, *others]}) == 1 + len(others)
    read = StreamSamples(HfStream(one.shuffle(seed=1)), batch=2, shards=1, seed=0)
    before = read.describe()
    assert len([read[place] for place in range(10)]) == 10
    assert read.describe() == before == identify(one.shuffle(seed=1)), "also when it was read"


@pytest.mark.parametrize("form", ["parquet", "csv", "json", "text"])
def test_reading_and_who_reads_make_no_other_set(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [str(tmp_path / f"{number}.{form}") for number in range(2)]
    for file in files:
        whole = Dataset.from_dict({"text": [f"line {number}" for number in range(9)]})
        if form == "text":
            Path(file).write_text("\n".join(whole["text"]))
        else:
            getattr(whole, f"to_{form}")(file)

    def load(token: str = "") -> HfStream:
        return HfStream(
            load_dataset(
                form,
                data_files=files,
                split="train",
                streaming=True,
                cache_dir=str(tmp_path / "cache"),
                token=token or None,
            ).select_columns(["text"])
        )

    stream = load()
    before = stream.identity()
    next(iter(stream.read("1")))
    assert stream.identity() == before
    assert len([each for file in stream.files() for each in stream.read(file)]) == 18
    assert stream.identity() == before == load("hf_secret").identity()
    (tmp_path / "text").mkdir()
    monkeypatch.chdir(tmp_path)  # where there is something by the name of the column
    assert load().identity() == before
