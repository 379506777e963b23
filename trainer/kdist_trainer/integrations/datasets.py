"""`HfStream`: a streaming set of Hugging Face `datasets` in the managed loop.

    def dataset(self, split):
        if split == "train":
            return HfStream(load_dataset("parquet", data_files=…, split="train", streaming=True))

The set's shards are the stream's files, so that a checkpoint has one number as its position, and
each sample is read once also when the number of ranks changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kdist_trainer.errors import ConfigError, DataError
from kdist_trainer.stream import Stream


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
