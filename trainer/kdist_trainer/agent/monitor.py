"""Supervises the workers of one generation on this node, from their start until all of them have
exited, and reports what happens to the log and to the metrics exporter.

The monitor detects exits, hangs, desynchronized collectives, lost nodes and requests to stop, and
returns the result of the worker group. torch elastic's counterpart is the loop of `_invoke_run`.

The rendezvous and the generation's document are polled in a background thread, so that a slow or
unreachable store never blocks the monitor's loop. Nor does the loop end when the process has no
file descriptor left: it repeats the pass.

`AgentTelemetry` also reports which of the folders that a training writes to are full.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kdist_trainer import log
from kdist_trainer.agent.coordination import (
    DEADLINE,
    FAILURE,
    JOIN,
    RENEW,
    START,
    STOP,
    AgentStore,
    Document,
    Generation,
    failures_of,
)
from kdist_trainer.agent.exits import (
    ExitContext,
    GroupResult,
    OomKills,
    RankState,
    describe_full,
    describe_room,
    find_failures,
    group_result,
    recorded_failures,
    root_cause,
    secondary_failures,
)
from kdist_trainer.agent.hangs import (
    DesyncDetector,
    Mismatch,
    NodeLossDetector,
    Watchdog,
    dump_stacks,
    find_hung_rank,
    gather_rank_states,
    hang_failures,
    mismatch_failure,
    read_or_empty,
)
from kdist_trainer.agent.restart_policy import RULE
from kdist_trainer.agent.settings import Settings
from kdist_trainer.agent.worker_group import Survivors, WorkerProcesses
from kdist_trainer.config import Cause, TrainConfig
from kdist_trainer.config.train_config import RESTARTS
from kdist_trainer.instrumentation.fault_handler import stacks_path
from kdist_trainer.ipc import result
from kdist_trainer.ipc.failure import Failure
from kdist_trainer.processes.descriptors import EXHAUSTED
from kdist_trainer.processes.liveness import Phase
from kdist_trainer.processes.signals import StopSignals, kill_deadline, signal_name
from kdist_trainer.processes.threads import OnError, start_thread
from kdist_trainer.rendezvous.state import RendezvousStatus
from kdist_trainer.rendezvous.stores import StoreRefusedError

if TYPE_CHECKING:
    from kdist_trainer.agent.logs import LogRelay
    from kdist_trainer.metrics.exporter import Exporter
    from kdist_trainer.rendezvous.handler import Rendezvous


SEPARATE: Final = (
    "none of the ranks has formed a process group with the others: unless they exchange by other "
    "means than torch.distributed, each has trained a model of its own"
)
_SHOWN = 500  # characters of a message that `/status` shows


class AgentTelemetry:
    """Reports each event to the log and the exporter; the relay prefixes the workers' lines with
    ranks.
    """

    def __init__(
        self, exporter: Exporter, relay: LogRelay, settings: Settings, *, procs: int
    ) -> None:
        from kdist_trainer.distributed import devices  # which imports torch

        config, folders = settings.config, settings.written_folders
        self._exporter = exporter
        self._relay = relay
        self._limits = config.restart_limits
        self._single_start = config.starts_once
        """Whether ranks may not restart before one has opened the job's checkpoints."""
        self._managed = config.train is not None
        self._folders = folders
        self.devices = devices.describe_devices(procs, config.train)
        """What the ranks of this node run on."""
        self.sources = exporter.sources
        """What `/status` shows."""
        self.sources.full = self.find_full
        self.sources.room = lambda: describe_room(*folders[0], is_full=False)
        self._world_size = 1
        self._waiting_since: float | None = time.monotonic()

    def state(self, state: str) -> None:
        """Set the state of the agent, which `/status` shows."""
        self._exporter.set_state(state)

    def show_rendezvous(self, handler: Rendezvous, store: AgentStore) -> None:
        """Have `/status` and the metrics show the other agents, the connections that the exchange
        has closed, whether and how the API server refuses this agent the rendezvous, and whether
        the key of the exchange is mounted.
        """

        def read() -> dict[str, Any] | None:
            known = handler.peers()
            if known is None:
                return None
            return {
                "heard": sorted(known.heard),
                "silent": sorted(known.silent),
                "age_seconds": round(time.monotonic() - known.read_at, 3),
            }

        sources = self.sources
        sources.peers = read
        sources.refused, sources.refusal = handler.refused, store.refusal
        sources.has_key = handler.has_key

    def show_machine_faults(self, faults: Sequence[Mapping[str, Any]]) -> None:
        """Have `/status` show the faults of the machines of this run."""
        self._exporter.sources.machine_faults = faults

    def show_tracker(self, url: str) -> None:
        """Have `/status` show the address of the run in its tracker."""
        self._exporter.sources.tracker = url

    @contextmanager
    def waiting_for(self, message: str) -> Iterator[None]:
        """Have `/status` show what the agent waits for, as long as it does."""
        self._exporter.sources.waiting_for = message
        try:
            yield
        finally:
            self._exporter.sources.waiting_for = ""

    def rendezvous_started(self) -> None:
        """The agent joins the next rendezvous round."""
        self._waiting_since = time.monotonic()
        self.state("rendezvous")
        log.event("rendezvous-started")

    def rendezvous_ended(self, outcome: str) -> None:
        """Count a rendezvous by its outcome: `formed`, `timeout` or `failed`."""
        if self._waiting_since is not None:
            self._exporter.observe_rendezvous(time.monotonic() - self._waiting_since, outcome)

    def node_stands_by(self) -> None:
        """The group has its nodes: this one waits until it is needed, for which no time is
        observed.
        """
        self._waiting_since = None
        self.state("standby")
        log.event("node-standby")

    def rendezvous_completed(
        self,
        generation: Generation,
        *,
        world_size: int,
        ranks: list[int],
        is_group_rank_0: bool,
    ) -> None:
        """A rendezvous round is complete and its workers start. `ranks` are the global ranks of
        this node, by local rank; `is_group_rank_0` says whether this agent counts what concerns the
        whole group.
        """
        self._world_size = world_size
        self.state("initializing")
        self._exporter.sources.devices = self.devices
        self._exporter.sources.slow_start = generation.slow_start
        self._relay.begin(ranks, generation=generation.number)
        self._exporter.run_counts.begin(
            restarts=generation.total_restarts or 0,
            lost_steps=generation.total_lost_steps or 0,
            committed=(generation.committed_step, generation.committed_at),
        )
        self._exporter.set_group(
            generation=generation.number, world_size=world_size, local_ranks=ranks
        )
        self._exporter.at_risk.start_group(generation.at_risk_seconds, has_rank_zero=0 in ranks)
        if not self._single_start:
            self._show_remaining(generation)
        elif is_group_rank_0 and not generation.from_step and generation.reason == START:
            log.event("restarts-off", message=RULE)
        if is_group_rank_0 and generation.lost_steps:
            self._exporter.add_lost_steps(generation.lost_steps)
        log.bind(generation=generation.number)
        if generation.reason == FAILURE:
            fields = {
                "restarts": generation.counts[generation.limit],
                "budget": self._limits.get(generation.limit),
                "counted": generation.limit,
                "cause": generation.cause,
                "failure": generation.message[:500],
            }
            if not generation.from_step and not self._managed:
                fields["message"] = (
                    "the script starts again from the beginning: it has saved no checkpoint "
                    "that kdist knows"
                )
            if generation.slow_start:
                fields["message"] = generation.slow_start
            log.warn("restarting", **fields)
        log.event(
            "rendezvous-completed",
            world_size=world_size,
            nodes=len(generation.nodes),
            reason=generation.reason,
            **({"devices": self.devices} if self.devices else {}),
        )

    def checkpoints_opened(self, generation: Generation) -> None:
        """A script has opened the job's checkpoints, so that it may be started again."""
        self._single_start = False
        self._show_remaining(generation)
        log.event("checkpoints-opened", limit=self._limits[RESTARTS])

    def _show_remaining(self, generation: Generation) -> None:
        budget = self._limits[RESTARTS]
        remaining = max(0, budget - generation.counts.get(RESTARTS, 0))
        self._exporter.set_restarts_remaining(remaining, budget=budget)

    def rank_failed(self, failure: Failure, exit_code: int | None) -> None:
        """A worker failed; `exit_code` is None if the agent killed it."""
        name = None if exit_code is None else signal_name(exit_code)
        op = (failure.collective or "").partition("(")[0]
        self._exporter.add_worker_exit(failure.cause, name, collective=op)
        write = log.error if failure.primary else log.warn
        write(
            "worker-failed",
            cause=failure.cause,
            rank=failure.rank,
            step=failure.step,
            signal=name,
            code=exit_code if name is None else None,
            message=failure.message,
            primary=failure.primary,
        )

    def count_separate(self, *, is_known: bool) -> int:
        """The number of ranks that are done and have never formed a process group, which is logged;
        0 if there is one rank only, or if it is not known of this node's.
        """
        if not is_known or self._world_size == 1:
            return 0
        log.warn("separate-ranks", ranks=self._world_size, message=SEPARATE)
        return self._world_size

    def group_ended(self, outcomes: Iterable[str], *, is_kept: bool) -> None:
        """The worker group has ended on this node: `outcomes` are those of the workers that
        succeeded, `done` or `stopped`, and `is_kept` says whether one holds the state in memory.
        """
        for outcome in outcomes:
            self._exporter.add_worker_exit(outcome, None)
        self._exporter.at_risk.stop(now=time.time(), is_kept=is_kept)

    def group_failed(self, failure: Failure) -> None:
        """A failure ended the group; whether it restarts is decided later."""
        self.state("restarting")
        self._exporter.add_restart(failure.cause)
        full = self.find_full()
        if full:
            log.error("disk-full", message=full)
        self._exporter.sources.last_failure = {
            "cause": failure.cause.value,
            "message": failure.message[:_SHOWN],
            "rank": failure.rank,
            "node": failure.node,
            "machine": failure.machine,
            "step": failure.step,
            "time": round(failure.time, 3),
            "primary": failure.primary,
            "full": full or None,
        }

    def find_full(self, *, has: str = "has") -> str:
        """A sentence about the folders without room that the training writes to; empty if all have
        room. With `has="had"` it is for a text that is read later.
        """
        return describe_full(self._folders, has=has)

    def hang(self, failure: Failure, *, phase: str, stacks: str) -> None:
        """A rank hangs in `phase`; `stacks` is the path of its stacks."""
        self.state("hung")
        log.error(
            "hang",
            rank=failure.rank,
            step=failure.step,
            phase=phase,
            collective=failure.collective,
            stacks=stacks,
        )


_PAUSE_SECONDS = 0.1
_Result = TypeVar("_Result")


def repeat(look: Callable[[], _Result | None]) -> _Result:
    """Call `look` until it returns something, also after it has failed for want of descriptors."""
    has_warned = False
    while True:
        try:
            if (found := look()) is not None:
                return found
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            if not has_warned:
                message = f"the agent has no file descriptor left and tries again: {error}"
                log.warn("descriptors-exhausted", message=message)
            has_warned = True
            time.sleep(_PAUSE_SECONDS)


@dataclass(frozen=True)
class PollResult:
    """The state of the rendezvous, and the generation's document, which is read after it: an agent
    that leaves on purpose writes the document first.
    """

    status: RendezvousStatus = field(default_factory=RendezvousStatus)
    document: Document = field(default_factory=dict)


class RendezvousPoller:
    """Calls `source` every `seconds` within the `with` block. Calling the poller returns the latest
    result, or raises the error of the latest poll.
    """

    def __init__(self, source: Callable[[], PollResult], *, seconds: float) -> None:
        self._source = source
        self._seconds = seconds
        self._latest: PollResult | Exception = PollResult()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self) -> PollResult:
        latest = self._latest
        if isinstance(latest, Exception):
            raise latest
        return latest

    def __enter__(self) -> RendezvousPoller:
        self._thread = start_thread(
            self._poll_loop, name="kdist-rendezvous", on_error=OnError.RESTART
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()  # from here on only the agent's own thread uses the rendezvous

    def _poll_loop(self) -> None:
        while not self._stopped.wait(self._seconds):
            try:
                self._latest = self._source()
            except Exception as error:  # noqa: BLE001 - raised in the thread that calls the poller
                self._latest = error


POLL_SECONDS = 0.1
"""The poll interval of the loop; it notices the exit of a worker at once."""
PRIMARY_SECONDS = 1.0
"""How long a node with secondary failures only waits for a primary one of another rank."""
LEFT_SECONDS = 5.0
"""How long workers may continue after other nodes have left their group on purpose: the next
collective usually ends them.
"""


@dataclass
class WorkerMonitor:
    """Monitors one worker group on this node. Errors of the store are logged and change nothing.

    Attributes:
        agent_store: Its calls must fail soon if the store is unreachable.
        store_ends_with_agent: Whether an agent hosts the store: one that is lost is lost for good,
            and so are the workers of its host.
        latest_poll: Returns the latest state of the rendezvous, or raises the error of the poll.
        has_silent_members: Whether another node is silent, by the connections of the members.
        mark_alive: Called on each pass of the loop, for the agent's own liveness.
    """

    config: TrainConfig
    scratch: Path
    node: str
    generation: Generation
    global_ranks: list[int]
    workers: WorkerProcesses
    survivors: Survivors
    watchdog: Watchdog
    agent_store: AgentStore
    store_ends_with_agent: bool
    latest_poll: Callable[[], PollResult]
    has_silent_members: Callable[[], bool]
    telemetry: AgentTelemetry
    stop: StopSignals
    mark_alive: Callable[[], None]

    def __post_init__(self) -> None:
        self._oom_kills = OomKills()
        self._terminated_at: float | None = None
        self._joining_since: float | None = None
        self._left_since: float | None = None
        self._node_loss = NodeLossDetector(
            self.config, self.generation, self.watchdog, self.has_silent_members
        )
        self._secondary_since: float | None = None
        self._kill_at = math.inf
        self._is_stop_told = self._is_past_deadline = False
        self._started = False
        self._running = False
        self._unreachable_since: float | None = None
        self._desync = DesyncDetector()
        self._pids = {number: self.workers.pid(number) for number in range(len(self.global_ranks))}

    def run(self) -> GroupResult:
        """Monitor the workers until all have exited, by themselves or killed by the agent."""
        return repeat(self._look)

    def _look(self) -> GroupResult | None:
        """One pass of the loop; returns the result of a group that has ended."""
        self.workers.wait(POLL_SECONDS, also=self.survivors.descriptors)
        self.survivors.poll()
        self.mark_alive()
        stalled = self.watchdog.poll()
        self._oom_kills.poll()
        exits = self.workers.exits()
        if self._failures(exits) or self.survivors.left(self.workers):
            return self._end_after_failure()
        if not self.workers.living:
            return self._end_completed()
        if stalled:
            return self._end_hung(stalled)
        if (mismatch := self._desync.check(self._rank_states)) is not None:
            return self._end_desynchronized(mismatch)
        self._update_state()
        self._forward_stop()
        if self._terminated_at is None and self.generation.is_past_deadline(self.config):
            self._is_past_deadline = True
            log.event("stopping", reason="activeDeadlineSeconds has passed")
            self._terminate(DEADLINE, since=time.monotonic())
        polled = self._read_poll()
        if "planned_stop" in polled.document and not self._is_stop_told:
            self._tell_deadline(time.monotonic())  # of another node; here nobody is killed by then
        if faults := polled.document.get("machine_faults"):  # of a node that did not join
            self.telemetry.show_machine_faults(faults)
        if self._has_failed_elsewhere(polled) or self._has_lost_a_node(polled):
            return self._end_after_peer_failure(polled)
        if self._apply_status(polled.status):
            return self._end_on_purpose(JOIN)
        renews = self.survivors.need_renewal(self.workers, self.watchdog.snapshots, self.generation)
        if renews and self._terminated_at is None:
            return self._end_on_purpose(RENEW)
        if time.monotonic() > self._kill_at or self.stop.urgent:
            return self._end_by_force()
        # workers inside torch's connect cannot react to a request to stop
        is_asked = self._terminated_at is not None and self.config.train is not None
        if not (is_asked and self._is_connecting()):
            return None
        if self.generation.kept_step is None:
            return self._end_by_force()
        exits = self.workers.exits()
        self.survivors.keep(self.workers)  # what workers have kept of the former group
        return replace(self._group_result(exits), kept=dict(self.survivors.kept))

    def _forward_stop(self) -> None:
        """Forward a request to stop to the workers, once."""
        if self.stop.requested_at is None or self._terminated_at is not None:
            return
        opened = any(snapshot.has_checkpoints for snapshot in self.watchdog.snapshots)
        managed = self.config.train is not None
        log.event("stopping", reason="asked to stop", saves=managed or opened)
        self._terminate(STOP, since=self.stop.requested_at)

    def _read_poll(self) -> PollResult:
        """The latest poll of the rendezvous; an empty one while the store is unreachable."""
        try:
            polled = self.latest_poll()
        except Exception as error:  # noqa: BLE001 - an unreachable store must not end the workers
            if self._unreachable_since is None:
                self._unreachable_since = time.monotonic()
                reason = error.__cause__ or error  # torch's own message does not say why
                name, message = "rendezvous-unreachable", "the rendezvous cannot be read"
                if isinstance(reason, StoreRefusedError):
                    name = "rendezvous-refused"
                    message = "the workers go on, and no other group can form after this one"
                log.warn(name, message=f"{message}: {reason}")
            return PollResult()
        self._unreachable_since = None
        return polled

    def _has_failed_elsewhere(self, polled: PollResult) -> bool:
        """Whether the group can neither continue nor save: a rank of another node has failed, or a
        node was lost without a planned stop.

        After a planned stop workers exit one by one, and a script may save on its own.
        """
        document, now = polled.document, time.monotonic()
        failures = failures_of(document)
        if "planned_stop" in document:
            return self.config.train is not None and any(failure.primary for failure in failures)
        if any(failure.primary for failure in failures):
            return True
        self._secondary_since = (self._secondary_since or now) if failures else None
        # the primary failure may be that of a rank of this node that has not recorded it yet
        if self._secondary_since is not None:
            return now - self._secondary_since >= PRIMARY_SECONDS
        return bool(polled.status.left) and not polled.status.closed

    def _apply_status(self, status: RendezvousStatus) -> bool:
        """End the workers if the run is over, nodes want to join, or nodes have left. Returns
        whether nodes want to join and the workers can leave their group at once.
        """
        if status.closed:
            self._apply_run_result()
        now = time.monotonic()
        self._joining_since = (self._joining_since or now) if status.waiting else None
        self._left_since = (self._left_since or now) if status.left else None
        if self._terminated_at is not None:
            return False
        if self._joining_since is not None and (
            status.vacant == 0 or now - self._joining_since >= self.config.join_window_seconds
        ):
            log.event("joining", waiting=status.waiting)
            if self.survivors.all_can_leave(self.workers):
                return True
            self._terminate(JOIN, since=now)
        elif self._left_since is not None and now - self._left_since >= max(
            LEFT_SECONDS, self.config.join_window_seconds
        ):
            log.warn(
                "peers-left",
                message=f"{status.left} other nodes left this group: its ranks on this node end",
            )
            self._terminate(None, since=now)
        return False

    def _apply_run_result(self) -> None:
        """The run is over: kill the workers after a failure, let them finish after a success, and
        save at the deadline.
        """
        record = read_or_empty(self.agent_store.run_result)
        if (code := record.get("code")) is not None:
            # at the deadline all save, also where another node was the first to end the run
            is_late = self._is_past_deadline or record.get("cause") == Cause.DEADLINE
            saves = code == 0 or is_late
            grace = self.config.termination_grace_period_seconds if saves else 0
            self._kill_at = min(self._kill_at, time.monotonic() + grace)

    def _terminate(self, reason: str | None, *, since: float) -> None:
        """Send SIGTERM to the workers, once; the grace period began at monotonic time `since`. The
        `reason` of a planned stop keeps the workers' exit from being a failure; None if it is not
        planned.
        """
        self._terminated_at = time.monotonic()
        self._kill_at = self._tell_deadline(since)
        if reason in (STOP, DEADLINE):  # before the request to a store that may be slow
            self.workers.signal(signal.SIGTERM)
        if reason is not None:
            plan, number = self.agent_store.plan_stop, self.generation.number
            read_or_empty(lambda: plan(number, reason, rank_states=self._rank_states()))
        if reason not in (STOP, DEADLINE):
            self.workers.signal(signal.SIGTERM)

    def _tell_deadline(self, since: float) -> float:
        """Tell the ranks until when they are to stop; returns that, of the monotonic clock."""
        self._is_stop_told = True
        kill_at = kill_deadline(since, self.config.termination_grace_period_seconds)
        self.watchdog.mark_stop(time.time() + kill_at - time.monotonic())
        return kill_at

    def _is_connecting(self) -> bool:
        connecting = (Phase.START, Phase.RENDEZVOUS)
        return any(each.phase in connecting for each in self.watchdog.snapshots)

    def _update_state(self) -> None:
        """Notice when all workers have started, and when one has completed a step."""
        if not self._started and all(
            stacks_path(self.scratch, number).exists() for number in self._pids
        ):
            self._started = True
            self.workers.release()
        stepping = self.config.script is not None or any(
            snapshot.phase is Phase.STEP for snapshot in self.watchdog.snapshots
        )
        if stepping and not self._running:
            self._running = True
            self.telemetry.state("running")

    def _end_completed(self) -> GroupResult:
        """The result of a group whose workers have all exited without a failure."""
        self.watchdog.poll()  # what they wrote last
        exits = self.workers.exits()
        if self.config.script is not None and self._terminated_at is None:
            for number, code in exits.items():
                if code == 0 and not result.read_result(self.scratch, number):
                    rank = self.global_ranks[number]
                    how = "exited with code 0 by os._exit or exec: it counts as done"
                    message = f"rank {rank} {how}, as under torchrun"
                    log.warn("ended-early", rank=rank, message=message)
        return self._group_result(exits)

    def _end_after_failure(self) -> GroupResult:
        """End the group after a failure on this node; a primary one may follow a secondary one."""
        deadline = time.monotonic() + PRIMARY_SECONDS
        while time.monotonic() < deadline:
            if any(failure.primary for failure in self._failures(self.workers.exits()).values()):
                break
            if len(self.workers.living) == len(self.survivors.left(self.workers)):
                break
            self.workers.wait(POLL_SECONDS, also=self.survivors.descriptors)
            self.survivors.poll()
        self.watchdog.poll()
        rank_states, exits = self._rank_states(), self.workers.exits()
        self.survivors.keep(self.workers)
        ended = self._group_result(exits)
        store, number = self.agent_store, self.generation.number
        failures = ended.failures
        if not failures and "planned_stop" not in read_or_empty(lambda: store.generation(number)):
            lost = self.survivors.why(self.workers) or "a connection to another rank is lost"
            failures = secondary_failures(self._exit_context(exits), lost)
        return replace(
            ended, failures=failures, rank_states=rank_states, kept=dict(self.survivors.kept)
        )

    def _end_on_purpose(self, reason: str) -> GroupResult:
        """The result of a group whose workers have left it for `reason`, which is planned."""
        read_or_empty(lambda: self.agent_store.plan_stop(self.generation.number, reason))
        self.survivors.keep(self.workers)
        return replace(self._group_result(self.workers.exits()), kept=dict(self.survivors.kept))

    def _has_lost_a_node(self, polled: PollResult) -> bool:
        """Whether another node is lost and the workers of this node wait for it."""
        if self._unreachable_since is not None and self.store_ends_with_agent:
            lost_for = time.monotonic() - self._unreachable_since
            return lost_for >= PRIMARY_SECONDS and self._is_connecting()
        return self._node_loss.is_lost(polled.status)

    def _end_after_peer_failure(self, polled: PollResult) -> GroupResult:
        """End a group that failed on another node. A failure that a worker of this node recorded
        counts, even if the worker has not exited yet.
        """
        rank_states, exits = self._rank_states(), self.workers.exits()
        self.survivors.keep(self.workers)
        context = self._exit_context(exits)
        first = root_cause(failures_of(polled.document))
        message = "another node of the group is lost"
        if first is not None:
            message = f"the group has failed on another node: {first.message}"
        log.warn("node-lost", message=message)
        secondary = secondary_failures(context, message)
        ended = self._group_result(exits)
        recorded = recorded_failures(context)
        failures = {**secondary, **recorded, **ended.failures}
        return replace(
            ended, failures=failures, rank_states=rank_states, kept=dict(self.survivors.kept)
        )

    def _end_by_force(self) -> GroupResult:
        exits = self.workers.exits()
        self.workers.kill()
        return GroupResult(outcomes=self._group_result(exits).outcomes, exits=exits, forced=True)

    def _group_result(self, exits: dict[int, int]) -> GroupResult:
        return group_result(self._exit_context(exits))

    def _failures(self, exits: dict[int, int]) -> dict[int, Failure]:
        return find_failures(self._exit_context(exits)) if exits else {}

    def _exit_context(self, exits: dict[int, int]) -> ExitContext:
        return ExitContext(
            node=self.node,
            generation=self.generation.number,
            scratch=self.scratch,
            global_ranks=self.global_ranks,
            exits=exits,
            managed=self.config.train is not None,
            terminated=self._terminated_at is not None,
            out_of_memory=self._oom_kills.explain(exits),
            snapshots=self.watchdog.snapshots,
            rules=self.config.restart.rules if self.config.restart is not None else (),
        )

    def _rank_states(self) -> list[RankState]:
        """The states of this node's ranks, now or when they exited."""
        return self.watchdog.rank_states(
            self.global_ranks, self._pids, node=self.node, nodes=len(self.generation.nodes)
        )

    def _end_desynchronized(self, mismatch: Mismatch) -> GroupResult:
        """End a group whose ranks on this node have entered different collectives."""
        rank_states, exits = self._rank_states(), self.workers.exits()
        self.workers.kill()
        step, number = self.watchdog.last_step(), self.generation.number
        failure = mismatch_failure(mismatch, node=self.node, generation=number, step=step)
        local_rank = self.global_ranks.index(mismatch.ranks[0]) if mismatch.ranks else 0
        return GroupResult(failures={local_rank: failure}, exits=exits, rank_states=rank_states)

    def _end_hung(self, stalled: list[int]) -> GroupResult:
        """End a group whose local ranks `stalled` hang; finds the rank at fault."""
        rank_states = self._rank_states()
        rank_at_fault = find_hung_rank(
            gather_rank_states(self.agent_store, self.generation, self.node, rank_states)
        )
        stacks = dump_stacks(
            {number: self._pids[number] for number in stalled if number in self.workers.living},
            {number: stacks_path(self.scratch, number) for number in stalled},
        )
        exits = self.workers.exits()
        self.workers.kill()
        snapshots = self.watchdog.snapshots
        failures = hang_failures(
            {number: (self.global_ranks[number], snapshots[number]) for number in stalled},
            rank_at_fault=rank_at_fault,
            node=self.node,
            generation=self.generation.number,
            stacks=stacks,
        )
        for local_rank, failure in failures.items():
            if failure.primary:
                self.telemetry.hang(
                    failure,
                    phase=snapshots[local_rank].phase.value,
                    stacks=str(stacks_path(self.scratch, local_rank)),
                )
        return GroupResult(failures=failures, exits=exits, rank_states=rank_states)
