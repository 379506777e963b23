"""The one writer of JSON: what it writes is JSON, which has no NaN and no infinity.

Such numbers become the texts `nan`, `inf` and `-inf`, which kdist's readers of numbers understand.
Free of torch and pydantic, since the command line writes with it too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any


def encode_json(
    value: Any,
    *,
    indent: int | None = None,
    ensure_ascii: bool = True,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
    default: Callable[[Any], Any] | None = None,
) -> str:
    """A value as JSON. The arguments are those of `json.dumps`.

    Raises:
        TypeError: JSON cannot hold the value.
        ValueError: it contains itself.
    """

    def dump(what: Any) -> str:
        return json.dumps(
            what,
            indent=indent,
            ensure_ascii=ensure_ascii,
            separators=separators,
            sort_keys=sort_keys,
            default=default,
            allow_nan=False,
        )

    try:
        return dump(value)
    except ValueError:
        return dump(name_nonfinite(value))


def name_nonfinite(value: Any, depth: int = 0) -> Any:
    """The value, with a text in the place of each number that is not finite. Raises `ValueError` if
    it is nested too deep.
    """
    if depth > _MOST_DEPTH:
        raise ValueError("is nested too deep, or contains itself")
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {
            name_nonfinite(key, depth + 1): name_nonfinite(item, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [name_nonfinite(item, depth + 1) for item in value]
    return value


_MOST_DEPTH = 100
