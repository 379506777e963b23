"""Workers that are started before they have a group: those of a node that joins while others train,
those in the place of lost workers while the agents meet, and the standby.

Only where workers can continue in place, see `kdist_trainer.agent.survivors`: such a worker waits
for its group as one does that has left another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from kdist_trainer import log
from kdist_trainer.agent.settings import WORKER, Settings
from kdist_trainer.agent.standby import START_WITHOUT_GROUP, Standby
from kdist_trainer.agent.survivors import Survivors
from kdist_trainer.agent.workers import WorkerProcesses
from kdist_trainer.control import BUILDS, WAITING_VARIABLE, WAITS_ONLY
from kdist_trainer.liveness import RankSnapshot

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
        wants_standby = settings.config.standby == "warm"
        if wants_standby and not self._is_possible:
            log.warn(
                "standby-unavailable",
                message="spec.standby: warm has no effect here: a standby takes the place of a "
                "rank only where ranks recover in place, on CPUs under Linux",
            )
        self.standby = Standby(
            start, survivors, slot=procs, is_wanted=wants_standby and self._is_possible
        )
        self.local_ranks: set[int] = set()
        """The local ranks whose workers were started since the last group began."""

    def begin_group(self, environments: Mapping[int, dict[str, str]]) -> None:
        """A group starts; `environments` are those of its workers, by local rank."""
        self._environments = environments
        self.local_ranks = set()
        self.standby.begin_group()

    def tend(self, snapshots: list[RankSnapshot]) -> None:
        """Look after the standby, while a group runs whose ranks on this node have these
        heartbeats.
        """
        self.standby.tend(snapshots, self._environments[0])

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
        if (context := self.standby.take(missing[0])) is not None:
            number = missing.pop(0)
            workers.add(context, [number])
            self._wait_for_group(number)
            log.event("standby-used", pid=workers.pid(number))
        if not missing:
            return
        if self._environments:
            self._begin(workers, missing, self._environments, WAITS_ONLY)
        elif nodes := count_running():
            self._begin(workers, missing, self._predict_environments(nodes), BUILDS)
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
        self._wait_for_group(*local_ranks)

    def _wait_for_group(self, *local_ranks: int) -> None:
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
