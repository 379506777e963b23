"""What a rank tells the others of the save that it writes alone, as a few numbers."""

from __future__ import annotations

from typing import NamedTuple

from kdist_trainer.checkpoint.commit import DROPPED, SaveResult


class CarriedNews(NamedTuple):
    """What has become of the save that a rank writes alone, as it tells the others."""

    step: int = 0
    """Of the save if it is committed, less than 0 if it has ended otherwise; 0 for no news."""
    nbytes: int = 0
    """Of all files."""
    seconds: float = 0.0
    """Until it was durable; less than 0 if it was not wanted any more, as there is a later one."""

    @classmethod
    def of(cls, result: SaveResult) -> CarriedNews:
        """The news of a save with this result."""
        if result.ok:
            return cls(result.step, result.nbytes, result.total_seconds)
        return cls(-result.step, seconds=-1.0 if result.cause == DROPPED else 0.0)

    def describe(self) -> SaveResult | None:
        """What is known of it on other ranks; None if it was not wanted any more."""
        if self.step > 0:
            return SaveResult(self.step, ok=True, nbytes=self.nbytes, total_seconds=self.seconds)
        return None if self.seconds < 0 else SaveResult(-self.step, ok=False, cause="other")
