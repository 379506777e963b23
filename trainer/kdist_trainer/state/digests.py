"""Digests of states, by their values: to compare what two ranks hold, or what one held before.

They detect a difference, not an attacker.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kdist_trainer.digest import Hasher, new_hasher
from kdist_trainer.state.kinds import flatten, kind_of

_WORDS: Final = 1 << 21
"""Words of eight bytes that a device multiplies at a time."""
_NUMBERS: Final = (bool, int, float, str, bytes, type(None))


def digest_of(value: Any) -> str:
    """The digest of a value: equal for values that are equal to the bit, of the same types."""
    hasher = new_hasher()
    _update(hasher, value)
    return hasher.hexdigest()


def digests_of(state: Mapping[str, Any]) -> dict[str, str]:
    """The digest of every value of a nested state, by its flat name."""
    return {name: digest_of(value) for name, (_, value) in flatten(state).items()}


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes in the order of its elements; of a sharded one this rank's."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    whole = own.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return whole.view(torch.uint8).numpy().data


def _hash_on_device(tensor: Tensor) -> bytes:
    """A checksum of a tensor's bytes that its device computes: a copy to the CPU takes longer."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat = own.detach().contiguous().reshape(-1).view(torch.uint8)
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    for begin in range(0, words.numel(), _WORDS):  # the device may have little memory left
        part = words[begin : begin + _WORDS]
        places = torch.arange(begin, begin + part.numel(), device=words.device)
        total += torch.stack([(part * (2 * places + 1)).sum(), part.sum()])
    weighted, plain = total.tolist()
    return f"{weighted} {plain} {flat[words.numel() * 8 :].tolist()}".encode()


def _update(hasher: Hasher, value: Any) -> None:
    if isinstance(value, Tensor):
        hasher.update(f"{kind_of(value)};".encode())
        if value.is_meta:
            return
        try:
            hasher.update(_hash_on_device(value) if value.is_cuda else bytes_of(value))
        except (RuntimeError, TypeError):  # a sparse or quantized tensor has other parts
            hasher.update(_pickle(value))
    elif isinstance(value, Mapping):
        hasher.update(f"{type(value).__name__}{len(value)}{{".encode())
        for key, one in value.items():
            _update(hasher, key)
            _update(hasher, one)
    elif isinstance(value, list | tuple):
        hasher.update(f"{type(value).__name__}{len(value)}[".encode())
        for one in value:
            _update(hasher, one)
    elif isinstance(value, _NUMBERS):
        hasher.update(f"{type(value).__name__}:{value!r};".encode())
    elif isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        hasher.update(f"{type(value).__name__}{value.dtype}{value.shape};".encode())
        hasher.update(value.tobytes())
    elif isinstance(value, set | frozenset):
        hasher.update(f"{type(value).__name__}{sorted(digest_of(one) for one in value)}".encode())
    else:
        hasher.update(_pickle(value))


def _pickle(value: Any) -> bytes:
    """The bytes of any other object; its type where it has none."""
    try:
        return pickle.dumps(value)
    except Exception:  # noqa: BLE001 - whatever the object's own methods raise
        return f"{type(value).__module__}.{type(value).__qualname__};".encode()
