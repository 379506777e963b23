"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How it is: in order, worth knowing, needed and not there, or not to be found out."""

    OK = "ok"
    NOTE = "note"
    MISSING = "missing"
    UNKNOWN = "unknown"

    @property
    def sign(self) -> str:
        """One character for a table."""
        return {Severity.OK: "✓", Severity.NOTE: "!", Severity.MISSING: "✗", Severity.UNKNOWN: "?"}[
            self
        ]


@dataclass(frozen=True)
class Finding:
    """One result: what was looked at, how it is, and what helps where it is not in order."""

    name: str
    mark: Severity
    detail: str
    fix: str = ""

    def to_document(self) -> dict[str, str]:
        """For programs: name, mark, detail, fix."""
        return {"name": self.name, "mark": self.mark.value, "detail": self.detail, "fix": self.fix}


def ok(name: str, detail: str) -> Finding:
    """It is in order."""
    return Finding(name, Severity.OK, detail)


def note(name: str, detail: str, fix: str = "") -> Finding:
    """Nothing is wrong, but some jobs will want to know."""
    return Finding(name, Severity.NOTE, detail, fix)


def missing(name: str, detail: str, fix: str) -> Finding:
    """A job cannot do without."""
    return Finding(name, Severity.MISSING, detail, fix)


def unknown(name: str, detail: str, fix: str = "") -> Finding:
    """We may not look."""
    return Finding(name, Severity.UNKNOWN, detail, fix)
