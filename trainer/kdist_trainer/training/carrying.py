"""The save that one rank of the training writes alone, since a lost rank has cut the one before, or
has ended a group that was about to save: how the ranks agree on it, through the groups that it
outlasts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from kdist_trainer.checkpoint.carried_save import CarriedSave
from kdist_trainer.checkpoint.commit import SaveResult
from kdist_trainer.checkpoint.lock import LockRecord

if TYPE_CHECKING:
    from kdist_trainer.training.checkpointing import TrainerCheckpointing


class Carrier(NamedTuple):
    """What a rank tells the others when they continue in place."""

    record: LockRecord | None = None
    """What rank 0 holds the checkpoint folder by."""
    step: int | None = None
    """Of the save that this rank writes alone, unless it has ended."""


class Carrying:
    """What this rank knows of it. All ranks of a group know the step of the save; one has it."""

    def __init__(self, checkpointing: TrainerCheckpointing, own: CarriedSave | None = None) -> None:
        """Know of no save in this group.

        Args:
            checkpointing: What counts saves.
            own: The save that this rank has begun to write in a former group.
        """
        self._checkpointing = checkpointing
        self.own = own
        self.step: int | None = None
        """The step of the save that a rank of this group writes alone."""

    def tell(self) -> Carrier:
        """What the others need to know of this rank."""
        manager = self._checkpointing.manager
        is_going_on = self.own is not None and self.own.result is None
        return Carrier(
            None if manager is None else manager.lock_record,
            self.own.step if self.own is not None and is_going_on else None,
        )

    def find(self, told: Sequence[Carrier]) -> int | None:
        """The step of the save that goes on in this group, if any does."""
        return next((one.step for one in told if one.step is not None), None)

    def go_on(self, told: Sequence[Carrier], *, source: int, is_due: bool) -> None:
        """Go on with the save of a rank. If there is none, and a save was cut or `is_due`, rank
        `source` begins one of the state that all continue with: ranks agree on a save over two
        steps, and the next loss may come before. Called on all ranks.
        """
        manager = self._checkpointing.manager
        rank = self._checkpointing.training.world.rank
        carriers = [number for number, one in enumerate(told) if one.step is not None]
        if manager is None or (record := told[0].record) is None:
            return
        if self.own is not None and [rank] != carriers[:1]:
            self.own.drop()
            self.own = None
        self.step = self.find(told)
        if self.step is None and self._should_begin(source, is_due=is_due):
            self._begin(is_own=rank == source)
        if self.own is not None:
            self.own.attach(record)

    def detach(self) -> None:
        """Leave the group."""
        if self.own is not None:
            self.own.detach()

    def drop(self) -> SaveResult | None:
        """Give the save up: the state that it is of is not continued with, or all ranks save it.
        Returns what has become of it if it was committed before. Collective while there is one.
        """
        own = self.own.step if self.own is not None and self.own.drop() else 0
        committed = 0
        if self.step is not None:  # it is committed by now, or never will be
            committed = max(self._checkpointing.training.world.all_gather_object(own))
        result = self._describe(committed) if committed else None
        self.own = self.step = None
        return result

    @property
    def news(self) -> int:
        """What this rank posts to the others: the step of its save if that is committed, less than
        0 if it has failed, 0 if there is nothing to tell.
        """
        if self.own is None or (result := self.own.result) is None:
            return 0
        return result.step if result.ok else -result.step

    def take_news(self, news: int) -> SaveResult | None:
        """Take in what a rank has posted; called on all ranks at the same step. Returns what has
        become of the save, once.
        """
        if self.step is None or abs(news) != self.step:
            return None
        own = self.own.result if self.own is not None else None
        result = own or self._describe(news)
        self.own = self.step = None
        return result

    def _describe(self, news: int) -> SaveResult:
        """What is known here of another rank's save."""
        seconds = self._checkpointing.clock.seconds_since_start(abs(news))
        cause = "" if news > 0 else "other"
        return SaveResult(abs(news), ok=news > 0, cause=cause, total_seconds=seconds)

    def _should_begin(self, source: int, *, is_due: bool) -> bool:
        checkpointing = self._checkpointing
        manager = checkpointing.manager
        return (
            manager is not None
            and (checkpointing.clock.cuts > 0 or is_due)
            and checkpointing.training.state.step > checkpointing.committed_step
            and (manager.shared or source == 0)
            and checkpointing.weights_are_finite()
        )

    def _begin(self, *, is_own: bool) -> None:
        checkpointing = self._checkpointing
        self.step = checkpointing.training.state.step
        checkpointing.clock.save_started(self.step)
        checkpointing.clock.save_stalled(0.0)
        with suppress(OSError):  # the lines of its steps, which rank 0 has
            checkpointing.step_log.flush()
            checkpointing.step_log.sync()
        if is_own:
            self.own = checkpointing.carry()
