"""How often the loss that a script has reported was NaN or infinite, as exit records tell it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from kdist.status import documents
from kdist.units import count


@dataclass(frozen=True)
class NonfiniteLoss:
    """The number of reported steps with such a loss, and the last loss, as text, if it was one of
    them; empty if it was none, or is not known.
    """

    steps: int
    last: str = ""

    def __str__(self) -> str:
        times = f"NaN or infinite in {count(self.steps, 'reported step')}"
        return f"{times}, and is {self.last} at the end" if self.last else times

    def to_document(self) -> dict[str, Any]:
        """The numbers for programs."""
        return {**asdict(self), "last": self.last or None}

    @classmethod
    def read(cls, record: object) -> NonfiniteLoss | None:
        """What an exit record tells; None if no such loss was reported."""
        told = documents.at(record, "nonfinite_loss")
        steps = documents.integer(told, "steps") or 0
        return cls(steps, documents.text(told, "last")) if steps > 0 else None

    @classmethod
    def gather(cls, records: Iterable[object]) -> NonfiniteLoss | None:
        """The same of all nodes: a loss is reported by the ranks of some of them."""
        return cls.merge(map(cls.read, records))

    @classmethod
    def merge(cls, told: Iterable[NonfiniteLoss | None]) -> NonfiniteLoss | None:
        """What several nodes tell together."""
        known = [each for each in told if each is not None]
        steps = max((each.steps for each in known), default=0)
        return cls(steps, next((each.last for each in known if each.last), "")) if steps else None
