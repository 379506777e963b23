"""The result of a server-side apply, and the normalized form of an object that shows whether it has
changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Document = dict[str, Any]

# Metadata that the server sets.
_SERVER_SET = frozenset(
    {"managedFields", "resourceVersion", "generation", "uid", "creationTimestamp", "selfLink"}
)


@dataclass(frozen=True)
class Applied:
    """Result of a server-side apply.

    Attributes:
        document: the object as the server has it now.
        verb: what was done.
        before: the object as it was; None if it is new.
        warnings: of the server.
    """

    document: Document
    verb: Literal["created", "configured", "unchanged"]
    before: Document | None = None
    warnings: tuple[str, ...] = ()


def normalize(document: Mapping[str, Any]) -> Document:
    """The object without status and server-set metadata. Objects that are equal in this form are
    the same to their user.
    """
    metadata = {
        key: value for key, value in document.get("metadata", {}).items() if key not in _SERVER_SET
    }
    return {key: value for key, value in document.items() if key != "status"} | {
        "metadata": metadata
    }
