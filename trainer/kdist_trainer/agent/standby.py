"""The standby of a node (`spec.standby: warm`): one worker without a group, which takes the place
of the next worker of its node that is lost.

It is a member of no group: it has no rank, no heartbeat and no metrics, and it prints to the
agent's own output, until it joins a group in another worker's place.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torch.distributed.elastic.multiprocessing.api import PContext

from kdist_trainer import log, process_tree
from kdist_trainer.agent.survivors import Survivors
from kdist_trainer.control import STANDS_BY, WAITING_VARIABLE
from kdist_trainer.liveness import Phase, RankSnapshot
from kdist_trainer.rendezvous.torch_internals import release_queues, worker_processes

START_WITHOUT_GROUP = Callable[[Mapping[int, dict[str, str]]], PContext]
"""Starts workers with these environments; returns torch's handle of them, in the order of keys."""
_KILL_SECONDS = 10.0
_LONGEST_PAUSE_SECONDS = 60.0


class Standby:
    """The standby of this node.

    Args:
        start: Starts it.
        survivors: Knows when it is ready.
        slot: The local rank as which it connects: one that no worker has.
        is_wanted: Whether there is to be one.
    """

    def __init__(
        self, start: START_WITHOUT_GROUP, survivors: Survivors, *, slot: int, is_wanted: bool
    ) -> None:
        self._start = start
        self._survivors = survivors
        self._slot = slot
        self._is_wanted = is_wanted
        self._context: PContext | None = None
        self._is_ready = False
        self._losses = 0
        self._next_start = 0.0
        self._started_at = 0.0
        self._first_step: int | None = None
        self._has_stepped = False

    def pids(self) -> list[int]:
        """Its process id, if it runs."""
        return [] if self._context is None else [int(self._process.pid)]

    def begin_group(self) -> None:
        """A group starts: no standby is started until it has finished a step."""
        self._first_step, self._has_stepped = None, False

    def tend(self, snapshots: list[RankSnapshot], environment: Mapping[str, str]) -> None:
        """Start the standby once the group has finished a step, and replace one that has ended.

        Args:
            snapshots: The heartbeats of this node's ranks.
            environment: The environment of a rank of this node.
        """
        if not self._is_wanted:
            return
        self._notice_steps(snapshots)
        if self._context is not None:
            self._check()
        if self._context is None and self._has_stepped and time.monotonic() >= self._next_start:
            self._begin(environment)

    def _begin(self, environment: Mapping[str, str]) -> None:
        """Start the standby; a failure of that must not end the training."""
        # a rank that no worker has, in case the user's code looks for it
        outside = {"LOCAL_RANK": str(self._slot), "RANK": environment["WORLD_SIZE"]}
        waiting = {**environment, **outside, WAITING_VARIABLE: STANDS_BY}
        self._is_ready, self._started_at = False, time.monotonic()
        try:
            self._context = self._start({self._slot: waiting})
        except (OSError, EOFError, RuntimeError) as error:
            log.warn("standby-lost", message=f"no standby could be started: {error}")
            self._next_start = time.monotonic() + _LONGEST_PAUSE_SECONDS

    def _notice_steps(self, snapshots: list[RankSnapshot]) -> None:
        steps = [snapshot.step for snapshot in snapshots if snapshot.phase is Phase.STEP]
        if steps and self._first_step is None:
            self._first_step = min(steps)
        elif steps and self._first_step is not None:
            self._has_stepped = self._has_stepped or max(steps) > self._first_step

    def _check(self) -> None:
        """Notice that it is ready, or has ended."""
        assert self._context is not None  # noqa: S101 - the caller has checked it
        pid, code = int(self._process.pid), self._process.exitcode
        if code is not None:
            log.warn(
                "standby-lost",
                pid=pid,
                code=code,
                message=f"the standby has ended with code {code}; another one is started",
            )
            self._kill(pid)
            self._context = None
            if time.monotonic() - self._started_at > _LONGEST_PAUSE_SECONDS:
                self._losses = 0
            pause = min(_LONGEST_PAUSE_SECONDS, 2.0**self._losses) if self._losses else 0.0
            self._next_start = time.monotonic() + pause
            self._losses += 1
        elif not self._is_ready and self._survivors.has_left(self._slot, pid):
            self._is_ready = True
            release_queues(self._context)
            seconds = round(time.monotonic() - self._started_at, 3)
            log.event("standby-ready", pid=pid, seconds=seconds)

    def take(self, local_rank: int) -> PContext | None:
        """Have the standby take the place of a worker that was lost.

        Returns:
            torch's handle of it, which is that worker's from now on; None if there is none that is
            ready and not stopped.
        """
        if self._context is not None:
            self._survivors.poll()
            self._check()
        if self._context is None:
            return None
        pid = int(self._process.pid)
        if not self._survivors.has_left(self._slot, pid) or process_tree.is_stopped(pid):
            return None
        self._survivors.move(self._slot, local_rank)
        context, self._context = self._context, None
        self._losses, self._next_start = 0, 0.0
        return context

    def close(self) -> None:
        """Kill the standby; there will be no other one."""
        self._is_wanted = False
        if self._context is not None:
            process, self._context = self._process, None
            self._kill(int(process.pid))
            process.join(_KILL_SECONDS)

    @property
    def _process(self) -> Any:
        assert self._context is not None  # noqa: S101 - the callers have checked it
        return worker_processes(self._context)[0]

    @staticmethod
    def _kill(pid: int) -> None:
        """Kill the process `pid`, its group, and all that it has started."""
        process_tree.kill(below=[pid], seconds=_KILL_SECONDS)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
