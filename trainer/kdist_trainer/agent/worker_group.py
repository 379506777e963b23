"""The worker processes of this node, from their first lines to their end: functions run in children
of the forkserver, scripts in subprocesses.

Every process that a worker has started is killed with it (`WorkerProcesses`): each worker leads a
process group, and on Linux the agent adopts processes that have left the group and lost their
parent. A child that kept running would keep the rank's sockets open, and its peers would wait for a
dead rank.

`run_worker` is the entry point of a worker that is a function. It writes the outcome to a file and
exits by `os._exit`. torch's result queue is not used: a worker killed while torch waits in it for
the others would block the agent forever. And destructors of gloo may abort a worker that has
succeeded.

In recovery in place the workers that survive a failure leave their group with the training in
memory, and join the next group without ending (`Survivors`). A worker is kept if it is connected to
the agent (see `kdist_trainer.ipc.control`) and confirms in time that it is out of the group;
otherwise it is killed and started again, as without recovery in place.

Workers can also be started before they have a group (`PrestartedWorkers`): those of a node that
joins while others train, and those in the place of lost workers while the agents meet. Such a
worker has no rank, no heartbeat and no metrics, prints to the agent's own output, and waits for its
group as one does that has left another one.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.multiprocessing.api import PContext, SubprocessContext

from kdist_trainer import log
from kdist_trainer.agent import coordination, tracker_process
from kdist_trainer.agent.coordination import Generation, KeptRank
from kdist_trainer.agent.exits import FORKSERVER_LOST
from kdist_trainer.agent.forkserver import running_script_forkserver
from kdist_trainer.agent.settings import WORKER, Settings
from kdist_trainer.config import Exit, TrainConfig
from kdist_trainer.instrumentation import fault_handler
from kdist_trainer.ipc import failure, output, result
from kdist_trainer.ipc.control import (
    IDLE,
    PREBUILD,
    VARIABLE,
    WAITING_VARIABLE,
    ConnectedRank,
    ControlServer,
)
from kdist_trainer.processes import liveness, process_tree
from kdist_trainer.processes.liveness import RankSnapshot, own_place
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
        """Add started workers, by torch's handle of them, in the order of `local_ranks`; workers
        with the same ones have exited.
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
            # the agent's other children are processes that a worker has started and left
            scripts = self._processes.values() if self._is_script else ()
            spared = _servers() | tracker_process.pids()
            process_tree.kill(spared=spared | {process.pid for process in scripts})
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
        spared = {*tracker_process.pids(), *(self.pid(local_rank) for local_rank in keep)}
        process_tree.kill(keep=_servers(), spared=spared, seconds=timeout_seconds)
        while (running := set(self.living) - set(keep)) and time.monotonic() < deadline:
            self.wait(0.05)
        self._reap()
        return sorted(running)

    def _reap(self) -> None:
        """Reap orphans that have exited."""
        if not hasattr(os, "waitid"):
            return
        known = (
            _servers()
            | tracker_process.pids()
            | {process.pid for process in self._processes.values()}
        )
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
        # the sockets that workers used to pass tensors and files to their loader processes
        own = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
        for left in Path(own).parent.glob("listener-*") if own else ():
            if left != Path(own):
                left.unlink(missing_ok=True)
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


def _servers() -> set[int]:
    """The pids of the agent's children that are no workers: the forkservers of functions and of
    scripts, multiprocessing's resource tracker, and the store of the rendezvous.
    """
    pids = (forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid)  # type: ignore[attr-defined]
    scripts = running_script_forkserver()
    found = {*pids, scripts.supervise() if scripts is not None else None}
    return {pid for pid in found if pid is not None} | store_process.pids()


LEAVE_SECONDS = 30.0
"""How long a worker may take to leave its group: it must first finish what it computes."""
_SOCKET = "control.sock"


class Survivors:
    """The workers of this node that can leave a broken group, and those that have left one."""

    def __init__(self, config: TrainConfig, scratch: Path) -> None:
        """Listen for the workers, at a socket in `scratch`, if they can be kept."""
        self._control: ControlServer | None = None
        self.may_continue = True
        """Whether the workers of the present group may keep their training for the next one."""
        self.kept: dict[int, int] = {}
        """The last finished step of each kept worker, by local rank; -1 if it has no state yet."""
        self._others_have_ended = False
        """Whether `keep` has ended all workers that are not kept."""
        if can_keep_workers(config):
            self._control = ControlServer(scratch / _SOCKET)

    @property
    def environment(self) -> dict[str, str]:
        """What workers need to connect."""
        return {} if self._control is None else {VARIABLE: str(self._control.path)}

    @property
    def descriptors(self) -> list[int]:
        """What becomes readable when a worker sends a message."""
        return [] if self._control is None else self._control.descriptors

    def poll(self) -> None:
        """Read the workers' messages."""
        if self._control is not None:
            self._control.poll()

    def left(self, workers: WorkerProcesses) -> list[int]:
        """The local ranks of running workers that have left the group, since a peer was lost."""
        if self._control is None:
            return []
        living = workers.living
        return [
            number
            for number, rank in self._connected(workers).items()
            if rank.left is not None and number in living
        ]

    def need_renewal(
        self, workers: WorkerProcesses, snapshots: list[RankSnapshot], generation: Generation
    ) -> bool:
        """Whether one of the workers is to be replaced by a new process, and all of them, which
        have these heartbeats, can leave their group for that.
        """
        crowds = [rank.crowd for rank in self._connected(workers).values()]
        nodes, from_step = len(generation.nodes), generation.from_step
        is_due = coordination.is_renewal_due(crowds, snapshots, nodes=nodes, from_step=from_step)
        return is_due and self.all_can_leave(workers)

    def describe_kept(self, workers: WorkerProcesses) -> list[KeptRank]:
        """The kept workers, for the agent that decides which one is replaced."""
        connected = self._connected(workers)
        return [
            KeptRank(number, step, connected[number].crowd if number in connected else 0)
            for number, step in self.kept.items()
        ]

    def why(self, workers: WorkerProcesses) -> str | None:
        """The error that ended the group for a worker that has left it."""
        return next(
            (rank.why for rank in self._connected(workers).values() if rank.left is not None), None
        )

    def all_can_leave(self, workers: WorkerProcesses) -> bool:
        """Whether each running worker is connected and in a group."""
        connected = self._connected(workers)
        return bool(workers.living) and all(
            number in connected and connected[number].left is None for number in workers.living
        )

    def keep(self, workers: WorkerProcesses) -> None:
        """Have the running workers leave their group, and kill those that do not, or all of them if
        none may continue. Workers that have not joined it yet wait for the next one.
        """
        cancelled = []
        if self._control is not None:
            joining, self._control.joining = self._control.joining, {}
            cancelled = [
                number for number, (pid, _) in joining.items() if pid == workers.pid(number)
            ]
        if not self.may_continue:
            self.kept = {number: -1 for number in cancelled if number in workers.living}
            self._others_have_ended = not workers.kill(keep=list(self.kept))
            return
        connected = self._connected(workers)
        for number, rank in connected.items():
            if rank.left is None and number not in cancelled:
                self._control_server.ask_to_leave(number)
        deadline = time.monotonic() + LEAVE_SECONDS
        while (remaining := deadline - time.monotonic()) > 0:
            connected, living = self._connected(workers), workers.living
            waiting = [
                connected[number].left is None
                for number in living
                if number in connected and number not in cancelled
            ]
            if not any(waiting):
                break
            self._control_server.wait(min(remaining, 0.05))
        connected, living = self._connected(workers), workers.living
        self.kept = {
            number: rank.left
            for number, rank in connected.items()
            if rank.left is not None and number in living
        }
        self.kept |= {number: -1 for number in cancelled if number in living}
        self._others_have_ended = not workers.kill(keep=list(self.kept))

    def end_others(self, workers: WorkerProcesses, *, timeout_seconds: float) -> list[int]:
        """Kill the workers that are not kept, unless `keep` has done so: to look at all processes
        of the node again would take milliseconds of a recovery. Returns those that survive it.
        """
        if self._others_have_ended:
            return []
        return workers.kill(timeout_seconds=timeout_seconds, keep=self.kept)

    def wait_for_group(self, local_ranks: Iterable[int]) -> None:
        """Have workers that were started without a group join the next one."""
        self.kept |= dict.fromkeys(local_ranks, -1)

    def are_ready(self, workers: WorkerProcesses) -> bool:
        """Whether all workers that wait for a group could join one now, or have ended."""
        self.poll()
        return all(
            self._control_server.has_left(number, workers.pid(number))
            or number not in workers.living
            for number in self.kept
        )

    def forget_exited(self, workers: WorkerProcesses) -> None:
        """Keep no worker that has ended since it left its group."""
        living = workers.living
        self.kept = {number: step for number, step in self.kept.items() if number in living}

    def join(self, workers: WorkerProcesses, environments: Mapping[int, dict[str, str]]) -> None:
        """Have the kept workers join the group of these environments, by local rank."""
        for number in self.kept:
            self._control_server.join_when_ready(number, workers.pid(number), environments[number])
        self.kept, self._others_have_ended = {}, False

    def join_alone(
        self, workers: WorkerProcesses, local_rank: int, environment: dict[str, str]
    ) -> None:
        """Have one of the kept workers join the group of `environment`; the others wait on."""
        del self.kept[local_rank]
        self._control_server.join_when_ready(local_rank, workers.pid(local_rank), environment)

    @property
    def finished_step(self) -> int | None:
        """The newest step whose state a kept worker has; None if none has any."""
        return max((step for step in self.kept.values() if step >= 0), default=None)

    def close(self) -> None:
        """Close the connections."""
        if self._control is not None:
            self._control.close()

    def _connected(self, workers: WorkerProcesses) -> dict[int, ConnectedRank]:
        if self._control is None:
            return {}
        return {
            number: rank
            for number, rank in self._control.ranks.items()
            if number in workers.local_ranks and rank.pid == workers.pid(number)
        }

    @property
    def _control_server(self) -> ControlServer:
        assert self._control is not None  # noqa: S101 - there are connected workers
        return self._control


def can_keep_workers(config: TrainConfig) -> bool:
    """Whether the workers of this job may be able to continue in place. Whether they can is decided
    by the workers, which know the device: those that cannot do not connect.
    """
    train = config.train
    return (
        train is not None
        and train.recovery != "restart"
        and train.strategy == "ddp"
        and sys.platform == "linux"
    )


START_WITHOUT_GROUP = Callable[[Mapping[int, dict[str, str]]], PContext]
"""Starts workers with these environments; returns torch's handle of them, in the order of keys."""
READY_SECONDS = 300.0
"""How long a node that is to join a running group waits until its workers are ready."""
_POLL_SECONDS = 0.05


class PrestartedWorkers:
    """The workers of this node that have no group yet. `start` starts them so, and `survivors` has
    them join their group.
    """

    def __init__(
        self, settings: Settings, start: START_WITHOUT_GROUP, survivors: Survivors, *, procs: int
    ) -> None:
        self._start = start
        self._survivors = survivors
        self._procs = procs
        self._environments: Mapping[int, dict[str, str]] = {}
        # another entrypoint does not know that it may have no group yet
        self._is_possible = (
            bool(survivors.environment)
            and not 0 < procs <= torch.cuda.device_count()
            and settings.entrypoint == WORKER
        )
        self.local_ranks: set[int] = set()
        """The local ranks whose workers were started since the last group began."""

    def begin_group(self, environments: Mapping[int, dict[str, str]]) -> None:
        """A group starts; `environments` are those of its workers, by local rank."""
        self._environments = environments
        self.local_ranks = set()

    def prepare(self, workers: WorkerProcesses, count_running: Callable[[], int]) -> None:
        """Start the workers that the next group needs and that are not kept, and add them to
        `workers`. `count_running` returns the number of nodes of a group that runs without this
        one; 0 if there is none.

        Those of a node that joins a running group build what they can, and are waited for: the
        others train meanwhile. In place of lost workers there are new ones, which do not load the
        user's code before they are in the group, since the others wait for them: they would
        otherwise wait where they cannot be asked to save.
        """
        survivors = self._survivors
        survivors.forget_exited(workers)
        missing = [number for number in range(self._procs) if number not in survivors.kept]
        if not self._is_possible or not missing:
            return
        if self._environments:
            self._begin(workers, missing, self._environments, IDLE)
        elif nodes := count_running():
            self._begin(workers, missing, self._predict_environments(nodes), PREBUILD)
            self._wait_until_ready(workers, count_running)

    def _begin(
        self,
        workers: WorkerProcesses,
        local_ranks: list[int],
        environments: Mapping[int, dict[str, str]],
        purpose: str,
    ) -> None:
        """Start the workers of these local ranks, of the environments of all."""
        waiting = {
            number: {**environments[number], WAITING_VARIABLE: purpose} for number in local_ranks
        }
        workers.add(self._start(waiting), local_ranks)
        self._survivors.wait_for_group(local_ranks)
        self.local_ranks |= set(local_ranks)

    def _predict_environments(self, nodes: int) -> dict[int, dict[str, str]]:
        """What the environments of this node's workers may be in a group with `nodes` other nodes,
        for code of the user that reads them while it is imported.
        """
        return {
            number: {
                "RANK": str(nodes * self._procs + number),
                "WORLD_SIZE": str((nodes + 1) * self._procs),
                "LOCAL_RANK": str(number),
                "LOCAL_WORLD_SIZE": str(self._procs),
                "GROUP_RANK": str(nodes),
                "GROUP_WORLD_SIZE": str(nodes + 1),
                **self._survivors.environment,
            }
            for number in range(self._procs)
        }

    def _wait_until_ready(self, workers: WorkerProcesses, count_running: Callable[[], int]) -> None:
        """Wait until the started workers are ready, as long as the others train."""
        began = time.monotonic()
        while not self._survivors.are_ready(workers):
            if not count_running() or time.monotonic() - began > READY_SECONDS:
                return
            workers.wait(_POLL_SECONDS, also=self._survivors.descriptors)
        seconds = round(time.monotonic() - began, 3)
        for number in sorted(self.local_ranks):
            if number in workers.living:
                log.event("worker-prepared", pid=workers.pid(number), seconds=seconds)


def init_worker() -> None:
    """Make this process a group leader that dies with the agent, prints to the agent's log, and
    dumps its stacks on request.

    A worker that has no group yet prints as one of no rank, and does the last when it joins one:
    its local rank may be that of another worker, or of none.
    """
    os.setpgid(0, 0)  # the agent kills the whole group at once
    place = own_place()
    assert place is not None  # noqa: S101 - the agent has named it
    if WAITING_VARIABLE in os.environ:
        output.redirect(place[0], output.EARLY)
    else:
        output.redirect(*place)
        fault_handler.install(*place)
    liveness.watch(Path(os.environ["KDIST_PARENT_PIPE"]))


def run_worker(target: str) -> NoReturn:
    """Run the function `target`, given as `module:function`, write its return value for the agent,
    and exit.

    After a failure the exit code is that of the failure, in case it cannot be written.
    """
    code = int(Exit.USER)
    try:
        init_worker()
        if folder := os.environ.get("KDIST_CODE"):
            sys.path.insert(0, folder)
        module, _, function = target.partition(":")
        outcome = getattr(importlib.import_module(module), function)()
        place = own_place()  # in the group, in which it may be another one
        assert place is not None  # noqa: S101 - the agent has named it
        result.write_result(outcome, *place)
        code = 0
    except BaseException as error:  # noqa: BLE001 - every error must be recorded for the agent
        # a worker without a group has no rank whose failure this is
        has_group = WAITING_VARIABLE not in os.environ
        recorded = failure.record(error) if has_group else failure.describe(error)
        code = int(recorded.code)
        # the traceback of a secondary failure in the log would hide the root cause
        if recorded.primary:
            with contextlib.suppress(OSError):
                traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            # a log on a full disk, or a stream that was closed
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
