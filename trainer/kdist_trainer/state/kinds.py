"""What the values of a state are, by their flat names: what two states can be compared by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

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
