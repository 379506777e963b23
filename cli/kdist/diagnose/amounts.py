"""Kubernetes' quantities: `500m`, `4Gi`, `2`, and what pods ask for in them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kdist.quantity import number, size
from kdist.status import fields
from kdist.status.fields import Document

_UNITS = {
    "n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip
_QUANTITY = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)(?:[eE]([+-]?[0-9]{1,2}))?([numkMGTPE]?i?)")


def parse(text: object) -> float | None:
    """The number that a quantity stands for; None if it is none."""
    found = _QUANTITY.fullmatch(str(text)) if isinstance(text, str | int | float) and not isinstance(text, bool) else None
    if found is None or found[3] not in _UNITS:
        return None
    return float(found[1]) * 10.0 ** int(found[2] or 0) * _UNITS[found[3]]


def show(resource: str, amount: float) -> str:
    """An amount as people write it: `8 cpu`, `4.0 GiB memory`."""
    shown = size(amount) if resource in ("memory", "ephemeral-storage") else number(round(amount, 3))
    return f"{shown.removesuffix('.0')} {resource}"


def requests(pod: Document) -> dict[str, float]:
    """What all containers of a pod ask for together."""
    found: dict[str, float] = {}
    for container in fields.items(pod, "spec", "containers"):
        asked: Mapping[str, object] = {
            **fields.mapping(container, "resources", "limits"),
            **fields.mapping(container, "resources", "requests"),
        }
        for resource, amount in asked.items():
            found[resource] = found.get(resource, 0.0) + (parse(amount) or 0.0)
    return found


def allocatable(node: Document, resource: str) -> float:
    """What a node has to give of a resource, to all pods together."""
    return parse(fields.at(node, "status", "allocatable", resource)) or 0.0
