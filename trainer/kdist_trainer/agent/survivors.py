"""Recovery in place, as the agent directs it: the workers that survive a failure leave their group
with the training in memory, and join the next group without ending.

A worker is kept if it is connected to the agent (see `kdist_trainer.ipc.control`) and confirms in
time that it is out of the group; otherwise it is killed and started again, as without recovery in
place.

Workers can also be started before they have a group: those of a node that joins while others train,
and those in the place of lost workers while the agents meet. Such a worker has no rank, no
heartbeat and no metrics, prints to the agent's own output, and waits for its group as one does that
has left another one.

If the node joins no further group, because it was asked to stop or too few nodes have come, one of
the workers forms a group alone, in a generation of its own, saves and ends. The agents agree on
that generation by compare-and-set. If the others have begun it, they continue with the state, and
there is nothing to save here; if they form a group later, they take the lock of the checkpoint
folder over, as after any other generation.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import PContext

from kdist_trainer import log
from kdist_trainer.agent import coordination, exit_analysis
from kdist_trainer.agent.coordination import RESUME, STOP, AgentStore, Generation, KeptRank
from kdist_trainer.agent.restart_policy import RestartLedger
from kdist_trainer.agent.settings import WORKER, Settings
from kdist_trainer.agent.workers import WorkerProcesses
from kdist_trainer.config import TrainConfig
from kdist_trainer.ipc import failure, result
from kdist_trainer.ipc.control import (
    IDLE,
    PREBUILD,
    STOPS_VARIABLE,
    VARIABLE,
    WAITING_VARIABLE,
    ConnectedRank,
    ControlServer,
)
from kdist_trainer.processes.liveness import RankSnapshot
from kdist_trainer.processes.signals import StopSignals, stop_margin

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


class EarlyWorkers:
    """The workers of this node that have no group yet.

    Args:
        settings: The settings of the agent.
        start: Starts workers without a group.
        survivors: Has them join their group.
        procs: The number of workers on this node.
    """

    def __init__(
        self, settings: Settings, start: START_WITHOUT_GROUP, survivors: Survivors, *, procs: int
    ) -> None:
        self._start = start
        self._survivors = survivors
        self._procs = procs
        self._environments: Mapping[int, dict[str, str]] = {}
        # another entrypoint does not know that it may have no group yet
        self._is_possible = survivors.can_wait_for_group and settings.entrypoint == WORKER
        self.local_ranks: set[int] = set()
        """The local ranks whose workers were started since the last group began."""

    def begin_group(self, environments: Mapping[int, dict[str, str]]) -> None:
        """A group starts; `environments` are those of its workers, by local rank."""
        self._environments = environments
        self.local_ranks = set()

    def prepare(self, workers: WorkerProcesses, count_running: Callable[[], int]) -> None:
        """Start the workers that the next group needs and that are not kept.

        Those of a node that joins a running group build what they can, and are waited for: the
        others train meanwhile. In place of lost workers there are new ones, which do not load the
        user's code before they are in the group, since the others wait for them: they would
        otherwise wait where they cannot be asked to save.

        Args:
            workers: The workers of this node; the started ones are added.
            count_running: The number of nodes of a group that runs without this one; 0 if there
                is none.
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


def save_kept_state(
    former: int,
    *,
    settings: Settings,
    agent_store: AgentStore,
    ledger: RestartLedger,
    agents: dict[str, str],
    workers: WorkerProcesses,
    survivors: Survivors,
    stop: StopSignals,
) -> str | None:
    """Have the worker that has kept the newest step save it, and wait until it has ended.

    Args:
        former: The generation that the workers have left.
        settings: The settings of the agent.
        agent_store: The documents that agents share.
        ledger: Receives the generation of the save.
        agents: The instance id of this agent, by its node.
        workers: The workers of this node.
        survivors: Those that have left their group.
        stop: The requests to stop: the grace period counts from the first, and a second one ends
            the wait.

    Returns:
        "stopped", or "done" if the step was the last one; None if nothing was saved.
    """
    survivors.forget_exited(workers)
    step = survivors.finished_step
    if step is None or settings.checkpoints is None:
        return None
    try:
        number = open_generation(former, agent_store, ledger, agents=agents, step=step)
        exit_analysis.reset_files(settings.scratch, len(workers.local_ranks))
    except (dist.DistError, RuntimeError, OSError) as refusal:
        warn_unsaved(step, str(refusal), ledger)
        return None
    local_rank = next(number for number, kept in survivors.kept.items() if kept == step)
    log.event("saving-kept-state", step=step, generation=number)
    survivors.join_alone(workers, local_rank, describe_group(number))
    grace = settings.config.termination_grace_period_seconds
    since = time.monotonic() if stop.requested_at is None else stop.requested_at
    deadline = since + grace - stop_margin(grace)
    while local_rank in workers.living:
        if time.monotonic() > deadline or stop.urgent:
            why = "a second request to stop came" if stop.urgent else "the grace period was over"
            warn_unsaved(step, why, ledger)
            return None
        workers.wait(_POLL_SECONDS)
    outcome = result.read_result(settings.scratch, local_rank)
    if outcome is None:
        error = failure.read(settings.scratch, local_rank)
        why = "its worker was killed" if error is None else error.message
        warn_unsaved(step, why, ledger)
    return outcome


def warn_unsaved(step: int, why: str, ledger: RestartLedger) -> None:
    """Log how many steps, which only memory held, are not saved here."""
    committed = ledger.committed_step()
    steps = max(0, step - committed)
    log.warn(
        "kept-state-not-saved",
        step=step,
        steps=steps,
        message=f"not saved {steps} step{'s' * (steps != 1)}, up to step {step}: {why}; a later "
        f"start goes on from step {committed}",
    )


def open_generation(
    former: int,
    agent_store: AgentStore,
    ledger: RestartLedger,
    *,
    agents: dict[str, str],
    step: int,
) -> int:
    """Open the generation of the save of `step`, after generation `former`; returns its number.

    Raises:
        RuntimeError: If other agents have begun the generation after `former`.
    """
    number = former + 1
    newest = max(step, agent_store.generation(former).get("kept_step", 0))
    agent_store.open_generation(number, agents)
    agent_store.plan_stop(number, STOP)
    agent_store.post_kept_step(number, newest)
    ledger.append_generation(
        Generation(number, RESUME, sorted(agents), from_step=step, kept_step=step), world_size=1
    )
    return number


def describe_group(generation: int) -> dict[str, str]:
    """The environment of a rank that is alone in its group, and is to stop."""
    ranks = ("RANK", "GROUP_RANK", "ROLE_RANK")
    sizes = ("WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
    return {
        **dict.fromkeys(ranks, "0"),
        **dict.fromkeys(sizes, "1"),
        "KDIST_GENERATION": str(generation),
        STOPS_VARIABLE: "1",
    }
