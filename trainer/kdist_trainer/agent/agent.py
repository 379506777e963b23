"""The elastic agent: torch's LocalElasticAgent starts the workers, and kdist decides when to start
them and what their exit means.

Each pass of `run_rounds` joins the rendezvous, agrees with the other agents on a generation, starts
the workers and monitors them. Then it either continues with the next pass, if necessary after a
back-off, or ends the run with an exit record that all agents share. `open_stores` and
`open_handler` open what the rendezvous endpoint of the command line names.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store
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
from kdist_trainer.agent import compile_cache, exits
from kdist_trainer.agent.coordination import (
    NOBODY,
    AgentStore,
    Generation,
    choose_rank_to_renew,
    failure_to_event,
)
from kdist_trainer.agent.exits import GroupResult, RunOutcome, failed, root_cause, stopped
from kdist_trainer.agent.hangs import NO_STORE, RankActivity, Watchdog
from kdist_trainer.agent.monitor import AgentTelemetry, PollResult, RendezvousPoller, WorkerMonitor
from kdist_trainer.agent.restart_policy import RestartLedger, SingleStart
from kdist_trainer.agent.settings import (
    C10D,
    FILE,
    KUBERNETES,
    Settings,
    describe_environment,
    identify_code,
)
from kdist_trainer.agent.termination import TerminationPolicy, save_kept_state
from kdist_trainer.agent.tracker_process import TrackerProcess
from kdist_trainer.agent.worker_group import PrestartedWorkers, Survivors, WorkerProcesses
from kdist_trainer.config import Cause, Exit
from kdist_trainer.distributed.health_check import check_node
from kdist_trainer.errors import KdistTrainerError, NodeFaultError
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.machine_faults import EXCLUDED, FAULT
from kdist_trainer.formats.untrusted_text import parse_json
from kdist_trainer.ipc.failure import Failure
from kdist_trainer.processes.signals import StopRequested, StopSignals
from kdist_trainer.rendezvous.configmap_client import ApiEndpoint, ConfigMap
from kdist_trainer.rendezvous.handler import Rendezvous, open_rendezvous
from kdist_trainer.rendezvous.state import RendezvousTimings, SpareNodeError, open_key
from kdist_trainer.rendezvous.stores import (
    FileStore,
    KubernetesStore,
    open_tcp_store,
    release_store,
)
from kdist_trainer.rendezvous.torch_internals import ElasticAgentBase

FULL_SECONDS: Final = 60
"""How long it waits at least for room on a full disk, before which another try must fail too."""
_MAX_FULL_SECONDS: Final = 600
_POLL_SECONDS: Final = 0.2


def back_off(ledger: RestartLedger, telemetry: AgentTelemetry, stop: StopSignals) -> None:
    """Wait if the disk refuses writes or the same failure repeats: until the time is over, there is
    room on the disk that was full, or somebody asks for a stop.
    """
    latest = ledger.read_latest_generation()
    refused, repeated = ledger.storage_backoff_seconds(), ledger.failure_backoff_seconds(latest)
    if "kept_step" in latest:
        refused = 0  # nothing is lost by going on, and no storage is needed for it
        full = ""
    else:
        full = telemetry.find_full() if refused or ledger.has_failed_to_save(latest) else ""
    seconds = refused or repeated
    if full:
        seconds = min(_MAX_FULL_SECONDS, FULL_SECONDS * max(1, refused, repeated))
        name, what, wait = "storage-unavailable", full, f"waits for room, retrying in {seconds} s"
    elif refused:
        what, wait = "the checkpoint volume is not writable", f"retrying in {seconds} s"
        name = "storage-unavailable"
    elif repeated:
        name, what, wait = "backing-off", "the same failure again", f"retrying in {seconds} s"
    else:
        return
    log.warn(name, message=f"{what}; {wait}")
    # of a full disk `/status` says the rest, and a text of a path may be too long for it
    with telemetry.waiting_for(wait if full else f"{what}; {wait}"):
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not stop.requested:
            if full and not telemetry.find_full():
                return
            time.sleep(min(left, _POLL_SECONDS))


_AGENT_KEY = "kdist/agent/"
_GENERATION_KEY = "kdist/generation"
_HEALTHY_SECONDS = 60.0
_FAULTS_SECONDS = 60.0
_KILL_SECONDS = 30.0  # for the kernel to free a killed worker's memory, on the host and its device


class ElasticAgent(ElasticAgentBase):
    """The elastic agent of one node. `run` returns when the run has ended on this node; `record` is
    then its exit record. `fail_fast_store` is for use while workers run: its calls fail soon if the
    store is unreachable.
    """

    _generation: Generation | None = None
    _is_checked = False
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
    ) -> None:
        super().__init__(
            spec,
            DefaultLogsSpecs(log_dir=str(settings.scratch / "torchelastic")),
            start_method="forkserver",
        )
        assert isinstance(spec.rdzv_handler, Rendezvous)  # noqa: S101 - launch makes it so
        self.record: dict[str, Any] = {}
        self._rendezvous_handler = spec.rdzv_handler
        self._settings = settings
        self._agent_store = agent_store
        self._fail_fast_store = fail_fast_store
        self._telemetry = telemetry
        self._stop = stop
        self.tracker = TrackerProcess(settings, telemetry.show_tracker)
        self._single_start = SingleStart(settings.config, fail_fast_store)
        self._ledger = RestartLedger(
            agent_store,
            checkpoints=settings.checkpoints,
            limits=settings.config.restart_limits,
            single_start=self._single_start,
            devices=telemetry.devices,
            code=identify_code(settings.config, settings.code),
            environment=describe_environment(),
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
        self._survivors = Survivors(settings.config, settings.scratch)
        self._prestarted = PrestartedWorkers(
            settings, self.start_without_group, self._survivors, procs=procs
        )
        self._workers = WorkerProcesses()
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
                result = self._run_workers(generation)
                compile_cache.remove_damaged(self._settings, result.failures.values())
                fault = root_cause(each for each in result.failures.values() if each.is_of_machine)
                self._termination.decide(generation, result)
                if fault is not None:
                    self._is_checked = False
                    self._tell_fault(fault, FAULT)
        except RunOutcome as outcome:
            self.record = outcome.record
        except dist.DistError as error:
            self.record = self._rendezvous_failure(f"the rendezvous store is lost: {error}")
        finally:
            self._survivors.kept = {}
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
        try:
            self._settings.require_gpus()
            if not self._is_checked:
                self._show_machine_faults()
                self._check_health()
        except KdistTrainerError:
            if self._survivors.kept:  # they end with this agent
                self._termination.leave_and_save()
            raise
        with suppress(StopRequested), self._stop.interruptible():
            self._prestarted.prepare(self._workers, self._count_running)
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
                        with RendezvousPoller(self._show_machine_faults, seconds=_FAULTS_SECONDS):
                            self.join_rendezvous()
                        generation = self._agree_on_generation()
                break
            except SpareNodeError:
                self._telemetry.node_stands_by()
                with suppress(StopRequested), self._stop.interruptible():
                    self._prestarted.prepare(self._workers, self._count_running)
            except (RendezvousClosedError, RendezvousGracefulExitError):
                # the latter is what torch raises on a node above the maximum
                raise RunOutcome(self._termination.final_record()) from None
            except (StopRequested, RendezvousError, dist.DistError, RuntimeError) as error:
                self._end_if_permanent(error, deadline)
                log.warn("rendezvous-retried", message=f"the rendezvous did not complete: {error}")
                time.sleep(self._rendezvous_handler.timings.poll)
        self._telemetry.rendezvous_ended("formed")
        self._telemetry.show_machine_faults(generation.machine_faults)
        if generation.exhausted:
            self._termination.end_exhausted(generation)
        return generation

    def _check_health(self) -> None:
        """Raise `NodeFaultError` if this node fails its health check, and record it."""
        settings = self._settings
        try:
            # a request to stop ends the wait for other nodes, which follows
            with suppress(StopRequested), self._stop.interruptible():
                check_node(
                    settings.config.preflight,
                    node=settings.node,
                    gpus=0 if self._survivors.kept else settings.gpus,  # which those hold
                    code=settings.code,
                )
        except NodeFaultError as error:
            log.error(EXCLUDED, message=str(error))
            failure = Failure.of_node(error.cause, error.code, str(error), node=settings.node)
            self._tell_fault(replace(failure, signature=error.signature), EXCLUDED)
            raise
        self._is_checked = True

    def _tell_fault(self, fault: Failure, event: str) -> None:
        """Write a fault of this machine by this event, and show it in `/status` of all agents."""
        with suppress(RuntimeError):  # a store that is away
            self._ledger.append_event(**{**failure_to_event(fault), "event": event})
            self._show_machine_faults()
            self._agent_store.post_machine_faults(self._ledger.list_machine_faults)

    def _show_machine_faults(self) -> PollResult:
        """Show the faults of machines so far in `/status`: nobody else does if no group forms."""
        with suppress(RuntimeError):
            self._telemetry.show_machine_faults(self._ledger.list_machine_faults())
        return PollResult()

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
        if store_lost and self._settings.endpoint.scheme == C10D:
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
            agents = [
                parse_json(store.get(f"{_AGENT_KEY}{other}"))
                for other in range(group.group_world_size)
            ]
            nodes = self._settings.node_limits.current()
            generation = self._ledger.open_generation(
                {node: instance for node, instance, _ in agents},
                world_size=group.workers[0].world_size,
                bounds=(nodes.min, nodes.max),
            )
            renewed = choose_rank_to_renew({node: ranks for node, _, ranks in agents})
            store.set(_GENERATION_KEY, replace(generation, renewed=renewed).to_json())
        return Generation.from_json(store.get(_GENERATION_KEY))

    def _run_workers(self, generation: Generation) -> GroupResult:
        """Start this node's workers and monitor them; returns the result of the worker group."""
        settings, config, group = self._settings, self._settings.config, self.get_worker_group()
        self._generation, self._survivors.may_continue = generation, generation.continues_in_place
        self.set_restarts(generation.restarts)
        ranks = [worker.global_rank for worker in group.workers]
        exits.reset_files(settings.scratch, len(ranks))
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
        self.tracker.begin_group(is_group_rank_0=group.group_rank == 0)
        self._start_processes(ranks)
        handler = self._rendezvous_handler
        pids = {local_rank: self._workers.pid(local_rank) for local_rank in range(len(ranks))}
        activity = RankActivity(settings.scratch, pids)
        self._telemetry.sources.activity = activity.entries
        result: GroupResult | None = None
        try:
            with RendezvousPoller(
                lambda: PollResult(
                    handler.status(), self._fail_fast_store.generation(generation.number)
                ),
                seconds=handler.timings.watch,
            ) as poller:
                result = WorkerMonitor(
                    config=config,
                    scratch=settings.scratch,
                    node=settings.node,
                    generation=generation,
                    global_ranks=ranks,
                    workers=self._workers,
                    survivors=self._survivors,
                    watchdog=watchdog,
                    agent_store=self._fail_fast_store,
                    store_ends_with_agent=settings.endpoint.scheme == C10D,
                    latest_poll=poller,
                    has_silent_members=handler.has_silent_members,
                    telemetry=self._telemetry,
                    stop=self._stop,
                    mark_alive=partial(self._tend, watchdog, activity),
                ).run()
                return result
        finally:
            self._alive_at = None
            if result is None or not result.is_done:
                self.tracker.kill()  # the next group may be without this node
            unkillable = self._end_workers()
            watchdog.close()
            if unkillable:
                # they still hold resources that the next generation on this node needs
                lost, node = [ranks[local] for local in unkillable], settings.node
                message = (
                    f"rank {', '.join(map(str, lost))} on node {node} was killed and does not "
                    "exit: the kernel waits for a disk, a network file system or a device that "
                    "does not respond; see `dmesg` on the node, or replace it"
                )
                hang = Failure.of_node(Cause.HANG, Exit.HANG, message, node=node, rank=lost[0])
                raise RunOutcome(failed(hang))

    def _end_workers(self) -> list[int]:
        """Kill the workers that are not kept; returns those that survive it."""
        unkillable = self._survivors.end_others(self._workers, timeout_seconds=_KILL_SECONDS)
        if not self._survivors.kept:
            self._workers.close()
            self._workers = WorkerProcesses()
        return unkillable

    def _start_processes(self, ranks: list[int]) -> None:
        """Start the workers that are not kept, and have those that are kept join the group; `ranks`
        are the global ranks by local rank.
        """
        self._alive_at = time.monotonic()
        survivors = self._survivors
        survivors.forget_exited(self._workers)
        node, renewed = self._generation.renewed if self._generation is not None else NOBODY
        if node == self._settings.node and renewed in survivors.kept:
            pid, step = self._workers.pid(renewed), survivors.kept.pop(renewed)
            log.event("rank-renewed", pid=pid, local_rank=renewed, step=step)
            self._workers.kill(timeout_seconds=_KILL_SECONDS, keep=survivors.kept)
        missing = [number for number in range(len(ranks)) if number not in self._survivors.kept]
        context, environments = self.start_workers(missing)
        if context is not None:
            self._workers.add(context, missing)
        self._survivors.join(self._workers, environments)
        new = {*missing, *self._prestarted.local_ranks}
        self._prestarted.begin_group(environments)
        group = self.get_worker_group()
        for worker in group.workers:
            worker.id = self._workers.pid(worker.local_rank)
            if worker.local_rank in new:
                log.event("worker-started", rank=ranks[worker.local_rank], pid=worker.id)
        group.state = WorkerState.HEALTHY

    def _tend(self, watchdog: Watchdog, activity: RankActivity) -> None:
        """What is to be done on each pass of the monitor."""
        self._alive_at = time.monotonic()
        self.tracker.tend()
        activity.observe(watchdog.snapshots, living=self._workers.living)
        if self._single_start.observe(watchdog.snapshots) and self._generation is not None:
            self._telemetry.checkpoints_opened(self._generation)


_KEY_SECONDS = 10.0
"""How long an agent waits for a key that another one writes, plus a quarter second per node; then
the round fails and all rendezvous again.
"""
_FAIL_FAST_SECONDS = 3.0
"""How long requests to an API server are retried while workers run."""
_STOPPING_SECONDS = 1.0
"""The same once a stop was requested."""
_RETRY_SECONDS = 1.0


class StoreUnavailableError(KdistTrainerError):
    """The rendezvous store cannot be reached."""

    cause, code = Cause.RENDEZVOUS, Exit.PEERS_LOST


@dataclass(frozen=True)
class StoreClients:
    """Two clients of one store.

    Attributes:
        retrying: Retries while the store is unreachable, as long as a rendezvous may take.
        fail_fast: Raises soon if the store is unreachable.
        is_host: Whether this agent hosts the store; None if no agent does.
    """

    retrying: Store
    fail_fast: Store
    is_host: bool | None = None

    def release(self, *, agents: int) -> None:
        """Release the store at the end of the run: the agent that hosts it waits until all `agents`
        have read the result.
        """
        if self.is_host is not None:
            release_store(self.retrying, is_host=self.is_host, agents=agents)


def open_stores(settings: Settings, stop: StopSignals) -> StoreClients:
    """Open the store that `settings.rendezvous` names, and wait for it.

    Raises:
        ConfigError: If the store can never be reached.
        StoreUnavailableError: If it could not be reached within `rendezvousTimeoutSeconds`.
    """
    where, nodes = settings.endpoint, settings.config.nodes.max
    seconds = settings.config.rendezvous_timeout_seconds
    key_seconds = _KEY_SECONDS + nodes / 4
    first, second = where.location
    if where.scheme == FILE:
        store: Store = FileStore(Path(first), timeout_seconds=key_seconds)
        return StoreClients(store, store)
    if where.scheme == C10D:
        try:
            store, is_host = open_tcp_store(
                first,
                int(second),
                node=settings.node,
                address=settings.address,
                timeout_seconds=key_seconds,
                retry_seconds=seconds,
            )
        except (OSError, DistError) as error:
            raise StoreUnavailableError(
                f"the rendezvous store at {first}:{second} is unreachable: {error}"
            ) from error
        return StoreClients(store, store, is_host=is_host)
    opened = threading.Event()
    server = ApiEndpoint.from_environment()
    poll = RendezvousTimings.for_nodes(nodes, remote=True).poll

    def client(running_seconds: float) -> KubernetesStore:
        def retry_seconds() -> float:
            if stop.requested:
                return _STOPPING_SECONDS
            return running_seconds if opened.is_set() else seconds

        config_map = ConfigMap(server, first, second, retry_seconds=retry_seconds)
        return KubernetesStore(
            config_map,
            run_id=settings.rendezvous_run_id,
            timeout_seconds=key_seconds,
            poll_seconds=poll,
        )

    stores = StoreClients(client(seconds), client(_FAIL_FAST_SECONDS))
    try:
        stores.retrying.check([])
        stores.fail_fast.check([])
    except DistError as error:
        raise StoreUnavailableError(str(error)) from error
    opened.set()
    return stores


def open_handler(settings: Settings, stores: StoreClients, *, predecessors: set[int]) -> Rendezvous:
    """Open the rendezvous in these stores; it still lists `predecessors`, the pids of this node's
    earlier agents. Raises `StoreUnavailableError` if the store does not respond within
    `rendezvousTimeoutSeconds`.
    """
    config, scheme = settings.config, settings.endpoint.scheme
    deadline = time.monotonic() + config.rendezvous_timeout_seconds
    while True:
        try:
            handler = open_rendezvous(
                stores.retrying,
                state_store=stores.fail_fast,
                run_id=settings.rendezvous_run_id,
                min_nodes=config.nodes.min,
                max_nodes=config.nodes.max,
                address=settings.address or ("127.0.0.1" if scheme == FILE else None),
                index=settings.index,
                timeout_seconds=config.rendezvous_timeout_seconds,
                remote=scheme == KUBERNETES,
                exchange_seconds=_KEY_SECONDS + config.nodes.max / 4
                if scheme == KUBERNETES
                else None,
                node_counts=lambda: ((nodes := settings.node_limits.current()).min, nodes.max),
            )
            break
        except RendezvousConnectionError as error:
            if scheme == C10D or time.monotonic() > deadline:
                raise StoreUnavailableError(f"{NO_STORE}: {error}") from error
            log.warn(
                "rendezvous-retried",
                message=f"{NO_STORE}: {error.__cause__ or error}",
            )
            time.sleep(_RETRY_SECONDS)
    if scheme == KUBERNETES and open_key(stores.retrying).fingerprint() is None:
        log.warn(
            "exchange-without-key",
            message="the Secret with the key of this job's exchange is not mounted: its agents "
            "exchange through the ConfigMap alone, and notice later which of them are lost",
        )
    with suppress(RendezvousError):  # else their keep-alives are missed later
        if predecessors:
            handler.remove_predecessors(predecessors)
        settings.forget_predecessors()
    return handler
