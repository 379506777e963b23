"""All that must survive besides model and optimizer: where the training is, and small states kept beside it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass
class TrainState:
    """The position of a training; `samples_seen` alone says which samples come next."""

    seed: int
    fingerprint: str
    step: int = 0
    samples_seen: int = 0
    world_size: int = 0
    """Ranks of the group that wrote it: another number resumes correctly but not to the same bits."""
    environment: str = ""
    """Versions, threads and device of the writer, for the same reason."""
    extras: dict[str, Any] = field(default_factory=dict)
    """States of scheduler and loss scaler, JSON-able."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> TrainState:
        """Read back what `to_json` gave; unknown keys of a newer version are left out."""
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in document.items() if key in known})
