"""A broken rule of job.yaml, and the pydantic error that carries it with the wrong field."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pydantic_core import PydanticCustomError

RULE = "job_rule"  # the type of the pydantic error that carries violations


class Violation(NamedTuple):
    """One broken rule. Fields are dotted names relative to the model that the rule belongs to."""

    message: str
    at: str  # the wrong field; empty for the model itself
    fields_read: tuple[str, ...]  # the fields that the rule has read
    suggestion: str = ""


def refuse(violations: Iterable[Violation]) -> None:
    """Raise a `PydanticCustomError` with all violations, if there are any."""
    found = [tuple(violation) for violation in violations]
    if found:
        text = "; ".join(f"{each[1]} {each[0]}".lstrip() for each in found)
        raise PydanticCustomError(RULE, "{text}", {"text": text, "violations": found})
