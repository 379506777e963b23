"""The kind of each value of a state, by flat name, and digests of the values: to compare what two
ranks hold, or what one held before. Digests detect a difference, not an attacker.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kdist_trainer.formats.digest import Hasher, new_hasher

Path = tuple[str | int, ...]
"""Keys and indices that lead to a value of a nested state."""


class ValueKind(NamedTuple):
    """What a value is. As JSON it is a list of the three; `ValueKind(*document)` is equal to it."""

    kind: str
    """`tensor`, or the name of the type."""
    shape: list[int] | None = None
    dtype: str | None = None
    """`float32` and so on."""

    def __str__(self) -> str:
        return self.kind if self.shape is None else f"{self.dtype}{self.shape}"


def kind_of(value: Any) -> ValueKind:
    """What a value is."""
    if isinstance(value, Tensor):
        return ValueKind("tensor", list(value.shape), str(value.dtype).removeprefix("torch."))
    return ValueKind(type(value).__name__)


def describe(state: Mapping[str, Any]) -> dict[str, ValueKind]:
    """What every value of a nested state is, by its flat name: `optimizer.state.fc.weight.step`."""
    return {name: kind_of(value) for name, (_, value) in flatten(state).items()}


def flatten(state: Mapping[str, Any]) -> dict[str, tuple[Path, Any]]:
    """The values of a nested state with their paths, by the flat names that checkpoints have. Dicts
    whose keys are texts are taken apart, and lists that hold tensors or such dicts; a tuple is one
    value.
    """
    return {".".join(map(str, path)): (path, value) for path, value in _walk((), state)}


def find_differences(own: Mapping[str, ValueKind], saved: Mapping[str, ValueKind]) -> list[str]:
    """How `saved` differs from `own`, the description that is demanded; empty if it fits. Values
    that are no tensors need not be of the same type.
    """
    problems = [f"{name} is missing" for name in own if name not in saved]
    problems += [f"{name} is not in the model" for name in saved if name not in own]
    for name, ours in own.items():
        theirs = saved.get(name, ours)
        if "tensor" in (ours.kind, theirs.kind) and theirs != ours:
            problems.append(f"{name} is {theirs} instead of {ours}")
    return problems


def put(state: dict[str, Any], path: Path, value: Any) -> None:
    """Set a value of a nested state: what is on the way to it is made, a list before a number."""
    inner: Any = state
    for key, following in zip(path, (*path[1:], None), strict=True):
        if isinstance(inner, list):
            inner += [None] * (int(key) + 1 - len(inner))
        found = value if following is None else [] if isinstance(following, int) else {}
        if following is None or (inner.get(key) if isinstance(inner, dict) else inner[key]) is None:
            inner[key] = found
        inner = inner[key]


def _walk(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if _is_taken_apart(value):
        for key, one in value.items():
            yield from _walk((*path, key), one)
    elif isinstance(value, list) and _has_parts(value):
        for index, one in enumerate(value):
            yield from _walk((*path, index), one)
    else:
        yield path, value


def _is_taken_apart(value: Any) -> bool:
    """Whether a value is a dict whose keys are all texts: others would not keep their types."""
    return isinstance(value, Mapping) and all(type(key) is str for key in value)


def _has_parts(values: list[Any]) -> bool:
    """Whether a list is taken apart."""
    return any(
        isinstance(one, Tensor)
        or _is_taken_apart(one)
        or (isinstance(one, list) and _has_parts(one))
        for one in values
    )


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
