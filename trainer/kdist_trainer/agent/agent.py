"""The elastic agent: torch's LocalElasticAgent starts the workers, and kdist decides when to start
them and what their exit means.

Each pass of `run_rounds` joins the rendezvous, agrees with the other agents on a generation, starts
the workers and monitors them. Then it either continues with the next pass or ends the run with an
exit record that all agents share.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from kdist_trainer import log
from kdist_trainer.agent import exit_analysis, renewal
from kdist_trainer.agent.backoff import back_off
from kdist_trainer.agent.code_identity import identify_code
from kdist_trainer.agent.coordination import AgentStore, Generation
from kdist_trainer.agent.exit_analysis import GroupResult
from kdist_trainer.agent.exit_record import RunOutcome, failed, stopped
from kdist_trainer.agent.hangs import Watchdog
from kdist_trainer.agent.monitor import PollResult, RendezvousPoller, WorkerMonitor
from kdist_trainer.agent.rank_activity import RankActivity
from kdist_trainer.agent.renewal import NOBODY
from kdist_trainer.agent.restart_policy import RestartLedger
from kdist_trainer.agent.settings import Settings
from kdist_trainer.agent.single_start import SingleStart
from kdist_trainer.agent.survivors import EarlyWorkers, Survivors, save_kept_state
from kdist_trainer.agent.telemetry import AgentTelemetry
from kdist_trainer.agent.termination import TerminationPolicy
from kdist_trainer.agent.workers import WorkerProcesses
from kdist_trainer.config import Cause, Exit
from kdist_trainer.failure import Failure
from kdist_trainer.json_text import encode_json
from kdist_trainer.rendezvous import endpoint
from kdist_trainer.rendezvous.handler import Rendezvous
from kdist_trainer.rendezvous.state import SpareNodeError
from kdist_trainer.rendezvous.torch_internals import ElasticAgentBase
from kdist_trainer.signals import StopRequested, StopSignals
from kdist_trainer.untrusted_text import parse_json

_AGENT_KEY = "kdist/agent/"
_GENERATION_KEY = "kdist/generation"
_HEALTHY_SECONDS = 60.0
_KILL_SECONDS = 30.0  # for the kernel to free a killed worker's memory, on the host and its device


class ElasticAgent(ElasticAgentBase):
    """The elastic agent of one node. `run` returns when the run has ended on this node; `record` is
    then its exit record.

    Args:
        spec: The workers of this node.
        settings: The settings of the agent.
        agent_store: The documents that agents share.
        fail_fast_store: The same for use while workers run: its calls fail soon if the store is
            unreachable.
        telemetry: Receives the agent's events and state.
        stop: The requests to stop.
        start_method: The multiprocessing start method of workers that are functions.
    """

    _generation: Generation | None = None
    _alive_at: float | None = None

    def __init__(
        self,
        spec: WorkerSpec,
        settings: Settings,
        *,
        agent_store: AgentStore,
        fail_fast_store: AgentStore,
        telemetry: AgentTelemetry,
        stop: StopSignals,
        start_method: str,
    ) -> None:
        super().__init__(
            spec,
            DefaultLogsSpecs(log_dir=str(settings.scratch / "torchelastic")),
            start_method=start_method,
        )
        assert isinstance(spec.rdzv_handler, Rendezvous)  # noqa: S101 - launch makes it so
        self.record: dict[str, Any] = {}
        self._rendezvous_handler = spec.rdzv_handler
        self._settings = settings
        self._agent_store = agent_store
        self._fail_fast_store = fail_fast_store
        self._telemetry = telemetry
        self._stop = stop
        telemetry.show_job(settings.config, procs=spec.local_world_size)
        self._single_start = SingleStart(settings.config, fail_fast_store)
        self._ledger = RestartLedger(
            agent_store,
            checkpoints=settings.checkpoints,
            max_restarts=settings.config.restart_limit,
            single_start=self._single_start,
            devices=telemetry.devices,
            code=identify_code(settings.config, settings.code),
        )
        self._termination = TerminationPolicy(
            settings,
            agent_store,
            self._rendezvous_handler,
            telemetry,
            self._ledger,
            stop,
            self._save_kept_state,
        )
        self._instance_id = f"{os.getpid()}-{time.time_ns()}"
        procs = spec.local_world_size
        self._survivors = Survivors(settings.config, settings.scratch, procs=procs)
        self._early = EarlyWorkers(settings, self.start_without_group, self._survivors, procs=procs)
        self._workers = WorkerProcesses(self._early.standby.pids)
        telemetry.show_rendezvous(spec.rdzv_handler, fail_fast_store)

    @property
    def group_size(self) -> int:
        """The number of agents in the latest generation."""
        return len(self._generation.nodes) if self._generation is not None else 1

    def is_healthy(self) -> bool:
        """Whether the agent's loop is alive; waiting for other nodes counts as alive."""
        return self._alive_at is None or time.monotonic() - self._alive_at < _HEALTHY_SECONDS

    def run_rounds(self) -> RunResult:
        """See base class."""
        try:
            while True:
                generation = self._next_generation()
                self._termination.decide(generation, self._run_workers(generation))
        except RunOutcome as outcome:
            self.record = outcome.record
        except dist.DistError as error:
            self.record = self._rendezvous_failure(f"the rendezvous store is lost: {error}")
        finally:
            self._survivors.kept = {}
            self._early.standby.close()
            self._end_workers()
            self._survivors.close()
            self._ledger.close()
        self._rendezvous_handler.end_membership()
        state = WorkerState.SUCCEEDED if self.record["code"] == Exit.DONE else WorkerState.FAILED
        return RunResult(state=state)

    def rank_environment(self) -> dict[str, str]:
        """See base class."""
        if self._generation is None:
            return {}
        return {**self._generation.environment, **self._survivors.environment}

    def _next_generation(self) -> Generation:
        """Join the rendezvous and agree on the next generation. Raises `RunOutcome`."""
        self._alive_at = None
        self._settings.require_gpus()
        with suppress(StopRequested), self._stop.interruptible():
            self._early.prepare(self._workers, self._count_running)
        self._telemetry.rendezvous_started()
        if self._settings.config.nodes.standby:
            self._rendezvous_handler.notify_if_spare()
        deadline = time.monotonic() + self._settings.config.rendezvous_timeout_seconds
        backed_off = False
        while True:
            try:
                with self._stop.interruptible():
                    if not backed_off:
                        back_off(self._ledger, self._telemetry, self._stop)
                        backed_off = True
                    with self._rendezvous_handler.watching_departures():
                        self.join_rendezvous()
                        generation = self._agree_on_generation()
                break
            except SpareNodeError:
                self._stand_by()
            except (RendezvousClosedError, RendezvousGracefulExitError):
                # the latter is what torch raises on a node above the maximum
                raise RunOutcome(self._termination.final_record()) from None
            except (StopRequested, RendezvousError, dist.DistError, RuntimeError) as error:
                self._end_if_permanent(error, deadline)
                log.warn("rendezvous-retried", message=f"the rendezvous did not complete: {error}")
                time.sleep(self._rendezvous_handler.timings.poll)
        self._telemetry.rendezvous_ended("formed")
        if generation.exhausted:
            self._termination.end_exhausted(generation)
        return generation

    def _stand_by(self) -> None:
        """Prepare the workers of this node, which waits until the others need it."""
        self._telemetry.node_stands_by()
        with suppress(StopRequested), self._stop.interruptible():
            self._early.prepare(self._workers, self._count_running)

    def _count_running(self) -> int:
        """The number of nodes of a group that runs without this node; 0 if there is none."""
        try:
            members = self._rendezvous_handler.count_running()
        except (RendezvousError, dist.DistError, RuntimeError):
            return 0
        return members if members >= self._settings.node_limits.current().min else 0

    def _end_if_permanent(self, error: Exception, deadline: float) -> None:
        """Raise `RunOutcome` if another try to join the rendezvous is not wanted or cannot help;
        `deadline` is a monotonic time.
        """
        if self._stop.requested:
            step = self._termination.leave_and_save()
            raise RunOutcome(stopped("stopped while waiting for other nodes", step=step))
        if isinstance(error, RendezvousTimeoutError) or time.monotonic() > deadline:
            self._telemetry.rendezvous_ended("timeout")
            self._termination.leave_and_save()
            message = (
                f"fewer than {self._settings.node_limits.current().min} nodes joined within "
                f"{self._settings.config.rendezvous_timeout_seconds} s"
            )
            raise RunOutcome(self._rendezvous_failure(message))
        store_lost = isinstance(error, RendezvousConnectionError | dist.DistNetworkError)
        if store_lost and self._settings.endpoint.scheme == endpoint.C10D:
            message = f"the agent that hosts the rendezvous store is gone: {error}"
            raise RunOutcome(self._rendezvous_failure(message))

    def _save_kept_state(self) -> str | None:
        """Save what the workers of this node have kept; returns the outcome, None without one."""
        if self._generation is None:
            return None
        return save_kept_state(
            self._generation.number,
            settings=self._settings,
            agent_store=self._agent_store,
            ledger=self._ledger,
            agents={self._settings.node: self._instance_id},
            workers=self._workers,
            survivors=self._survivors,
            stop=self._stop,
        )

    def _rendezvous_failure(self, message: str) -> dict[str, Any]:
        """The exit record of an agent that cannot rendezvous."""
        return failed(
            Failure.of_node(Cause.RENDEZVOUS, Exit.PEERS_LOST, message, node=self._settings.node)
        )

    def _agree_on_generation(self) -> Generation:
        """The next generation, on which the agent with group rank 0 decides now."""
        group: Any = self.get_worker_group()  # torch declares None what it sets later
        store, rank = group.store, group.group_rank
        kept = self._survivors.describe_kept(self._workers)
        own = [self._settings.node, self._instance_id, kept]
        store.set(f"{_AGENT_KEY}{rank}", encode_json(own))
        if rank == 0:
            told = [
                parse_json(store.get(f"{_AGENT_KEY}{other}"))
                for other in range(group.group_world_size)
            ]
            nodes = self._settings.node_limits.current()
            generation = self._ledger.open_generation(
                {node: instance for node, instance, _ in told},
                world_size=group.workers[0].world_size,
                bounds=(nodes.min, nodes.max),
            )
            renewed = renewal.choose_renewed({node: ranks for node, _, ranks in told})
            store.set(_GENERATION_KEY, replace(generation, renewed=renewed).to_json())
        return Generation.from_json(store.get(_GENERATION_KEY))

    def _run_workers(self, generation: Generation) -> GroupResult:
        """Start this node's workers and monitor them; returns the result of the worker group."""
        settings, config, group = self._settings, self._settings.config, self.get_worker_group()
        self._generation, self._survivors.may_continue = generation, generation.continues_in_place
        self.set_restarts(generation.restarts)
        ranks = [worker.global_rank for worker in group.workers]
        exit_analysis.reset_files(settings.scratch, len(ranks))
        watchdog = Watchdog(
            settings.scratch,
            ranks=len(ranks),
            hang_seconds=config.hang_timeout_seconds,
            from_start=config.train is not None,
        )
        self._telemetry.rendezvous_completed(
            generation,
            world_size=group.workers[0].world_size,
            ranks=ranks,
            is_group_rank_0=group.group_rank == 0,
        )
        self._start_processes(ranks)
        handler, activity = self._rendezvous_handler, self._follow(len(ranks))
        try:
            with RendezvousPoller(
                lambda: PollResult(
                    handler.status(), self._fail_fast_store.generation(generation.number)
                ),
                seconds=handler.timings.watch,
            ) as poller:
                return WorkerMonitor(
                    config=config,
                    scratch=settings.scratch,
                    node=settings.node,
                    generation=generation,
                    global_ranks=ranks,
                    workers=self._workers,
                    survivors=self._survivors,
                    watchdog=watchdog,
                    agent_store=self._fail_fast_store,
                    store_ends_with_agent=settings.endpoint.scheme == endpoint.C10D,
                    latest_poll=poller,
                    has_silent_members=handler.has_silent_members,
                    telemetry=self._telemetry,
                    stop=self._stop,
                    mark_alive=partial(self._tend, watchdog, activity),
                ).run()
        finally:
            self._alive_at = None
            unkillable = self._end_workers()
            watchdog.close()
            if unkillable:
                raise RunOutcome(self._unkillable([ranks[local] for local in unkillable]))

    def _end_renewed(self) -> None:
        """End the process of the rank that is replaced, if it is one of this node."""
        node, local_rank = self._generation.renewed if self._generation is not None else NOBODY
        if node != self._settings.node or local_rank not in self._survivors.kept:
            return
        pid, step = self._workers.pid(local_rank), self._survivors.kept.pop(local_rank)
        log.event("rank-renewed", pid=pid, local_rank=local_rank, step=step)
        self._workers.kill(timeout_seconds=_KILL_SECONDS, keep=self._survivors.kept)

    def _follow(self, procs: int) -> RankActivity:
        """What follows the workers of the new group, and shows it in `/status`."""
        pids = {local_rank: self._workers.pid(local_rank) for local_rank in range(procs)}
        activity = RankActivity(self._settings.scratch, pids)
        self._telemetry.show_activity(activity.entries)
        return activity

    def _end_workers(self) -> list[int]:
        """Kill the workers that are not kept; returns those that survive it."""
        unkillable = self._survivors.end_others(self._workers, timeout_seconds=_KILL_SECONDS)
        if not self._survivors.kept:
            self._workers.close()
            self._workers = WorkerProcesses(self._early.standby.pids)
        return unkillable

    def _unkillable(self, ranks: list[int]) -> dict[str, Any]:
        """The exit record for workers that survive SIGKILL: they still hold resources that the next
        generation on this node needs.
        """
        node = self._settings.node
        message = (
            f"rank {', '.join(map(str, ranks))} on node {node} was killed and does not exit: the "
            "kernel waits for a disk, a network file system or a device that does not respond; "
            "see `dmesg` on the node, or replace it"
        )
        return failed(Failure.of_node(Cause.HANG, Exit.HANG, message, node=node, rank=ranks[0]))

    def _start_processes(self, ranks: list[int]) -> None:
        """Start the workers that are not kept, and have those that are kept join the group; `ranks`
        are the global ranks by local rank.
        """
        self._mark_alive()
        self._survivors.forget_exited(self._workers)
        self._end_renewed()
        missing = [number for number in range(len(ranks)) if number not in self._survivors.kept]
        context, environments = self.start_workers(missing)
        if context is not None:
            self._workers.add(context, missing)
        self._survivors.join(self._workers, environments)
        new = {*missing, *self._early.local_ranks}
        self._early.begin_group(environments)
        group = self.get_worker_group()
        for worker in group.workers:
            worker.id = self._workers.pid(worker.local_rank)
            if worker.local_rank in new:
                self._telemetry.rank_started(ranks[worker.local_rank], worker.id)
        group.state = WorkerState.HEALTHY

    def _tend(self, watchdog: Watchdog, activity: RankActivity) -> None:
        """What is to be done on each pass of the monitor."""
        self._mark_alive()
        activity.observe(watchdog.snapshots, living=self._workers.living)
        self._early.tend(watchdog.snapshots)
        if self._single_start.observe(watchdog.snapshots) and self._generation is not None:
            self._telemetry.checkpoints_opened(self._generation)

    def _mark_alive(self) -> None:
        self._alive_at = time.monotonic()
