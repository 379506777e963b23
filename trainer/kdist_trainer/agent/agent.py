"""The elastic agent: torch's LocalElasticAgent starts the workers, and kdist decides when to start
them and what their exit means.

Each round of `_invoke_run` joins the rendezvous, agrees with the other agents on a generation,
starts the workers and monitors them. Then it either starts another round or ends the run with an
exit record that all agents share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from kdist_trainer import log
from kdist_trainer.agent import exit_analysis
from kdist_trainer.agent.coordination import AgentStore
from kdist_trainer.agent.exit_analysis import GroupResult
from kdist_trainer.agent.exit_record import RunOutcome, failed, stopped
from kdist_trainer.agent.hang_detection import Watchdog
from kdist_trainer.agent.monitor import WorkerMonitor
from kdist_trainer.agent.rendezvous_poller import PollResult, RendezvousPoller
from kdist_trainer.agent.restart_policy import Generation, RestartLedger
from kdist_trainer.agent.settings import Settings
from kdist_trainer.agent.telemetry import AgentTelemetry
from kdist_trainer.agent.termination import TerminationPolicy
from kdist_trainer.agent.workers import WorkerProcesses
from kdist_trainer.config import Cause, Exit
from kdist_trainer.errors import Failure
from kdist_trainer.rendezvous import endpoint
from kdist_trainer.rendezvous.handler import Rendezvous
from kdist_trainer.signals import StopRequested, StopSignals

_AGENT, _GENERATION = "kdist/agent/", "kdist/generation"
_HEALTHY_SECONDS = 60.0
_DEATH_SECONDS = 30.0  # to free what a rank held, on the host and on its device


class ElasticAgent(LocalElasticAgent):
    """The elastic agent of one node. `run` returns when the run has ended here; `record` is then
    its exit record.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        settings: Settings,
        *,
        exchange: AgentStore,
        hasty: AgentStore,
        teller: AgentTelemetry,
        stop: StopSignals,
        start_method: str,
    ) -> None:
        """`hasty` is the store used while workers run: its calls fail soon if the store is
        unreachable.
        """
        super().__init__(
            spec,
            DefaultLogsSpecs(log_dir=str(settings.scratch / "torchelastic")),
            start_method=start_method,
        )
        assert isinstance(spec.rdzv_handler, Rendezvous)  # noqa: S101 - launch makes it so
        self.record: dict[str, Any] = {}
        self._rendezvous_handler = spec.rdzv_handler
        self._settings = settings
        self._hasty = hasty
        self._teller = teller
        self._stop = stop
        self._book = RestartLedger(
            exchange,
            checkpoints=settings.checkpoints,
            max_restarts=settings.config.max_restarts,
            is_script=settings.config.script is not None,
        )
        self._conclusion = TerminationPolicy(
            settings, exchange, self._rendezvous_handler, teller, self._book, stop
        )
        self._incarnation = f"{os.getpid()}-{time.time_ns()}"
        self._generation: Generation | None = None
        self._pulse: float | None = None

    @property
    def group_size(self) -> int:
        """The number of agents in the latest group."""
        return len(self._generation.nodes) if self._generation is not None else 1

    def is_healthy(self) -> bool:
        """Whether the agent's loop is alive; waiting for other nodes is."""
        return self._pulse is None or time.monotonic() - self._pulse < _HEALTHY_SECONDS

    def _invoke_run(self, role: str = "default") -> RunResult:  # noqa: ARG002 - torch's signature
        try:
            while True:
                generation = self._form()
                self._conclusion.draw(generation, self._look_after(generation))
        except RunOutcome as ended:
            self.record = ended.record
        except dist.DistError as error:
            self.record = self._lost(f"the store of the rendezvous is lost: {error}")
        state = WorkerState.SUCCEEDED if self.record["code"] == Exit.DONE else WorkerState.FAILED
        return RunResult(state=state)

    def _form(self) -> Generation:
        """Join the rendezvous and agree on the next generation."""
        self._pulse = None
        self._teller.rendezvous_started()
        timeout = self._settings.config.rendezvous_timeout_seconds
        deadline, rested = time.monotonic() + timeout, False
        while True:
            try:
                with self._stop.interruptible():
                    rested = rested or self._rest()
                    with self._rendezvous_handler.watching_departures():
                        self._rendezvous(self._worker_group)
                        generation = self._agree()
                break
            except (RendezvousClosedError, RendezvousGracefulExitError):
                # torch's word for it to a node above the maximum
                raise RunOutcome(self._conclusion.final_record()) from None
            except (StopRequested, RendezvousError, dist.DistError, RuntimeError) as error:
                if self._stop.requested:
                    self._conclusion.leave()
                    raise RunOutcome(
                        stopped("stopped while waiting for other nodes", step=None)
                    ) from None
                if isinstance(error, RendezvousTimeoutError) or time.monotonic() > deadline:
                    self._teller.rendezvous_ended("timeout")
                    self._give_up(
                        f"no group of {self._settings.bounds.now().min} nodes came "
                        f"together within {timeout} s"
                    )
                gone = isinstance(error, RendezvousConnectionError | dist.DistNetworkError)
                if gone and self._settings.place.scheme == endpoint.C10D:
                    raise RunOutcome(
                        self._lost(
                            f"the agent that keeps the store of the rendezvous is gone: {error}"
                        )
                    ) from None
                log.warn("rendezvous-retried", message=f"the group did not come about: {error}")
                time.sleep(self._rendezvous_handler.pace.poll)
        self._teller.rendezvous_ended("formed")
        if generation.spent:
            self._conclusion.end_spent(generation)
        return generation

    def _rest(self) -> bool:
        """Wait before the next group if the disk refuses writes or the same failure repeats, since
        restarts would otherwise be used up in seconds. Returns True.
        """
        if seconds := self._book.pause_seconds():
            log.warn(
                "storage-unavailable",
                message=f"the checkpoints' disk takes nothing: the next attempt is in {seconds} s",
            )
            time.sleep(seconds)
        elif seconds := self._book.repeat_seconds():
            log.warn(
                "backing-off", message=f"the same failure again: the next attempt is in {seconds} s"
            )
            time.sleep(seconds)
        return True

    def _give_up(self, message: str) -> None:
        self._conclusion.leave()
        raise RunOutcome(self._lost(message))

    def _lost(self, message: str) -> dict[str, Any]:
        return failed(
            Failure(
                Cause.RENDEZVOUS,
                Exit.PEERS_LOST,
                True,
                message,
                node=self._settings.node,
                time=time.time(),
            )
        )

    def _agree(self) -> Generation:
        """The decision of the leader on this generation; on the leader, make it now."""
        group: Any = self._worker_group  # torch declares None what it sets later
        store, rank = group.store, group.group_rank
        store.set(f"{_AGENT}{rank}", json.dumps([self._settings.node, self._incarnation]))
        if rank == 0:
            agents = dict(
                json.loads(store.get(f"{_AGENT}{other}")) for other in range(group.group_world_size)
            )
            nodes = self._settings.bounds.now()
            generation = self._book.open_generation(
                agents, world_size=group.workers[0].world_size, bounds=(nodes.min, nodes.max)
            )
            store.set(_GENERATION, generation.to_json())
        return Generation.from_json(store.get(_GENERATION))

    def _look_after(self, generation: Generation) -> GroupResult:
        """Start this node's workers and monitor them; returns the result of the worker group."""
        settings, config, group = self._settings, self._settings.config, self._worker_group
        self._generation = generation
        self._remaining_restarts = max(0, config.max_restarts - generation.restarts)
        size = len(group.workers)
        exit_analysis.clear(settings.scratch, size)
        watchdog = Watchdog(
            settings.scratch,
            ranks=size,
            hang_seconds=config.hang_timeout_seconds,
            from_start=config.train is not None,
        )
        ranks = [worker.global_rank for worker in group.workers]
        self._teller.group_formed(
            generation,
            world_size=group.workers[0].world_size,
            ranks=ranks,
            leader=group.group_rank == 0,
        )
        processes = self._start_ranks(ranks)
        handler = self._rendezvous_handler
        try:
            number = generation.number
            with RendezvousPoller(
                lambda: PollResult(handler.news(), self._hasty.generation(number)),
                seconds=handler.pace.watch,
            ) as hear:
                return WorkerMonitor(
                    config=config,
                    scratch=settings.scratch,
                    node=settings.node,
                    generation=generation,
                    global_ranks=ranks,
                    ranks=processes,
                    watchdog=watchdog,
                    exchange=self._hasty,
                    hear=hear,
                    teller=self._teller,
                    stop=self._stop,
                    alive=self._beat,
                ).attend()
        finally:
            self._pulse = None
            immortal = [
                ranks[local_rank] for local_rank in processes.kill(patience_seconds=_DEATH_SECONDS)
            ]
            processes.close()
            watchdog.close()
            if immortal:
                raise RunOutcome(self._cannot_end(immortal))

    def _cannot_end(self, ranks: list[int]) -> dict[str, Any]:
        """The exit record for workers that survive SIGKILL: they still hold resources that the next
        generation on this node needs.
        """
        which = ", ".join(map(str, ranks))
        message = (
            f"rank {which} on node {self._settings.node} was killed and does not end: the "
            "kernel waits in it, for a disk, "
        )
        message += (
            "a network's file system or a device that does not answer; see `dmesg` there, or "
            "replace the node"
        )
        return failed(
            Failure(
                Cause.HANG,
                Exit.HANG,
                True,
                message,
                rank=ranks[0],
                node=self._settings.node,
                time=time.time(),
            )
        )

    def _start_ranks(self, ranks: list[int]) -> WorkerProcesses:
        self._beat()
        pids = self._start_workers(self._worker_group)
        for worker in self._worker_group.workers:
            worker.id = pids[worker.local_rank]
            self._teller.rank_started(ranks[worker.local_rank], worker.id)
        self._worker_group.state = WorkerState.HEALTHY
        assert self._pcontext is not None  # noqa: S101 - _start_workers made it
        return WorkerProcesses(self._pcontext)

    def _beat(self) -> None:
        self._pulse = time.monotonic()

    def _set_local_rank_env(
        self, worker_env: dict[str, str | None], local_rank: int, spec: WorkerSpec
    ) -> None:
        super()._set_local_rank_env(worker_env, local_rank, spec)
        if self._generation is not None:
            worker_env["KDIST_GENERATION"] = str(self._generation.number)
            worker_env["KDIST_NODES"] = "{}:{}".format(*self._generation.bounds)

    # torch would resolve this host's name for each of its own events, which nobody reads and which
    # may take seconds.

    @contextmanager
    def record_duration(self, state: str) -> Iterator[None]:  # noqa: ARG002
        yield

    def _record_worker_events(self, result: RunResult) -> None:
        pass

    def _record_metrics(self, group_results: RunResult) -> None:
        pass
