"""What a server-side apply has done to an object, and the part of an object that decides whether it
has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Document = dict[str, Any]

# What the server writes into metadata by itself.
_SERVERS_OWN = frozenset(
    {"managedFields", "resourceVersion", "generation", "uid", "creationTimestamp", "selfLink"}
)


@dataclass(frozen=True)
class Applied:
    """What came of sending an object: as the server has it now, what it was before (None if new),
    and its warnings.
    """

    document: Document
    verb: Literal["created", "configured", "unchanged"]
    before: Document | None = None
    warnings: tuple[str, ...] = ()


def essence(document: Mapping[str, Any]) -> Document:
    """An object without what the server keeps about it by itself: two objects of one essence are
    the same to their user.
    """
    metadata = {
        key: value for key, value in document.get("metadata", {}).items() if key not in _SERVERS_OWN
    }
    return {key: value for key, value in document.items() if key != "status"} | {
        "metadata": metadata
    }
