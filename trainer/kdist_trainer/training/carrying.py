"""The save that one rank writes alone after a rank was lost during a save or just before one: how
the ranks agree on it, across the groups that follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from kdist_trainer.checkpoint.commit import DROPPED, SaveResult
from kdist_trainer.checkpoint.lock import LockRecord
from kdist_trainer.checkpoint.writer import CarriedSave

if TYPE_CHECKING:
    from kdist_trainer.training.checkpointing import TrainerCheckpointing


class CarriedNews(NamedTuple):
    """What has become of the save that a rank writes alone, as it is sent to the others."""

    step: int = 0
    """Of the save if it is committed, less than 0 if it has ended otherwise; 0 for no news."""
    nbytes: int = 0
    """Of all files."""
    seconds: float = 0.0
    """Until it was durable; less than 0 if it was not wanted any more, as there is a later one."""

    @classmethod
    def of(cls, result: SaveResult) -> CarriedNews:
        if result.ok:
            return cls(result.step, result.nbytes, result.total_seconds)
        return cls(-result.step, seconds=-1.0 if result.cause == DROPPED else 0.0)

    def describe(self) -> SaveResult | None:
        """What is known of it on other ranks; None if it was not wanted any more."""
        if self.step > 0:
            return SaveResult(self.step, ok=True, nbytes=self.nbytes, total_seconds=self.seconds)
        return None if self.seconds < 0 else SaveResult(-self.step, ok=False, cause="other")


class Carrier(NamedTuple):
    """What a rank sends to the others when they continue in place."""

    record: LockRecord | None = None
    """What rank 0 holds the checkpoint folder by."""
    step: int | None = None
    """Of the save that this rank writes alone, unless it has ended."""
    news: CarriedNews = CarriedNews()
    """What has become of it, if that was not sent yet."""


class Carrying:
    """What this rank knows of it. All ranks of a group know the step of the save; one has it."""

    def __init__(self, checkpointing: TrainerCheckpointing, own: CarriedSave | None = None) -> None:
        """Know of no save in this group; `own` is the one that this rank has begun to write in a
        former group.
        """
        self._checkpointing = checkpointing
        self.own = own
        self.step: int | None = None
        """The step of the save that a rank of this group writes alone."""

    def describe(self) -> Carrier:
        """What the others need to know of this rank."""
        manager = self._checkpointing.manager
        news = self.news  # read once: the save may end at any time
        is_in_progress = self.own is not None and not news.step
        return Carrier(
            None if manager is None else manager.folder.lock_record,
            self.own.step if self.own is not None and is_in_progress else None,
            news,
        )

    def find(self, peers: Sequence[Carrier]) -> tuple[int, int] | None:
        """The rank and the step of the save that continues in this group, if any does. Where the
        ranks do not share the folder, only rank 0's counts.
        """
        manager = self._checkpointing.manager
        counted = peers if manager is not None and manager.shared else peers[:1]
        found = [(number, one.step) for number, one in enumerate(counted) if one.step is not None]
        return found[0] if found else None

    def continue_saving(self, peers: Sequence[Carrier], *, source: int, is_due: bool) -> None:
        """Continue with the save of a rank. If there is none, and a save was cut or `is_due`, rank
        `source` begins one of the state that all continue with: ranks agree on a save over two
        steps, and the next loss may come before. Called on all ranks.
        """
        checkpointing = self._checkpointing
        manager, rank = checkpointing.manager, checkpointing.training.world.rank
        if manager is None or (record := peers[0].record) is None:
            return
        carrier, self.step = self.find(peers) or (-1, None)
        if self.own is not None and rank != carrier:
            self.own.drop()
            self.own = None
        if self.step is not None:
            self._sync_lines()
        elif (
            (checkpointing.clock.cuts > 0 or is_due)
            and checkpointing.training.state.step > checkpointing.committed_step
            and (manager.shared or source == 0)
            and checkpointing.weights_are_finite()
        ):
            self.step = checkpointing.training.state.step
            checkpointing.clock.save_started(self.step)
            checkpointing.clock.save_stalled(0.0)
            self._sync_lines()
            if rank == source:
                self.own = checkpointing.carry()
        if self.own is not None:
            self.own.attach(record)

    def take(self, save: CarriedSave) -> None:
        """Continue alone with the save of the group that was left, instead of an earlier one."""
        if self.own is not None:
            self.own.drop()
        self.own = save

    def detach(self) -> None:
        if self.own is not None:
            self.own.detach()

    def drop(self) -> SaveResult | None:
        """Abandon the save: the state that it is of is not continued with, or all ranks save it.
        Returns what has become of it if it was committed before. Collective while there is one.
        """
        own = CarriedNews()
        if self.own is not None and self.own.drop():
            own = CarriedNews.of(self.own.wait())
        if self.step is None:  # the others do not know of it: nothing that they must count as well
            own = CarriedNews()
        else:  # it is committed by now, or never will be
            own = max(self._checkpointing.training.world.all_gather_object(own))
        self.own = self.step = None
        return own.describe() if own.step > 0 else None

    @property
    def is_in_progress(self) -> bool:
        """Whether this rank is writing a save alone. Any thread may ask."""
        return (own := self.own) is not None and own.is_in_progress

    @property
    def news(self) -> CarriedNews:
        """What this rank posts to the others."""
        result = None if self.own is None else self.own.result
        return CarriedNews() if result is None else CarriedNews.of(result)

    def take_news(self, news: CarriedNews) -> SaveResult | None:
        """Handle what a rank has posted; called on all ranks at the same step. Returns what has
        become of the save, once; None also if it was not wanted any more.
        """
        if self.step is None or abs(news.step) != self.step:
            return None
        own = self.own.result if self.own is not None else None
        self.own = self.step = None
        return own if own is not None and own.cause != DROPPED else news.describe()

    def _sync_lines(self) -> None:
        """Have the lines of its steps on the disk, which rank 0 has."""
        with suppress(OSError):
            self._checkpointing.step_log.flush()
            self._checkpointing.step_log.sync()
