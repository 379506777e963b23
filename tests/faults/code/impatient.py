"""The digits, whose ranks hold a finished training for a few seconds only."""

from __future__ import annotations

from kdist_trainer.checkpoint import checkpointer
from kdist_trainer.workloads.digits import Digits

checkpointer.LONGEST_SECONDS = 3.0  # type: ignore[misc]  # of an hour


class Impatient(Digits):
    """Options: those of the digits."""
