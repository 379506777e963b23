"""Recovery in place, as the agent directs it: the workers that survive a failure leave their group
with the training in memory, and join the next group without ending.

A worker is kept if it is connected to the agent (see `kdist_trainer.control`) and confirms in time
that it is out of the group; otherwise it is killed and started again, as without recovery in place.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from kdist_trainer.agent.workers import WorkerProcesses
from kdist_trainer.config import TrainConfig
from kdist_trainer.control import VARIABLE, ConnectedRank, ControlServer

LEAVE_SECONDS = 30.0
"""How long a worker may take to leave its group: it must first finish what it computes."""
_SOCKET = "control.sock"


class Survivors:
    """The workers of this node that can leave a broken group, and those that have left one."""

    def __init__(self, config: TrainConfig, scratch: Path) -> None:
        self._control: ControlServer | None = None
        self.kept: dict[int, int] = {}
        """The last finished step of each kept worker, by local rank; -1 if it has no state yet."""
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
        """Have the running workers leave their group, and kill those that do not."""
        connected = self._connected(workers)
        for number, rank in connected.items():
            if rank.left is None:
                self._control_server.ask_to_leave(number)
        deadline = time.monotonic() + LEAVE_SECONDS
        while True:
            waiting = [
                number
                for number in workers.living
                if number in self._connected(workers)
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
        workers.kill(keep=list(self.kept))

    def join(self, environments: Mapping[int, dict[str, str]]) -> None:
        """Have the kept workers join the group of these environments, by local rank."""
        for number in self.kept:
            self._control_server.join(number, environments[number])
        self.kept = {}

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
            if rank.pid == workers.pid(number)
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
