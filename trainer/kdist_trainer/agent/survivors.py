"""Recovery in place, as the agent directs it: the workers that survive a failure leave their group
with the training in memory, and join the next group without ending.

A worker is kept if it is connected to the agent (see `kdist_trainer.control`) and confirms in time
that it is out of the group; otherwise it is killed and started again, as without recovery in place.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from kdist_trainer.agent import renewal
from kdist_trainer.agent.generation import Generation
from kdist_trainer.agent.renewal import KeptRank
from kdist_trainer.agent.workers import WorkerProcesses
from kdist_trainer.config import TrainConfig
from kdist_trainer.control import VARIABLE, ConnectedRank, ControlServer
from kdist_trainer.liveness import RankSnapshot

LEAVE_SECONDS = 30.0
"""How long a worker may take to leave its group: it must first finish what it computes."""
_SOCKET = "control.sock"


class Survivors:
    """The workers of this node that can leave a broken group, and those that have left one."""

    def __init__(self, config: TrainConfig, scratch: Path, *, procs: int) -> None:
        """Listen for the workers if they can be kept.

        Args:
            config: train.json.
            scratch: The agent's folder, where the socket is.
            procs: The number of workers on this node.
        """
        self._procs = procs
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
    def can_wait_for_group(self) -> bool:
        """Whether workers of this node can be started before they have a group."""
        return self._control is not None and not 0 < self._procs <= torch.cuda.device_count()

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
        is_due = renewal.is_due(crowds, snapshots, nodes=nodes, from_step=from_step)
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
        outside = self._take_back(workers)
        if not self.may_continue:
            self.kept = {number: -1 for number in outside if number in workers.living}
            self._others_have_ended = not workers.kill(keep=list(self.kept))
            return
        connected = self._connected(workers)
        for number, rank in connected.items():
            if rank.left is None and number not in outside:
                self._control_server.ask_to_leave(number)
        deadline = time.monotonic() + LEAVE_SECONDS
        while True:
            waiting = [
                number
                for number in workers.living
                if number in self._connected(workers)
                and number not in outside
                and self._connected(workers)[number].left is None
            ]
            remaining = deadline - time.monotonic()
            if not waiting or remaining <= 0:
                break
            self._control_server.wait(min(remaining, 0.05))
        living = workers.living
        self.kept = {
            number: rank.left
            for number, rank in self._connected(workers).items()
            if rank.left is not None and number in living
        }
        self.kept |= {number: -1 for number in outside if number in living}
        self._others_have_ended = not workers.kill(keep=list(self.kept))

    def end_others(self, workers: WorkerProcesses, *, timeout_seconds: float) -> list[int]:
        """Kill the workers that are not kept, unless `keep` has done so: to look at all processes
        of the node again would take milliseconds of a recovery. Returns those that survive it.
        """
        if self._others_have_ended:
            return []
        return workers.kill(timeout_seconds=timeout_seconds, keep=self.kept)

    def _take_back(self, workers: WorkerProcesses) -> list[int]:
        """The local ranks of workers that were to join the group and were not ready for it; they
        do not join it any more.
        """
        if self._control is None:
            return []
        joining, self._control.joining = self._control.joining, {}
        return [number for number, (pid, _) in joining.items() if pid == workers.pid(number)]

    def wait_for_group(self, local_ranks: Iterable[int]) -> None:
        """Have workers that were started without a group join the next one."""
        self.kept |= dict.fromkeys(local_ranks, -1)

    def are_ready(self, workers: WorkerProcesses) -> bool:
        """Whether all workers that wait for a group could join one now, or have ended."""
        self.poll()
        return all(
            self.has_left(number, workers.pid(number)) or number not in workers.living
            for number in self.kept
        )

    def has_left(self, local_rank: int, pid: int) -> bool:
        """Whether a worker is out of its group, or is ready for its first one."""
        return self._control is not None and self._control.has_left(local_rank, pid)

    def move(self, source: int, target: int) -> None:
        """Have the worker that is connected as local rank `source` take the place of `target`."""
        self._control_server.move(source, target)

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
