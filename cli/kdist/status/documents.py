"""Reading of documents that others wrote: whatever is missing or of another kind reads as nothing,
and nothing raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

Document = Mapping[str, Any]

_NOTHING: Document = {}
_WORDS = {
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "Infinity": math.inf,
    "-Infinity": -math.inf,
    "NaN": math.nan,
}


def at(document: object, *path: str) -> Any:
    """The value at a path of keys; None where there is none."""
    for key in path:
        if not isinstance(document, Mapping):
            return None
        document = document.get(key)
    return document


def mapping(document: object, *path: str) -> Document:
    """The object at the path; an empty one where there is none."""
    found = at(document, *path)
    return found if isinstance(found, Mapping) else _NOTHING


def items(document: object, *path: str) -> list[Document]:
    """The objects in the list at the path."""
    found = at(document, *path)
    return (
        [item for item in found if isinstance(item, Mapping)]
        if isinstance(found, list | tuple)
        else []
    )


def text(document: object, *path: str) -> str:
    """The text at the path; empty where there is none."""
    found = at(document, *path)
    return found if isinstance(found, str) else ""


def integer(document: object, *path: str) -> int | None:
    """The whole number at the path."""
    found = number(document, *path)
    return None if found is None or not math.isfinite(found) else int(found)


def number(document: object, *path: str) -> float | None:
    """The number at the path; JSON's missing ones (`"nan"`) come as words."""
    found = at(document, *path)
    if isinstance(found, str):
        return _WORDS.get(found)
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    try:
        return float(found)
    except OverflowError:
        return None


def moment(document: object, *path: str) -> float | None:
    """The RFC 3339 time at the path, as unix seconds."""
    found = text(document, *path)
    try:
        read = datetime.fromisoformat(found)
        return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def name(document: object) -> str:
    """Name of an object."""
    return text(document, "metadata", "name")


def label(document: object, key: str) -> str:
    """A label of an object; empty where there is none."""
    return text(document, "metadata", "labels", key)


def annotation(document: object, key: str) -> str:
    """An annotation of an object; empty where there is none."""
    return text(document, "metadata", "annotations", key)


def condition(document: object, kind: str) -> Document:
    """The condition of that type in an object's status; an empty one where there is none."""
    return next(
        (each for each in items(document, "status", "conditions") if text(each, "type") == kind),
        _NOTHING,
    )
