"""Data that can only be read from front to back: files (or whatever has a name) of samples, without
an index into them.

A workload whose `dataset("train")` returns a `Stream` is trained like any other, and the one number
that a checkpoint keeps of the data still says where it is. The files are dealt to the job's virtual
shards, not to its ranks: what a shard reads does not depend on how many ranks there are, so that no
sample is lost or read twice when their number changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kdist_trainer.errors import ConfigError, DataError
from kdist_trainer.rng import ORDER, derive


class Stream(ABC):
    """Samples in named files, each read from its beginning."""

    @abstractmethod
    def files(self) -> Sequence[str]:
        """Names of the files, the same in every process; at least one for each virtual shard."""

    @abstractmethod
    def read(self, file: str) -> Iterator[Any]:
        """The samples of a file from the first one on, the same and in the same order every
        time.
        """

    def skip(self, file: str, count: int) -> Iterator[Any]:
        """The samples after the first `count` ones; override it where a file can be entered in its
        middle.
        """
        samples = self.read(file)
        for _ in range(count):
            if next(samples, _END) is _END:
                break
        return samples

    def count(self, file: str) -> int | None:  # noqa: ARG002 - for those who know
        """How many samples a file has, if that is known without reading it: a resume then passes
        over whole files.
        """
        return None


_END = object()


class StreamSamples:
    """A stream as the loop takes samples: by their position in the run, 0, 1, 2, ….

    Each step takes the share of each virtual shard from that shard's own files, which it reads one
    after the other in an order drawn anew for every pass. A shard that comes to the end of its
    files begins its next pass, whatever the others do.
    """

    def __init__(self, stream: Stream, *, batch: int, shards: int, seed: int) -> None:
        self.stream = stream
        self._seed = seed
        self._batch = batch
        self._shards = shards
        self._files = list(stream.files())
        if len(set(self._files)) < len(self._files):
            raise DataError("a file of the stream is named twice")
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
        """More than any run takes: a stream begins again."""
        return 2**53

    def __getitem__(self, position: int) -> Any:
        shard, number = self.place(position)
        if shard not in self._readers:
            own = self._files[shard :: self._shards]
            self._readers[shard] = _Reader(
                self.stream, own, seed=derive(self._seed, ORDER, shard + 1)
            )
        return self._readers[shard].take(number)

    def __getstate__(self) -> dict[str, Any]:
        """Without open files: a loader process opens its own."""
        return {**self.__dict__, "_readers": {}}

    def place(self, position: int) -> tuple[int, int]:
        """(virtual shard, how many samples it gave before this one)."""
        step, offset = divmod(position, self._batch)
        shard = int(np.searchsorted(self._starts, offset, side="right")) - 1
        start, end = self._starts[shard], self._starts[shard + 1]
        return shard, step * (end - start) + offset - start

    def describe(self) -> str:
        """What must be the same for a position to mean the same."""
        return (
            f"stream of {len(self._files)} files, {self._batch} samples a step from "
            f"{self._shards} shards"
        )


class _Reader:
    """One shard's samples in their order, by number; going on is a read, going back a search from
    the beginning.
    """

    def __init__(self, stream: Stream, files: Sequence[str], *, seed: int) -> None:
        self._stream = stream
        self._own = files
        self._seed = seed
        self._next = 0
        self._samples: Iterator[Any] = iter(())
        self._queue: Iterator[str] = iter(())
        self._pass = -1
        self._seen_any = True

    def take(self, number: int) -> Any:
        if number != self._next:
            self._seek(number)
        while (sample := next(self._samples, _END)) is _END:
            self._open(self._following())
        self._next += 1
        self._seen_any = True
        return sample

    def _seek(self, number: int) -> None:
        """Be before sample `number`: what lies between is passed over from here, and only a way
        back begins anew.
        """
        if number < self._next:
            self._next, self._pass, self._queue, self._samples = 0, -1, iter(()), iter(())
            self._seen_any = True
        left = self._drop(number - self._next)
        while left:
            file = self._following()
            count = self._stream.count(file)
            if count is None:
                self._open(file)
                left = self._drop(left)
            elif count > left:
                self._samples, left = self._stream.skip(file, left), 0
                self._seen_any = True
            else:
                left -= count
                self._seen_any = self._seen_any or count > 0
        self._next = number

    def _drop(self, count: int) -> int:
        """Pass over at most `count` samples of the open file; returns how many are left to pass
        over.
        """
        while count and next(self._samples, _END) is not _END:
            count -= 1
            self._seen_any = True
        if count:
            self._samples = iter(())
        return count

    def _open(self, file: str) -> None:
        self._samples = self._stream.read(file)

    def _following(self) -> str:
        file = next(self._queue, None)
        if file is None:
            if not self._seen_any:
                raise DataError(
                    f"the files {', '.join(self._own[:3])} of the stream hold no samples"
                )
            self._pass, self._seen_any = self._pass + 1, False
            order = np.random.RandomState(
                derive(self._seed, ORDER, self._pass) & 0xFFFFFFFF
            ).permutation(len(self._own))
            self._queue = iter([self._own[index] for index in order])
            file = next(self._queue)
        return file
