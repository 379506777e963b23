"""The values of `state.json`: plain JSON, in which tuples and keys that are no texts keep their
types. Free of torch.

A tuple is written as `{"$tuple": [...]}`, a dict with other keys than texts as `{"$items": [[key,
value], ...]}`, a number that is not finite, which JSON does not have, as `{"$float": "nan"}`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kdist_trainer.errors import CheckpointMismatchError

_TUPLE: Final = "$tuple"
_ITEMS: Final = "$items"
_FLOAT: Final = "$float"
_MOST_DEPTH: Final = 40  # two levels of JSON each


class UnloadableStateError(CheckpointMismatchError):
    """The state of the training holds what a checkpoint could not give back; the message names it,
    and what to do.
    """


def encode(value: Any, path: str) -> tuple[Any, bool]:
    """A value as JSON.

    Args:
        value: numbers, texts, and dicts, lists and tuples of these.
        path: what leads to it, for the error.

    Returns:
        The value, and whether it holds what plain JSON does not.

    Raises:
        UnloadableStateError: it holds something else.
    """
    encoder = _Encoder()
    return encoder.encode(value, path, 0), encoder.extended


class _Encoder:
    def __init__(self) -> None:
        self.extended = False

    def encode(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            self.extended = True
            return {_FLOAT: str(float(value))}
        if value is None or type(value) in (bool, int, float, str):
            return value
        if depth > _MOST_DEPTH:
            raise UnloadableStateError(
                f"{path[:200]} is nested deeper than {_MOST_DEPTH} levels, or holds itself: it "
                "cannot be saved"
            )
        if type(value) is tuple:
            self.extended = True
            return {_TUPLE: self._each(value, path, depth)}
        if type(value) is list:
            return self._each(value, path, depth)
        if isinstance(value, Mapping):
            return self._encode_mapping(value, path, depth)
        return _plain(value, path)

    def _each(self, values: Iterable[Any], path: str, depth: int) -> list[Any]:
        return [
            self.encode(one, f"{path}[{number}]", depth + 1) for number, one in enumerate(values)
        ]

    def _encode_mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> Any:
        pairs = [
            (key, self.encode(one, f"{path}[{key!r:.80}]", depth + 1)) for key, one in value.items()
        ]
        texts = {str(key): one for key, one in pairs if isinstance(key, str)}
        if len(texts) == len(pairs) and not (texts.keys() & {_TUPLE, _ITEMS, _FLOAT}):
            return texts
        self.extended = True
        return {
            _ITEMS: [
                [self.encode(key, f"the key {key!r:.80} of {path}", depth + 1), one]
                for key, one in pairs
            ]
        }


def _plain(value: Any, path: str) -> Any:
    """A number or text of Python's own types."""
    kind = type(value)
    if kind.__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if value is True or value is False:
        return value
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise UnloadableStateError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved there: give "
        "numbers, texts, and dicts, lists and tuples of these"
    )


def decode(value: Any) -> Any:
    """The value that was given to `encode`. Raises `ValueError`, `TypeError` or `RecursionError` if
    it is none.
    """
    if isinstance(value, list):
        return [decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TUPLE}:
        return tuple(decode(one) for one in value[_TUPLE])
    if value.keys() == {_FLOAT}:
        return float(value[_FLOAT])
    if value.keys() == {_ITEMS}:
        return {decode(key): decode(one) for key, one in value[_ITEMS]}
    return {key: decode(one) for key, one in value.items()}
