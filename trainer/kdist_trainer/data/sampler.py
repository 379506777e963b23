"""The order of samples: which sample is at each position of the training's sample stream.

The stream is the concatenation of one permutation per epoch, derived from the seed. Large sets
compute their order position by position instead of storing a permutation; weighted sets are drawn
with replacement.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kdist_trainer.errors import DataError
from kdist_trainer.rng import ORDER, derive


class Order:
    """The samples at stream positions 0, 1, 2, …: one permutation of the whole set after the
    other.
    """

    marking = ""

    def __init__(self, *, length: int, seed: int) -> None:
        if length < 1:
            raise DataError("the data set is empty")
        self.length = length
        self._seed = seed
        self._cached: dict[int, Tensor] = {}
        self._current = torch.empty(0, dtype=torch.int64)
        self._begin = 0

    def epoch(self, number: int) -> Tensor:
        """Permutation of epoch `number` (0 = first): int64, shape [length]."""
        if number not in self._cached:
            seed = derive(self._seed, ORDER, number)
            # NumPy promises that RandomState's streams never change, torch does not: the order must
            # survive an upgrade.
            drawn = self._draw(np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32]))
            self._cached = {key: value for key, value in self._cached.items() if key == number - 1}
            self._cached[number] = torch.from_numpy(drawn)
        return self._cached[number]

    def _draw(self, random: np.random.RandomState) -> npt.NDArray[np.int64]:
        drawn: npt.NDArray[np.int64] = random.permutation(self.length).astype(np.int64, copy=False)
        return drawn

    def between(self, first: int, last: int) -> Tensor:
        """Indices of the samples at positions `first` (included) to `last` (excluded): int64, shape
        [last - first].
        """
        start, stop = first - self._begin, last - self._begin
        if start >= 0 and stop <= len(self._current):
            return self._current[start:stop]
        number, start = divmod(first, self.length)
        stop = start + last - first
        if stop <= self.length:
            self._current, self._begin = self.epoch(number), first - start
            return self._current[start:stop]
        rest = self.between((number + 1) * self.length, last)
        return torch.cat([self.epoch(number)[start:], rest])


LARGE = 2**22
"""Samples from which on no list of a permutation is made: at 1e8 it takes 43 s and 763 MiB, in
every rank.
"""
_BLOCK = 2**14


class Computed(Order):
    """An order of which any position is computed where it is asked for, a block of them at a
    time.
    """

    def between(self, first: int, last: int) -> Tensor:
        """Indices of the samples at positions `first` (included) to `last` (excluded): int64, shape
        [last - first].
        """
        start, stop = first - self._begin, last - self._begin
        if start < 0 or stop > len(self._current):
            ahead = min(first + _BLOCK, (first // self.length + 1) * self.length)
            self._current, self._begin = self._compute(first, max(last, ahead)), first
            start, stop = 0, last - first
        return self._current[start:stop]

    def _compute(self, first: int, last: int) -> Tensor:
        raise NotImplementedError


class Keyed(Computed):
    """The order of a large set: each epoch a keyed bijection of its positions, computed where it is
    asked for.

    A Feistel network over the smallest power of two that holds the set, applied again while it
    leads outside of the set (cycle walking): J. Black and P. Rogaway, Ciphers with Arbitrary Finite
    Domains, CT-RSA 2002. Its round function is the finisher of splitmix64 (G. Steele, D. Lea, C.
    Flood, OOPSLA 2014). Any position costs the same, so a resume waits for none.
    """

    rounds = 12
    marking = "feistel-splitmix64-12"
    """What this order is called in a fingerprint: a position means other samples under another
    one.
    """

    def __init__(self, *, length: int, seed: int) -> None:
        super().__init__(length=length, seed=seed)
        bits = max(2, (length - 1).bit_length())
        self._low = np.uint64(bits // 2)
        self._masks = np.uint64((1 << (bits // 2)) - 1), np.uint64((1 << (bits - bits // 2)) - 1)
        self._keyed = -1
        self._keys: list[np.uint64] = []

    def _compute(self, first: int, last: int) -> Tensor:
        parts = []
        for number in range(first // self.length, (last - 1) // self.length + 1):
            begin = number * self.length
            own = np.arange(
                max(first, begin) - begin, min(last, begin + self.length) - begin, dtype=np.uint64
            )
            parts.append(torch.from_numpy(self._permuted(number, own).astype(np.int64)))
        return torch.cat(parts)

    def _permuted(self, number: int, places: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Where epoch `number` leads from these places, each in [0, length)."""
        if number != self._keyed:
            seed = derive(self._seed, ORDER, number)
            self._keys, self._keyed = (
                [np.uint64(derive(seed, ORDER, index)) for index in range(self.rounds)],
                number,
            )
        found = self._network(places)
        while (outside := np.flatnonzero(found >= np.uint64(self.length))).size:
            found[outside] = self._network(found[outside])
        return found

    def _network(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """One pass: the halves in turn are changed by what the key makes of the other, which can be
        taken back.
        """
        low, high = values & self._masks[0], values >> self._low
        for first, second in zip(self._keys[::2], self._keys[1::2], strict=True):
            high = high ^ (_mix(low ^ first) & self._masks[1])
            low = low ^ (_mix(high ^ second) & self._masks[0])
        return (high << self._low) | low


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Weighted(Order):
    """Samples drawn with replacement, each as often as its weight says; an epoch is as many draws
    as there are samples.
    """

    def __init__(self, *, weights: Tensor, length: int, seed: int) -> None:
        """Raises `DataError` for weights that are no weights of `length` samples."""
        super().__init__(length=length, seed=seed)
        if weights.shape != (length,):
            raise DataError(
                f"weights() must give one number for each of {length} samples, and gave "
                f"{tuple(weights.shape)}"
            )
        values = weights.detach().cpu().numpy().astype(np.float64, copy=False)
        if not np.isfinite(values).all() or (values < 0).any() or not values.any():
            raise DataError("weights() must give numbers of 0 or more, finite and not all 0")
        self._ends = np.cumsum(values)
        self._last = length - 1 - int(np.argmax(values[::-1] != 0))

    def _draw(self, random: np.random.RandomState) -> npt.NDArray[np.int64]:
        return self._fall(random.random_sample(self.length))

    def _fall(self, places: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """The samples on which places in [0, 1) fall."""
        # A draw that falls on the border belongs to the next sample, so that weight 0 is never
        # drawn.
        drawn = np.searchsorted(self._ends, places * self._ends[-1], side="right")
        kept: npt.NDArray[np.int64] = np.minimum(drawn, self._last).astype(np.int64, copy=False)
        return kept


class WeightedByPosition(Weighted, Computed):
    """The same for a large set: the draw at a position follows from it alone, by splitmix64, and no
    epoch is drawn as a whole.
    """

    marking = "splitmix64"

    def _compute(self, first: int, last: int) -> Tensor:
        key = np.uint64(derive(self._seed, ORDER, self.length))
        states = key + np.arange(first + 1, last + 1, dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        places = (_mix(states) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return torch.from_numpy(self._fall(places))


def order_of(length: int, *, seed: int, weights: Tensor | None = None) -> Order:
    """The order of a set of so many samples. Raises `DataError` for weights that are none."""
    large = length >= LARGE
    if weights is not None:
        return (WeightedByPosition if large else Weighted)(
            weights=weights, length=length, seed=seed
        )
    return (Keyed if large else Order)(length=length, seed=seed)


class SequentialOrder(Order):
    """The order of a stream, which has no other: position 0, 1, 2, …."""

    def between(self, first: int, last: int) -> Tensor:
        """These positions: int64, shape [last - first]."""
        return torch.arange(first, last)
