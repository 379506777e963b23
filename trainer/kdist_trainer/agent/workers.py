"""The worker processes of this node: functions run in children of the forkserver, scripts in
subprocesses.

Every process that a worker has started is killed with it: each worker leads a process group, and on
Linux the agent adopts processes that have left the group and lost their parent. A child that kept
running would keep the rank's sockets open, and its peers would wait for a dead rank.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import time
from collections.abc import Collection, Iterable, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import PContext, SubprocessContext

from kdist_trainer.agent.exit_analysis import FORKSERVER_LOST
from kdist_trainer.agent.forkserver import supervise_script_forkserver
from kdist_trainer.processes import process_tree
from kdist_trainer.rendezvous import store_process
from kdist_trainer.rendezvous.torch_internals import release_queues, worker_processes


class WorkerProcesses:
    """The worker processes by local rank. `signal` and `kill` never reach a process that has been
    seen to exit.
    """

    def __init__(self) -> None:
        self._processes: dict[int, Any] = {}
        self._is_script = False
        self._descriptors: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._contexts: dict[int, PContext] = {}
        """torch's handle of each worker, by local rank."""

    def add(self, context: PContext, local_ranks: Sequence[int]) -> None:
        """Add started workers.

        Args:
            context: torch's handle of them, in the order of `local_ranks`.
            local_ranks: Their local ranks; workers with the same ones have exited.
        """
        before = {id(each): each for each in self._contexts.values()}
        self._contexts |= dict.fromkeys(local_ranks, context)
        for each in self._contexts.values():
            before.pop(id(each), None)
        for replaced in before.values():
            _remove_files(replaced)
        self._is_script = isinstance(context, SubprocessContext)
        for number, process in worker_processes(context).items():
            local_rank = local_ranks[number]
            self._processes[local_rank] = process
            self._codes.pop(local_rank, None)
        self._descriptors = {
            self._descriptor(process): local_rank
            for local_rank, process in self._processes.items()
            if local_rank not in self._codes
        }

    @property
    def local_ranks(self) -> Collection[int]:
        """The local ranks of all workers, also of those that have exited."""
        return self._processes.keys()

    def pid(self, local_rank: int) -> int:
        """The process id of a worker."""
        return int(self._processes[local_rank].pid)

    def release(self) -> None:
        """Release torch's queues and event once all workers have started."""
        for context in self._contexts.values():
            release_queues(context)

    def wait(self, seconds: float, *, also: Iterable[int] = ()) -> None:
        """Wait until a worker exits or a descriptor in `also` is readable, at most `seconds`."""
        poller = select.poll()
        for descriptor in also:
            poller.register(descriptor, select.POLLIN)
        for descriptor, number in self._descriptors.items():
            if number not in self._codes and descriptor >= 0:
                poller.register(descriptor, select.POLLIN)
        poller.poll(seconds * 1000)

    def exits(self) -> dict[int, int]:
        """Exit codes of the workers that have exited, by local rank; -9 means SIGKILL. Processes
        that they had started are killed.
        """
        ended = []
        for number, process in self._processes.items():
            if number not in self._codes:
                code = self._poll_script(process) if self._is_script else process.exitcode
                if code is not None:
                    self._codes[number] = code
                    ended.append(number)
        for number in ended:
            _kill_group(self.pid(number))
        if any(self._codes[number] for number in ended):
            process_tree.kill(spared=self._own_children())
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

    def kill(self, *, timeout_seconds: float = 10.0, keep: Collection[int] = ()) -> list[int]:
        """Kill the running workers, except those of the local ranks in `keep`, and every process
        that the others have started; returns those that have not exited after `timeout_seconds`.
        If all of them run and are kept, nothing is killed.
        """
        if self._processes and not self.exits() and self._processes.keys() <= set(keep):
            return []  # a process that has lost its parent was started by one of them too
        lost = [
            number
            for number, code in self.exits().items()
            if code == FORKSERVER_LOST and not self._is_script
        ]
        for local_rank in {*self.living, *lost} - set(keep):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid(local_rank), signal.SIGKILL)
            _kill_group(self.pid(local_rank))
        deadline = time.monotonic() + timeout_seconds
        spared = [self.pid(local_rank) for local_rank in keep]
        process_tree.kill(keep=_servers(), spared=spared, seconds=timeout_seconds)
        while (running := set(self.living) - set(keep)) and time.monotonic() < deadline:
            self.wait(0.05)
        self._reap()
        return sorted(running)

    def _own_children(self) -> set[int]:
        """The pids of the agent's own children, the servers and the scripts. Its other children are
        processes that a worker started and left.
        """
        scripts = self._processes.values() if self._is_script else ()
        return _servers() | {process.pid for process in scripts}

    def _reap(self) -> None:
        """Reap orphans that have exited."""
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
        """The exit code of a script, None while it runs. Kills its process group when it exits."""
        # before reaping it: until then the kernel does not reuse the number of the group
        if hasattr(os, "waitid"):
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                _kill_group(process.pid)
        code: int | None = process.poll()
        return code

    def _descriptor(self, process: Any) -> int:
        """A descriptor that becomes readable when the process exits; -1 if the system has none."""
        if not self._is_script:
            return int(process.sentinel)
        try:
            return os.pidfd_open(process.pid)
        except (AttributeError, OSError):
            return -1

    def close(self) -> None:
        """Close the descriptors, and remove torch's files of the workers."""
        self.release()
        for context in self._contexts.values():
            _remove_files(context)
        _remove_sockets()
        if self._is_script:
            for descriptor in self._descriptors:
                if descriptor >= 0:
                    os.close(descriptor)
        self._descriptors = {}


def _remove_files(context: PContext) -> None:
    """Remove torch's files of workers that have exited: the folder of their attempt."""
    for path in context.error_files.values():
        shutil.rmtree(Path(path).parent.parent, ignore_errors=True)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _remove_sockets() -> None:
    """Remove the sockets that workers used to pass tensors and files to their loader processes."""
    own = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    for left in Path(own).parent.glob("listener-*") if own else ():
        if left != Path(own):
            left.unlink(missing_ok=True)


def _servers() -> set[int]:
    """The pids of the agent's children that are no workers: the forkservers of functions and of
    scripts, multiprocessing's resource tracker, and the store of the rendezvous.
    """
    pids = (forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid)  # type: ignore[attr-defined]
    found = {pid for pid in (*pids, supervise_script_forkserver()) if pid is not None}
    return found | store_process.pids()
