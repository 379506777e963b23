"""What the object that makes the pods says of itself, in words that do not depend on its kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class WorkloadState:
    """State of a workload. Counts are of pods; `finished` is None while it is at work or waits.

    `reason` and `message` are the workload's own, of its end or of what keeps it from working.
    """

    active: int = 0
    ready: int = 0
    succeeded: int = 0
    failed: int = 0
    suspended: bool = False
    finished: Literal["succeeded", "failed"] | None = None
    reason: str = ""
    message: str = ""
