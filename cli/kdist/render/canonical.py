"""Quantities as the API server writes them back, so that sending a job again changes nothing: `0.2` is `200m`."""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal
from typing import Any, Final

_STEPS: Final = {1024: ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1000: ("k", "M", "G", "T", "P", "E")}


def cpu(text: str) -> str:
    """Cores (`1.5`) or millicores (`1500m`); less than a millicore is rounded up to one."""
    exact = Decimal(text.removesuffix("m")) * (1 if text.endswith("m") else 1000)
    millis = int(exact.to_integral_value(ROUND_CEILING))
    return f"{millis}m" if millis % 1000 else str(millis // 1000)


def storage(text: str) -> str:
    """Bytes with the largest unit that leaves a whole number."""
    digits = text.rstrip("KMGTPEik")
    number, unit = int(digits), text[len(digits) :]
    for step, units in _STEPS.items():
        if unit in units:
            place = units.index(unit)
            while number % step == 0 and place + 1 < len(units):
                number, place = number // step, place + 1
            return f"{number}{units[place]}"
    return text


def rewrite(document: dict[str, Any]) -> dict[str, Any]:
    """The job file's document with its quantities in that form; the rest is shared with the original."""
    spec = dict(document["spec"])
    wanted = spec["resources"]
    spec["resources"] = {**wanted, "cpu": cpu(wanted["cpu"]), "memory": storage(wanted["memory"])}
    if spec["checkpoints"] and spec["checkpoints"]["size"]:
        spec["checkpoints"] = {**spec["checkpoints"], "size": storage(spec["checkpoints"]["size"])}
    return {**document, "spec": spec}
