"""`HfStream`: a streaming set of Hugging Face `datasets` in the managed loop.

    def dataset(self, split):
        if split == "train":
            return HfStream(load_dataset("parquet", data_files=…, split="train", streaming=True))

The set's shards are the stream's files, so that a checkpoint has one number as its position, and
each sample is read once also when the number of ranks changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from kdist_trainer.errors import ConfigError, DataError
from kdist_trainer.stream import Stream

_NOT_DATA: Final = {"DownloadConfig", "last_item", "storage_options", "token_per_repo_id"}
"""Parts and attributes that change by reading, or differ between machines that read the same."""


class HfStream(Stream):
    """A streaming set, not split by node, as files in the order of its shards."""

    def __init__(self, dataset: Any, counts: Sequence[int] | None = None) -> None:
        """Read nothing yet.

        Args:
            dataset: the whole `datasets.IterableDataset`, the same in every process.
            counts: number of samples in each shard, if they are known: a resume then opens only
                the shards that it continues in.

        Raises:
            ConfigError: the set is split by node, or there are more or fewer counts than shards.
        """
        if getattr(dataset, "_distributed", None):
            raise ConfigError(
                "HfStream: the set is split by node, and kdist divides its shards itself: give it "
                "without split_dataset_by_node"
            )
        self._dataset = dataset
        self._shards = dataset.num_shards
        self._counts = counts
        if counts is not None and len(counts) != self._shards:
            raise ConfigError(f"HfStream: {len(counts)} counts for {self._shards} shards")

    def files(self) -> list[str]:
        return [str(shard) for shard in range(self._shards)]

    def identity(self) -> str:
        """By its files and their sizes, its order and its steps, as far as the set tells them."""
        told = "\n".join(_describe(getattr(self._dataset, "_ex_iterable", None)))
        return hashlib.sha256(told.encode(errors="backslashreplace")).hexdigest()

    def read(self, file: str) -> Iterator[Any]:
        return self.skip(file, 0)

    def count(self, file: str) -> int | None:
        return None if self._counts is None else self._counts[int(file)]

    def skip(self, file: str, count: int) -> Iterator[Any]:
        samples, number = self._dataset.shard(self._shards, int(file)), count
        # not `iter(samples)`, which in a loader process other than the first yields nothing: it
        # would divide the one shard among them
        for batch in (samples.skip(count) if count else samples).iter(batch_size=1):
            number += 1
            if isinstance(batch, dict):  # and not a table with one row
                batch = {name: values[0] for name, values in batch.items()}
            yield batch
        if self._counts is not None and number != self._counts[int(file)]:
            raise DataError(
                f"HfStream: shard {file} has {number} samples, and counts says "
                f"{self._counts[int(file)]}"
            )


def _describe(part: Any) -> Iterator[str]:
    """Describe a part of a set, or a value in it. Code is described by its name only: its text, and
    what it refers to, may differ although it does the same.
    """
    if isinstance(part, np.random.Generator):
        yield str(part.bit_generator.state)
    elif isinstance(part, str | Path):
        text = str(part)
        with suppress(OSError, ValueError):  # not a path at all
            if (path := Path(text)).is_file():
                text = f"{path.name} {path.stat().st_size}"
        yield text
    elif isinstance(part, Mapping):
        for name, each in part.items():
            yield str(name)
            yield from _describe(each)
    elif isinstance(part, Sequence):
        for each in part:
            yield from _describe(each)
    elif type(part).__module__.startswith("datasets.") and type(part).__name__ not in _NOT_DATA:
        yield f"{type(part).__name__} {getattr(part, 'num_rows', '')}"
        for name, each in vars(part).items():
            if name[0] != "_" and name not in _NOT_DATA:
                yield name
                yield from _describe(each)
    else:
        is_plain = part is None or isinstance(part, bool | int | float)
        yield str(part if is_plain else getattr(part, "__qualname__", type(part).__qualname__))
