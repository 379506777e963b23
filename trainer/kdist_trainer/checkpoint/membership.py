"""Under whose lock a save is committed: that of the group that its rank is a member of, which may
change while the save is in progress. Free of torch.
"""

from __future__ import annotations

import threading

from kdist_trainer.checkpoint.lock import LockRecord


class SaveDroppedError(Exception):
    """The save is not wanted any more."""


class Membership:
    """Says under whose lock one save may be committed. Thread-safe.

    A rank leaves its group without waiting for the storage: the lock of the next group keeps a
    commit from counting that comes later. The writer then commits again, under that lock.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._record: LockRecord | None = None
        self.is_dropped = False
        self._is_committing = False
        self.is_committed = False

    def set(self, record: LockRecord | None) -> None:
        """Be a member of the group with this lock; None for no group."""
        with self._changed:
            self._record = record
            self._changed.notify_all()

    def drop(self) -> bool:
        """Have the save not be committed; returns whether it is already. If it is just being
        committed by the group that the rank is a member of, that is waited for.
        """
        with self._changed:
            self.is_dropped = True
            self._changed.notify_all()
            if self._record is not None:
                self._changed.wait_for(lambda: not self._is_committing)
            return self.is_committed

    def begin_commit(self) -> LockRecord:
        """Wait for a group. Raises `SaveDroppedError`."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_dropped or self._record is not None)
            if self.is_dropped or self._record is None:
                raise SaveDroppedError
            self._is_committing = True
            return self._record

    def end_commit(self, *, is_committed: bool) -> None:
        """Take in how an attempt has ended; may be called without one."""
        with self._changed:
            self._is_committing = False
            self.is_committed |= is_committed
            self._changed.notify_all()

    def has_left(self, record: LockRecord) -> bool:
        """Whether the rank is no member any more of the group with this lock."""
        with self._changed:
            return self._record is None or self._record.holder != record.holder
