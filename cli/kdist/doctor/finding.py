"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """Fine, worth knowing, required but missing, or impossible to check."""

    OK = "ok"
    NOTE = "note"
    MISSING = "missing"
    UNKNOWN = "unknown"

    @property
    def sign(self) -> str:
        return {Severity.OK: "✓", Severity.NOTE: "!", Severity.MISSING: "✗", Severity.UNKNOWN: "?"}[
            self
        ]


@dataclass(frozen=True)
class Finding:
    """One result: what was checked, its severity and details, and a fix if there is a problem."""

    name: str
    mark: Severity
    detail: str
    fix: str = ""

    def to_document(self) -> dict[str, str]:
        return {"name": self.name, "mark": self.mark.value, "detail": self.detail, "fix": self.fix}


def ok(name: str, detail: str) -> Finding:
    """Nothing is wrong."""
    return Finding(name, Severity.OK, detail)


def note(name: str, detail: str, fix: str = "") -> Finding:
    """Nothing is wrong, but it matters for some jobs."""
    return Finding(name, Severity.NOTE, detail, fix)


def missing(name: str, detail: str, fix: str) -> Finding:
    """Something that jobs require is missing."""
    return Finding(name, Severity.MISSING, detail, fix)


def unknown(name: str, detail: str, fix: str = "") -> Finding:
    """The check is not possible, for instance without permission."""
    return Finding(name, Severity.UNKNOWN, detail, fix)
