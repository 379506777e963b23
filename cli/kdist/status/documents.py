"""Access to fields of untrusted documents. A field that is missing or of an unexpected type reads
as None or as an empty value; nothing raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from functools import cache
from typing import Any

from kdist_trainer.formats.untrusted_text import MalformedTextError, parse_object

Document = Mapping[str, Any]

_EMPTY: Document = {}
_NON_FINITE = {
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "Infinity": math.inf,
    "-Infinity": -math.inf,
    "NaN": math.nan,
}


def parse(found: str | bytes | None, *, allow_nan: bool = False) -> dict[str, Any]:
    """Return the JSON object in a text; an empty one if there is none."""
    try:
        return parse_object(found or b"", allow_nan=allow_nan)
    except MalformedTextError:
        return {}


def at(document: object, *path: str) -> Any:
    """Return the value at a path of keys; None if there is none."""
    for key in path:
        if not isinstance(document, Mapping):
            return None
        document = document.get(key)
    return document


def mapping(document: object, *path: str) -> Document:
    """Return the object at the path; an empty one if there is none."""
    found = at(document, *path)
    return found if isinstance(found, Mapping) else _EMPTY


def items(document: object, *path: str) -> list[Document]:
    """Return the objects in the list at the path."""
    found = at(document, *path)
    return (
        [item for item in found if isinstance(item, Mapping)]
        if isinstance(found, list | tuple)
        else []
    )


def texts(document: object, *path: str) -> list[str]:
    """Return the texts in the list at the path."""
    found = at(document, *path)
    return [item for item in found if isinstance(item, str)] if isinstance(found, list) else []


def text(document: object, *path: str) -> str:
    """Return the text at the path; empty if there is none."""
    found = at(document, *path)
    return found if isinstance(found, str) else ""


def integer(document: object, *path: str) -> int | None:
    """Return the number at the path as an integer; None if there is no finite number."""
    found = number(document, *path)
    return None if found is None or not math.isfinite(found) else int(found)


def number(document: object, *path: str) -> float | None:
    """The number at the path, or what a word like `"nan"` stands for, which JSON cannot express."""
    found = at(document, *path)
    if isinstance(found, str):
        return _NON_FINITE.get(found)
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    try:
        return float(found)
    except OverflowError:
        return None


def boolean(document: object, *path: str) -> bool | None:
    """Return true or false at the path; None if there is neither."""
    found = at(document, *path)
    return found if isinstance(found, bool) else None


def moment(document: object, *path: str) -> float | None:
    """Return the RFC 3339 time at the path as unix seconds; None if there is none."""
    found = text(document, *path)
    try:
        read = datetime.fromisoformat(found)
        return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


_READERS: dict[str, Callable[..., Any]] = {
    "str": text,
    "int": lambda document, key: integer(document, key) or 0,
    "int | None": integer,
    "float | None": number,
    "bool | None": boolean,
}


def read_fields(
    kind: type, document: object, keys: Mapping[str, str] = _EMPTY, /, **read: Any
) -> dict[str, Any]:
    """The values of a dataclass's fields: those in `read` as they are, any other by its type and
    under its own name or that in `keys`. Its module's annotations must be text.

    Raises `TypeError` for a field of a type that is not known.
    """
    for name, reader in _plan(kind, frozenset(read)):
        read[name] = reader(document, keys.get(name, name))
    return read


@cache
def _plan(kind: type, read: frozenset[str]) -> tuple[tuple[str, Callable[..., Any]], ...]:
    """The fields of a dataclass that are not read yet, and their readers."""
    types = {each.name: str(each.type) for each in fields(kind) if each.name not in read}
    for name, type_ in types.items():
        if type_ not in _READERS:
            raise TypeError(f"{kind.__name__}.{name}: {type_} has no reader")
    return tuple((name, _READERS[type_]) for name, type_ in types.items())


def name(document: object) -> str:
    """Return the name of an object."""
    return text(document, "metadata", "name")


def uid(document: object) -> str:
    """Return the uid of an object; empty if there is none."""
    return text(document, "metadata", "uid")


def label(document: object, key: str) -> str:
    """Return a label of an object; empty if there is none."""
    return text(document, "metadata", "labels", key)


def annotation(document: object, key: str) -> str:
    """Return an annotation of an object; empty if there is none."""
    return text(document, "metadata", "annotations", key)


def condition(document: object, kind: str) -> Document:
    """Return the condition of that type in an object's status; an empty one if there is none."""
    return next(
        (each for each in items(document, "status", "conditions") if text(each, "type") == kind),
        _EMPTY,
    )


def is_renewed(workload: Document | None) -> bool:
    """Whether a StatefulSet without pods will make the next ones from its newest template, as its
    status says.
    """
    status = mapping(workload, "status")
    renewed = status.get("currentRevision") == status.get("updateRevision")
    return renewed and integer(status, "observedGeneration") == integer(
        workload, "metadata", "generation"
    )


def last_seen(event: Mapping[str, Any]) -> str:
    """Time of an event as RFC 3339 text, which sorts chronologically; empty if it has none."""
    times = (
        (event.get("series") or {}).get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
        event.get("firstTimestamp"),
        (event.get("metadata") or {}).get("creationTimestamp"),
    )
    return next((str(each) for each in times if each), "")
