"""Data sets that can only be read sequentially: files (or anything with a name) of samples, without
an index.

A workload whose `dataset("train")` returns a `Stream` is trained like any other, and a checkpoint
still stores a single number as its position. The files are assigned to the job's virtual shards,
not to its ranks: what a shard reads does not depend on the number of ranks, so that no sample is
lost or read twice when that number changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kdist_trainer.errors import ConfigError, DataError
from kdist_trainer.numerics.rng import ORDER, derive


class Stream(ABC):
    """Samples in named files, each read from its start."""

    @abstractmethod
    def files(self) -> Sequence[str]:
        """Names of the files, the same in every process; at least one for each virtual shard."""

    @abstractmethod
    def read(self, file: str) -> Iterator[Any]:
        """The samples of a file from the first one on, the same and in the same order every
        time.
        """

    def skip(self, file: str, count: int) -> Iterator[Any]:
        """The samples of a file after the first `count` ones; override it for files that can be
        opened at a position.
        """
        samples = self.read(file)
        for _ in range(count):
            if next(samples, _END) is _END:
                break
        return samples

    def count(self, file: str) -> int | None:  # noqa: ARG002 - for overrides
        """Number of samples in a file, if it is known without reading it: a resume then skips whole
        files.
        """
        return None

    def identity(self) -> str:
        """What else decides which samples the files have, the same in every process: with another
        one it is another data set.
        """
        return ""


_END = object()


class StreamSamples:
    """A stream as the loop reads samples: by their position in the run, 0, 1, 2, ...

    Each step takes the samples of each virtual shard from that shard's own files, which are read
    one after the other in an order that is drawn for every pass. A shard that reaches the end of
    its files starts its next pass, independent of the others.
    """

    def __init__(self, stream: Stream, *, batch: int, shards: int, seed: int) -> None:
        """Open no file yet.

        Args:
            stream: The stream.
            batch: Samples in a step.
            shards: Virtual shards.
            seed: Seed of the job.

        Raises:
            DataError: If a file is listed twice.
            ConfigError: If there are fewer files than shards.
        """
        self.stream = stream
        self._seed = seed
        self._batch = batch
        self._shards = shards
        self._files = list(stream.files())
        if len(set(self._files)) < len(self._files):
            raise DataError("a file of the stream is listed twice")
        if len(self._files) < shards:
            raise ConfigError(
                f"train.virtualShards: the stream has {len(self._files)} files, too few "
                f"for {shards} shards: every shard reads "
                "files of its own; set virtualShards, or write more files"
            )
        each, rest = divmod(batch, shards)
        self._starts = [shard * each + min(shard, rest) for shard in range(shards + 1)]
        self._readers: dict[int, _Reader] = {}

    def __len__(self) -> int:
        """More than any run reads: a stream repeats."""
        return 2**53

    def __getitem__(self, position: int) -> Any:
        shard, number = self.locate(position)
        return self._reader(shard).read(number)

    def seek(self, position: int) -> None:
        """Move to a position, so that the next sample that is read is the only one: what reading
        the samples before it draws at random is no part of a batch that is seeded after this.
        """
        shard, number = self.locate(position)
        self._reader(shard).seek(number)

    def _reader(self, shard: int) -> _Reader:
        if shard not in self._readers:
            own = self._files[shard :: self._shards]
            self._readers[shard] = _Reader(
                self.stream, own, seed=derive(self._seed, ORDER, shard + 1)
            )
        return self._readers[shard]

    def __getstate__(self) -> dict[str, Any]:
        """The state without open files: a loader process opens its own."""
        return {**self.__dict__, "_readers": {}}

    def locate(self, position: int) -> tuple[int, int]:
        """The virtual shard of a position, and the number of samples that the shard provided
        before.
        """
        step, offset = divmod(position, self._batch)
        shard = int(np.searchsorted(self._starts, offset, side="right")) - 1
        start, end = self._starts[shard], self._starts[shard + 1]
        return shard, step * (end - start) + offset - start

    def describe(self) -> str:
        """Everything that the meaning of a position depends on."""
        return (
            f"stream of {len(self._files)} files, {self._batch} samples a step from "
            f"{self._shards} shards{self.stream.identity()}"
        )


class _Reader:
    """Reads one shard's samples by number; a larger number continues from the present position, a
    smaller one starts again from the first file.
    """

    def __init__(self, stream: Stream, files: Sequence[str], *, seed: int) -> None:
        self._stream = stream
        self._files = files
        self._seed = seed
        self._next = 0
        self._samples: Iterator[Any] = iter(())
        self._queue: Iterator[str] = iter(())
        self._pass = -1
        self._pass_has_samples = True

    def read(self, number: int) -> Any:
        self.seek(number)
        while (sample := next(self._samples, _END)) is _END:
            self._samples = self._stream.read(self._next_file())
        self._next += 1
        self._pass_has_samples = True
        return sample

    def seek(self, number: int) -> None:
        """Move to sample `number`."""
        if number == self._next:
            return
        if number < self._next:
            self._next = 0
            self._pass = -1
            self._queue = iter(())
            self._samples = iter(())
            self._pass_has_samples = True
        remaining = self._skip_samples(number - self._next)
        while remaining:
            file = self._next_file()
            count = self._stream.count(file)
            if count is None:
                self._samples = self._stream.read(file)
                remaining = self._skip_samples(remaining)
            elif count > remaining:
                self._samples = self._stream.skip(file, remaining)
                remaining = 0
                self._pass_has_samples = True
            else:
                remaining -= count
                self._pass_has_samples = self._pass_has_samples or count > 0
        self._next = number

    def _skip_samples(self, count: int) -> int:
        """Skip at most `count` samples of the open file; returns how many remain to be skipped."""
        while count and next(self._samples, _END) is not _END:
            count -= 1
            self._pass_has_samples = True
        if count:
            self._samples = iter(())
        return count

    def _next_file(self) -> str:
        file = next(self._queue, None)
        if file is None:
            if not self._pass_has_samples:
                raise DataError(
                    f"the files {', '.join(self._files[:3])} of the stream contain no samples"
                )
            self._pass += 1
            self._pass_has_samples = False
            order = np.random.RandomState(
                derive(self._seed, ORDER, self._pass) & 0xFFFFFFFF
            ).permutation(len(self._files))
            self._queue = iter([self._files[index] for index in order])
            file = next(self._queue)
        return file
