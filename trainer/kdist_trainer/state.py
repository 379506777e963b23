"""All that must survive besides model and optimizer: where the training is, and small states kept beside it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass
class TrainState:
    """The position of a training; `samples_seen` and `seed` say which samples come next."""

    seed: int
    fingerprint: str
    """Identity of the data set."""
    world_size: int
    environment: str
    """What besides the world size must be the same for equal bits: versions, threads, device."""
    step: int = 0
    samples_seen: int = 0
    evaluated: int = 0
    """The step after which the model was measured last, on the way."""
    extras: dict[str, Any] = field(default_factory=dict)
    """States of scheduler and loss scaler; JSON-able."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> TrainState:
        """Read back what `to_json` gave; what a newer version added is left out."""
        known = {one.name for one in fields(cls)}
        return cls(**{key: value for key, value in document.items() if key in known})

    def describe_writer(self) -> str:
        """Who wrote it, or would: equal texts promise equal bits."""
        return f"{self.world_size} rank{'s'[: self.world_size - 1]}, {self.environment}"
