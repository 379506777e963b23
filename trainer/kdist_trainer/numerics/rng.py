"""Random numbers: derived in the managed loop, so that no generator's state need be saved; in
scripts the states of the generators.

Every draw inside a step of the managed loop follows from (seed, stream, step, shard, chunk). A
resumed training seeds its generators with the same numbers as an uninterrupted one, at any world
size, so no generator's state is ever part of its checkpoints. `torch.manual_seed` is not used: it
also visits every device and takes 100 us. A script draws as it likes: `read_generators` and
`restore_generators` are what its `Checkpointer` keeps of them.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

WEIGHTS: Final = 1
ORDER: Final = 2
FETCH: Final = 3
STEP: Final = 4
EVALUATE: Final = 5

_MASK: Final = (1 << 64) - 1


def derive(seed: int, stream: int, step: int = 0, shard: int = 0, chunk: int = 0) -> int:
    """Mix five numbers into a seed of 64 well-distributed bits, the same on every machine.

    The last two lines are the finisher of splitmix64 (G. Steele, D. Lea, C. Flood, OOPSLA 2014).

    Args:
        seed: Seed of the job.
        stream: What is drawn: `WEIGHTS`, `ORDER`, `FETCH`, `STEP` or `EVALUATE`.
        step: Number of completed steps, or an epoch or position, depending on `stream`.
        shard: Virtual shard.
        chunk: Micro-batch within the shard.
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


_Seeder = Callable[[int], object]


class GeneratorStates(NamedTuple):
    """The states of torch's generator of the CPU, NumPy's and Python's."""

    torch: Tensor
    numpy: Any
    python: Any

    @classmethod
    def read(cls) -> GeneratorStates:
        """The present states."""
        return cls(torch.get_rng_state(), np.random.get_state(), random.getstate())

    def restore(self) -> None:
        """Have the generators continue from these states."""
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


def read_generators() -> dict[str, Any]:
    """The states of every generator of this process that a script draws from without naming it:
    torch's of the CPU and of each CUDA device that is in use, NumPy's and Python's. Plain values
    and tensors, which a checkpoint can hold.
    """
    name, keys, *position = np.random.get_state()
    states: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        # as a tensor, because a checkpoint holds no array
        "numpy": (str(name), torch.from_numpy(np.array(keys, np.int64)), *position),
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = {
            "current": torch.cuda.current_device(),
            "states": torch.cuda.get_rng_state_all(),
        }
    return states


def restore_generators(states: Mapping[str, Any]) -> None:
    """Have the generators continue from states that `read_generators` gave, perhaps in another
    process. The state of the device that was the current one goes to the one that is it now; that
    of a device which is not here goes nowhere.
    """
    torch.set_rng_state(states["cpu"])
    name, keys, *position = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *position))
    version, numbers, following = states["python"]
    random.setstate((version, tuple(numbers), following))
    found = states.get("cuda")
    if found is None or not torch.cuda.is_available():
        return
    for device, state in enumerate(found["states"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, device)
    torch.cuda.set_rng_state(found["states"][found["current"]])


class Generators:
    """Global generators that user code may draw from, seeded together."""

    def __init__(self, seeders: Sequence[_Seeder]) -> None:
        self._seeders = seeders

    @classmethod
    def all(cls, device: torch.device) -> Generators:
        """Torch's generators of the CPU and of `device`, NumPy's and Python's."""
        return cls.of(device, numpy=True, python=True)

    @classmethod
    def of(cls, device: torch.device, *, numpy: bool, python: bool) -> Generators:
        """Torch's generators of the CPU and of `device`; NumPy's and Python's only if asked for."""
        seeders = _torch_seeders(device)
        if numpy:
            seeders.append(_seed_numpy)
        if python:
            seeders.append(random.seed)
        return cls(seeders)

    @classmethod
    def used_by(cls, work: Callable[[], object], device: torch.device) -> Generators:
        """Torch's generators, and NumPy's and Python's only if `work`, which is called once, drew
        from them: seeding both takes 10 us.
        """
        python_state = random.getstate()
        numpy_state = pickle.dumps(np.random.get_state())
        work()
        return cls.of(
            device,
            numpy=numpy_state != pickle.dumps(np.random.get_state()),
            python=python_state != random.getstate(),
        )

    @property
    def has_numpy(self) -> bool:
        """Whether NumPy's generator is one of them."""
        return _seed_numpy in self._seeders

    @property
    def has_python(self) -> bool:
        """Whether Python's generator is one of them."""
        return random.seed in self._seeders

    def seed(self, value: int) -> None:
        """Seed each generator with `value`, 64 bits."""
        for seed in self._seeders:
            seed(value)


def _torch_seeders(device: torch.device) -> list[_Seeder]:
    seeders: list[_Seeder] = [torch.default_generator.manual_seed]
    if device.type == "cuda":
        seeders.append(torch.cuda.default_generators[device.index or 0].manual_seed)
    return seeders


def _seed_numpy(value: int) -> None:
    np.random.seed(value & 0xFFFFFFFF)  # the global generator is the one that user code draws from
