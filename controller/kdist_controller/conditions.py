"""Conditions of a status, as Kubernetes' own objects have them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from kdist.status import documents
from kdist.status.documents import Document


class Condition(NamedTuple):
    """One condition."""

    type: str
    status: bool
    reason: str
    message: str


def find_condition(status: Document, kind: str) -> Document:
    """The condition of this type in a status; empty if there is none."""
    return documents.condition({"status": status}, kind)


def is_true(status: Document, kind: str) -> bool:
    """Whether the condition of this type is true."""
    return find_condition(status, kind).get("status") == "True"


def merge_conditions(
    status: Document, wanted: Iterable[Condition], *, now: float
) -> list[dict[str, Any]]:
    """The conditions of a status with these in place of those of their types. The transition time
    is that of the last change between true and false.
    """
    found = {str(each.get("type")): dict(each) for each in documents.items(status, "conditions")}
    for each in wanted:
        before, state = found.get(each.type, {}), "True" if each.status else "False"
        since = before.get("lastTransitionTime") if before.get("status") == state else None
        found[each.type] = {
            "type": each.type,
            "status": state,
            "reason": each.reason,
            "message": each.message,
            "lastTransitionTime": since or format_time(now),
        }
    return list(found.values())


def camelize(cause: str) -> str:
    """A cause as the reason of a condition: `out-of-memory` is `OutOfMemory`."""
    words = [word for word in re.split(r"[^A-Za-z0-9]+", cause) if word]
    found = "".join(word[0].upper() + word[1:] for word in words)
    return found if found[:1].isalpha() else f"Cause{found}"


def format_time(moment: float) -> str:
    """Unix seconds as the API server writes times."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
