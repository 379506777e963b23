"""The ranks of this node as processes, alike for functions (forkserver) and scripts (subprocesses).

What a rank has started ends with it: each leads a process group, and on Linux the agent is the
parent of what has left that group and lost its own. A child that lived on would keep the rank's
sockets open, and its peers would wait for a rank that is gone.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import time
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import (
    MultiprocessContext,
    PContext,
    SubprocessContext,
)

from kdist_trainer import process_tree
from kdist_trainer.agent.exit_analysis import FORKSERVER_LOST


class WorkerProcesses:
    """The worker processes by local rank. `signal` and `kill` never reach a process that has been
    seen to exit.
    """

    def __init__(self, context: PContext) -> None:
        self._processes: dict[int, Any]
        if isinstance(context, MultiprocessContext):
            assert context._pc is not None  # noqa: S101 - for the type checker: the context was started
            self._processes = dict(enumerate(context._pc.processes))
        else:
            assert isinstance(context, SubprocessContext)  # noqa: S101 - torch has these two
            self._processes = {
                number: handler.proc for number, handler in context.subprocess_handlers.items()
            }
        self._scripts = isinstance(context, SubprocessContext)
        self._watched = {
            self._descriptor(process): number for number, process in self._processes.items()
        }
        self._codes: dict[int, int] = {}
        self._context = context

    def pid(self, local_rank: int) -> int:
        return int(self._processes[local_rank].pid)

    def release(self) -> None:
        """Drop torch's queues and event once all workers have started: they are unused and would
        leak at the end.
        """
        if isinstance(self._context, MultiprocessContext):
            self._context._ret_vals = {}
            self._context._worker_finished_event = None  # type: ignore[assignment]

    def wait(self, seconds: float) -> None:
        """Wait until a worker exits, at most `seconds`."""
        poller = select.poll()
        for descriptor, number in self._watched.items():
            if number not in self._codes and descriptor >= 0:
                poller.register(descriptor, select.POLLIN)
        poller.poll(seconds * 1000)

    def exits(self) -> dict[int, int]:
        """Exit codes of the workers that have exited, by local rank; -9 is SIGKILL. Processes that
        they had started are ended too.
        """
        ended = []
        for number, process in self._processes.items():
            if number not in self._codes:
                code = self._poll_script(process) if self._scripts else process.exitcode
                if code is not None:
                    self._codes[number] = code
                    ended.append(number)
        for number in ended:
            _kill_group(self.pid(number))
        if any(self._codes[number] for number in ended):
            process_tree.kill(below=self._orphans())
        self._reap()
        return dict(self._codes)

    @property
    def living(self) -> list[int]:
        """The local ranks of the running workers."""
        return [number for number in self._processes if number not in self.exits()]

    def signal(self, number: signal.Signals, local_ranks: list[int] | None = None) -> None:
        """Send a signal to the running workers, or to those of them in `local_ranks`."""
        for local_rank in self.living:
            if local_ranks is None or local_rank in local_ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid(local_rank), number)

    def kill(self, *, patience_seconds: float = 10.0) -> list[int]:
        """Kill the running workers and every process that any worker has started; returns the local
        ranks that still have not exited.
        """
        lost = [
            number
            for number, code in self.exits().items()
            if code == FORKSERVER_LOST and not self._scripts
        ]
        for local_rank in [*self.living, *lost]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid(local_rank), signal.SIGKILL)
            _kill_group(self.pid(local_rank))
        deadline = time.monotonic() + patience_seconds
        process_tree.kill(keep=_servers(), seconds=patience_seconds)
        while self.living and time.monotonic() < deadline:
            self.wait(0.05)
        self._reap()
        return self.living

    def _orphans(self) -> list[int]:
        """Processes that a worker started and left: the agent's own children are only the servers
        and scripts.
        """
        own = _servers() | (
            {process.pid for process in self._processes.values()} if self._scripts else set()
        )
        return [pid for pid in process_tree.find_children() if pid not in own]

    def _reap(self) -> None:
        """Reap orphans that have exited; nobody else waits for them."""
        if not hasattr(os, "waitid"):
            return
        known = _servers() | {process.pid for process in self._processes.values()}
        with contextlib.suppress(ChildProcessError):
            while (
                ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            ) and ended.si_pid not in known:
                os.waitpid(ended.si_pid, os.WNOHANG)

    @staticmethod
    def _poll_script(process: Any) -> int | None:
        """The exit code of a script. Its children are killed with it: it leads a process group of
        its own.
        """
        # look before reaping: until then nobody else can get the group's number
        if hasattr(os, "waitid"):
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                _kill_group(process.pid)
        code: int | None = process.poll()
        return code

    def _descriptor(self, process: Any) -> int:
        """A descriptor that becomes readable when the process exits; -1 if the system has none."""
        if not self._scripts:
            return int(process.sentinel)
        try:
            return os.pidfd_open(process.pid)
        except (AttributeError, OSError):
            return -1

    def close(self) -> None:
        """Close the descriptors that were opened here, and remove what torch keeps for the workers,
        on the disk too.
        """
        self.release()
        for path in self._context.error_files.values():
            shutil.rmtree(Path(path).parent.parent, ignore_errors=True)  # the attempt's folder
        _remove_sockets()
        if self._scripts:
            for descriptor in self._watched:
                if descriptor >= 0:
                    os.close(descriptor)
        self._watched = {}


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _remove_sockets() -> None:
    """Remove the sockets over which workers that have exited passed tensors and files to their
    loader processes.
    """
    own = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    for left in Path(own).parent.glob("listener-*") if own else ():
        if left != Path(own):
            left.unlink(missing_ok=True)


def _servers() -> set[int]:
    """Children that serve the agent and not one worker: the forkserver, and multiprocessing's
    resource tracker.
    """
    pids = (forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid)  # type: ignore[attr-defined]
    return {pid for pid in pids if pid is not None}
