"""Randomness that needs no saving: every draw inside a step follows from (seed, stream, step,
shard, chunk).

A resumed training sets its generators to the same numbers as the undisturbed one, at any world
size, so no generator's state is ever part of a checkpoint. `torch.manual_seed` is not used: it also
walks over devices and costs 100 us.
"""

from __future__ import annotations

import pickle
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
    """Mix the five numbers into 64 well-spread bits (splitmix64's finisher), the same on every
    machine.
    """
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


Setter = Callable[[int], object]
"""Sets some generators to what follows from a number."""


def generators(device: torch.device) -> Setter:
    """A function that sets every generator that user code may draw from: torch's for CPU and
    device, numpy's, Python's.
    """
    return _together([*_of_torch(device), _set_numpy, random.seed])


def generators_of(work: Callable[[], object], device: torch.device) -> Setter:
    """The same, but numpy's and Python's only where `work` drew from them: together they cost 10 us
    each time.
    """
    python, numpy = random.getstate(), pickle.dumps(np.random.get_state())
    work()
    setters = _of_torch(device)
    if numpy != pickle.dumps(np.random.get_state()):
        setters.append(_set_numpy)
    if python != random.getstate():
        setters.append(random.seed)
    return _together(setters)


def _of_torch(device: torch.device) -> list[Setter]:
    setters: list[Setter] = [torch.default_generator.manual_seed]
    if device.type == "cuda":
        setters.append(torch.cuda.default_generators[device.index or 0].manual_seed)
    return setters


def _set_numpy(value: int) -> None:
    np.random.seed(value & 0xFFFFFFFF)  # the global generator is the one that user code draws from


def _together(setters: list[Setter]) -> Setter:
    if len(setters) == 1:
        return setters[0]

    def set_each(value: int) -> None:
        for one in setters:
            one(value)

    return set_each
