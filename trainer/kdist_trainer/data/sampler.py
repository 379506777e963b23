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
from kdist_trainer.numerics.rng import ORDER, derive


class Order:
    """The samples at stream positions 0, 1, 2, ...: one permutation of the whole set after the
    other.
    """

    algorithm = ""
    """Name of the algorithm in a fingerprint: with another one, positions mean other samples."""

    def __init__(self, *, length: int, seed: int) -> None:
        if length < 1:
            raise DataError("the data set is empty")
        self.length = length
        self._seed = seed
        self._cached: dict[int, Tensor] = {}
        self._block = torch.empty(0, dtype=torch.int64)
        """Indices of the samples at positions `_block_start` (included) to `_block_stop`."""
        self._block_start = self._block_stop = 0

    def epoch(self, number: int) -> Tensor:
        """Permutation of epoch `number` (0 = first): int64, shape [length]."""
        if number not in self._cached:
            seed = derive(self._seed, ORDER, number)
            # NumPy promises that RandomState's streams never change, torch does not; the order must
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
        if first < self._block_start or last > self._block_stop:
            number, start = divmod(first, self.length)
            if start + last - first > self.length:
                rest = self.between((number + 1) * self.length, last)
                return torch.cat([self.epoch(number)[start:], rest])
            self._block = self.epoch(number)
            self._block_start, self._block_stop = first - start, first - start + self.length
        return self._block[first - self._block_start : last - self._block_start]


LARGE = 2**22
"""Length from which on no permutation is stored: at 1e8 it takes 43 s and 763 MiB in every rank."""
_BLOCK = 2**14


class ComputedOrder(Order):
    """An order that is computed when it is needed, a block of positions at a time."""

    def between(self, first: int, last: int) -> Tensor:
        if first < self._block_start or last > self._block_stop:
            ahead = min(first + _BLOCK, (first // self.length + 1) * self.length)
            stop = max(last, ahead)
            self._block = self._compute(first, stop)
            self._block_start, self._block_stop = first, stop
        return self._block[first - self._block_start : last - self._block_start]

    def _compute(self, first: int, last: int) -> Tensor:
        raise NotImplementedError


class FeistelOrder(ComputedOrder):
    """The order of a large set: each epoch is a keyed bijection of its positions.

    A Feistel network over the smallest power of two that holds the set, applied again while its
    output is outside of the set (cycle walking): J. Black and P. Rogaway, Ciphers with Arbitrary
    Finite Domains, CT-RSA 2002. Its round function is the finisher of splitmix64 (G. Steele, D.
    Lea, C. Flood, OOPSLA 2014). Any position costs the same, so a resume is immediate.
    """

    rounds = 12
    algorithm = "feistel-splitmix64-12"

    def __init__(self, *, length: int, seed: int) -> None:
        super().__init__(length=length, seed=seed)
        bits = max(2, (length - 1).bit_length())
        self._low = np.uint64(bits // 2)
        self._masks = np.uint64((1 << (bits // 2)) - 1), np.uint64((1 << (bits - bits // 2)) - 1)
        self._keys_epoch = -1
        self._keys: list[np.uint64] = []

    def _compute(self, first: int, last: int) -> Tensor:
        parts = []
        for number in range(first // self.length, (last - 1) // self.length + 1):
            start = number * self.length
            own = np.arange(
                max(first, start) - start, min(last, start + self.length) - start, dtype=np.uint64
            )
            parts.append(torch.from_numpy(self._permute(number, own).astype(np.int64)))
        return torch.cat(parts)

    def _permute(self, epoch: int, offsets: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """The samples at these offsets in [0, length) of an epoch."""
        if epoch != self._keys_epoch:
            seed = derive(self._seed, ORDER, epoch)
            self._keys = [np.uint64(derive(seed, ORDER, index)) for index in range(self.rounds)]
            self._keys_epoch = epoch
        found = self._network(offsets)
        while (outside := np.flatnonzero(found >= np.uint64(self.length))).size:
            found[outside] = self._network(found[outside])
        return found

    def _network(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Apply the Feistel network once: each half in turn is combined with a keyed hash of the
        other, which can be inverted.
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


class WeightedOrder(Order):
    """Samples drawn with replacement in proportion to their weights; an epoch has as many draws as
    there are samples.
    """

    def __init__(self, *, weights: Tensor, length: int, seed: int) -> None:
        """Prepare the draws by the weights of the samples, shape (length,). Raises `DataError` if
        they have another shape, or values that are no weights.
        """
        super().__init__(length=length, seed=seed)
        if weights.shape != (length,):
            raise DataError(
                f"weights() must return one number for each of {length} samples, and returned "
                f"{tuple(weights.shape)}"
            )
        values = weights.detach().cpu().numpy().astype(np.float64, copy=False)
        if not np.isfinite(values).all() or (values < 0).any() or not values.any():
            raise DataError("weights() must return numbers of 0 or more, finite and not all 0")
        self._ends = np.cumsum(values)
        self._last = length - 1 - int(np.argmax(values[::-1] != 0))

    def _draw(self, random: np.random.RandomState) -> npt.NDArray[np.int64]:
        return self._sample_at(random.random_sample(self.length))

    def _sample_at(self, numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """The samples to which numbers in [0, 1) belong, by inversion of the cumulative weights."""
        # A number on a boundary belongs to the next sample, so that weight 0 is never drawn.
        drawn = np.searchsorted(self._ends, numbers * self._ends[-1], side="right")
        kept: npt.NDArray[np.int64] = np.minimum(drawn, self._last).astype(np.int64, copy=False)
        return kept


class ComputedWeightedOrder(WeightedOrder, ComputedOrder):
    """The same for a large set: the draw at a position follows from the position alone, by
    splitmix64, and no epoch is drawn as a whole.
    """

    algorithm = "splitmix64"

    def _compute(self, first: int, last: int) -> Tensor:
        key = np.uint64(derive(self._seed, ORDER, self.length))
        states = key + np.arange(first + 1, last + 1, dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        numbers = (_mix(states) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return torch.from_numpy(self._sample_at(numbers))


def make_order(length: int, *, seed: int, weights: Tensor | None = None) -> Order:
    """Make the order of a data set: by weights of shape (length,), or a permutation per epoch.
    Raises `DataError` if there are no samples, or `weights` are not valid.
    """
    large = length >= LARGE
    if weights is not None:
        return (ComputedWeightedOrder if large else WeightedOrder)(
            weights=weights, length=length, seed=seed
        )
    return (FeistelOrder if large else Order)(length=length, seed=seed)


class SequentialOrder(Order):
    """The order of a stream: positions 0, 1, 2, ..."""

    def between(self, first: int, last: int) -> Tensor:
        return torch.arange(first, last)
