"""Randomness that needs no saving: every draw inside a step follows from (seed, stream, step, shard, chunk).

A resumed training sets its generators to the same numbers as the undisturbed one, at any world size, so no generator's
state is ever part of a checkpoint. `torch.manual_seed` is not used: it also walks over devices and costs 100 us.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

import numpy as np
import torch

WEIGHTS: Final = 1
ORDER: Final = 2
FETCH: Final = 3
STEP: Final = 4
EVALUATE: Final = 5

_MASK: Final = (1 << 64) - 1


def derive(seed: int, stream: int, step: int = 0, shard: int = 0, chunk: int = 0) -> int:
    """Mix the five numbers into 64 well-spread bits (splitmix64's finisher), the same on every machine."""
    x = (
        seed * 0x9E3779B97F4A7C15
        + stream * 0xD6E8FEB86659FD93
        + step * 0xBF58476D1CE4E5B9
        + shard * 0x94D049BB133111EB
        + chunk * 0xC2B2AE3D27D4EB4F
        + 0x165667B19E3779F9
    ) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def generators(device: torch.device) -> Callable[[int], None]:
    """A function that sets every generator a forward pass may draw from: torch's for CPU and device, numpy's, Python's."""
    of_torch = torch.default_generator.manual_seed
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        of_device = torch.cuda.default_generators[index].manual_seed
    else:
        of_device = None

    def set_all(value: int) -> None:
        of_torch(value)
        if of_device is not None:
            of_device(value)
        np.random.seed(value & 0xFFFFFFFF)  # the global generator is the one that user code draws from
        random.seed(value)

    return set_all
