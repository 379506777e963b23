"""The process groups that this rank has left broken, until they can be destroyed.

What a broken group of gloo's (torch 2.15) does if it is left alone: a connection that has received
a part of a message whose buffer is gone is never read again, and a thread asks for it without end;
a collective waits in a thread until its time-out; sockets stay open. gloo ends all of that when a
receive between two ranks times out: it closes every connection of the group and tells those that
wait. So the first thing that happens to a group that was left is a receive that nobody answers.

gloo forgets to tell a collective that has just sent or received a part of a message; that one waits
until its time-out. Until then the group must be kept: its destructor would wait for it, maybe with
the interpreter's lock, which that thread may want. Whether a thread waits is read from the kernel;
where that is unknown, a group is kept for longer than the time-out. A rank that keeps too many
tells it: its process is replaced by a new one, see `kdist_trainer.agent.coordination`.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup

from kdist_trainer.distributed.group_abort import MadeGroup
from kdist_trainer.processes.threads import OnError, select_named, start_thread, wait_together
from kdist_trainer.torch_internals import GLOO_WORKER, gloo_backend

MOST_WAITED_IN = 16
"""How many groups a rank keeps, since they are still waited in, before its process is replaced."""
_LOOK_SECONDS = 1.0
_MARGIN_SECONDS = 60.0
_MOMENT = timedelta(milliseconds=1)
_TAG = 2**31 - 1
"""Of a message that no rank sends."""


class LeftGroup:
    """One group."""

    def __init__(self, group: ProcessGroup, made: MadeGroup | None, timeout: timedelta) -> None:
        """Take a group; `made` is None for one of the user's code, whose collectives have this
        timeout.
        """
        self._group = group
        self._threads = frozenset(made.threads) if made is not None else frozenset()
        longest = max(timeout, made.timeout) if made is not None else timeout
        self._free_at = time.monotonic() + longest.total_seconds() + _MARGIN_SECONDS

    def close_connections(self) -> None:
        """Have gloo close the connections, and tell all that wait for them."""
        with suppress(RuntimeError):
            backend = gloo_backend(self._group)
            for peer in range(self._group.size()):
                if peer != self._group.rank():
                    with suppress(RuntimeError):  # this connection, or all of them, are closed
                        backend.recv([torch.empty(1)], peer, _TAG).wait(_MOMENT)

    def let_go(self) -> weakref.ref[ProcessGroup]:
        """Hold the group no longer; returns a reference that tells whether others do."""
        reference = weakref.ref(self._group)
        del self._group
        return reference

    def can_be_destroyed(self) -> bool:
        """Whether nothing waits in the group any more, or nothing can, by its time-out."""
        workers = select_named(self._threads, GLOO_WORKER)
        return wait_together(workers) or time.monotonic() > self._free_at


class LeftGroups:
    """The groups that this rank has left. A thread looks after them for as long as there are any,
    every second while the rank trains on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fresh: list[LeftGroup] = []
        self._groups: list[LeftGroup] = []
        self._is_tended = False
        self._crowd = 0
        self._on_crowd: Callable[[int], object] = lambda _: None

    def report_crowd(self, on_crowd: Callable[[int], object]) -> None:
        """From now on, call `on_crowd` every second with the number of groups that are still waited
        in, while they are too many, and once with 0 when they are no longer.
        """
        self._on_crowd = on_crowd

    def add(self, groups: Iterable[LeftGroup]) -> None:
        """Look after groups from now on."""
        with self._lock:
            self._fresh += groups
            if self._is_tended or not self._fresh:
                return
            self._is_tended = True
        start_thread(self._tend, name="kdist-left-groups", on_error=OnError.RESTART)

    def count(self) -> int:
        """The number of groups that are kept."""
        with self._lock:
            return len(self._fresh) + len(self._groups)

    def _tend(self) -> None:
        pause = threading.Event()
        while self._close_fresh():
            pause.wait(_LOOK_SECONDS)
            # destroyed in this thread, and not within the lock; most are still held by a training
            # that was left, whose parts refer to each other
            with self._lock:
                free = [each for each in self._groups if each.can_be_destroyed()]
                self._groups = [each for each in self._groups if each not in free]
            held = [each.let_go() for each in free]
            if any(reference() is not None for reference in held):
                # Quick, since what a rank shares with the forkserver is not searched.
                gc.collect()
            kept, before = len(self._groups), self._crowd
            self._crowd = kept if kept > MOST_WAITED_IN else 0
            if self._crowd or before:
                self._on_crowd(self._crowd)

    def _close_fresh(self) -> bool:
        """Close the connections of the groups that came last; returns whether there are groups."""
        with self._lock:
            fresh, self._fresh = self._fresh, []
            self._groups += fresh
            if not self._groups:
                self._is_tended = False
                return False
        for each in fresh:
            each.close_connections()
        return True


left = LeftGroups()
"""The groups that this process has left."""
