"""Supervises the workers of one generation on this node, from their start until all of them have
exited.

The monitor detects exits, hangs, desynchronized collectives, lost nodes and requests to stop, and
returns the result of the worker group. torch elastic's counterpart is the loop of `_invoke_run`.

A node that is lost, such as by a power cut, falls silent: it closes no connection, so that a
collective waits for its timeout, and torch's connect for ever. The rendezvous and the generation's
document are polled in a background thread, so that a slow or unreachable store never blocks the
monitor's loop. Nor does the loop end when the process has no file descriptor left: it repeats the
pass.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from kdist_trainer import log
from kdist_trainer.agent import exit_analysis
from kdist_trainer.agent.coordination import (
    JOIN,
    RENEW,
    STOP,
    AgentStore,
    Document,
    Generation,
    failures_of,
)
from kdist_trainer.agent.exit_analysis import GroupResult
from kdist_trainer.agent.exit_record import root_cause
from kdist_trainer.agent.hangs import (
    DesyncDetector,
    Mismatch,
    RankState,
    Watchdog,
    dump_stacks,
    find_hung_rank,
    gather_rank_states,
    hang_failures,
    mismatch_failure,
    read_or_empty,
)
from kdist_trainer.agent.survivors import Survivors, can_keep_workers
from kdist_trainer.agent.telemetry import AgentTelemetry
from kdist_trainer.agent.workers import WorkerProcesses
from kdist_trainer.config import TrainConfig
from kdist_trainer.instrumentation.fault_handler import stacks_path
from kdist_trainer.ipc import result
from kdist_trainer.ipc.failure import Failure
from kdist_trainer.processes.descriptors import EXHAUSTED
from kdist_trainer.processes.liveness import Phase
from kdist_trainer.processes.signals import StopSignals, stop_margin
from kdist_trainer.processes.threads import OnError, start_thread
from kdist_trainer.rendezvous.handler import SILENCE_SECONDS
from kdist_trainer.rendezvous.state import RendezvousStatus
from kdist_trainer.rendezvous.stores import StoreRefusedError

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


WAIT_SECONDS = 5.0
"""How long all ranks of this node must have waited in one collective before a silent node counts as
lost: an agent may pause, or be cut off from the store, while its ranks run.
"""
SILENT_SECONDS = 2.0
"""How long a node must have missed its keep-alives, in addition, before it counts as lost."""
SCRIPT_SILENT_SECONDS = 30.0
"""The same for scripts: their ranks may wait in a barrier for minutes on purpose."""
_WAIT_FACTOR = 2.0
"""How much longer the wait must be than the longest completed one."""


class NodeLossDetector:
    """Watches the other nodes of one generation.

    Args:
        config: The configuration of the job.
        generation: The generation.
        watchdog: Knows how long the ranks of this node have been waiting.
        has_silent_members: Whether a member is silent, by the members' connections. It counts only
            if the others can continue in place without it: then a node that was only slow returns
            at little cost.
    """

    def __init__(
        self,
        config: TrainConfig,
        generation: Generation,
        watchdog: Watchdog,
        has_silent_members: Callable[[], bool],
    ) -> None:
        self._watchdog = watchdog
        self._least_seconds = SILENT_SECONDS if config.train is not None else SCRIPT_SILENT_SECONDS
        self._hang_seconds = config.hang_timeout_seconds
        fewest, _ = generation.bounds
        self._can_do_without = can_keep_workers(config) and fewest < len(generation.nodes)
        self._has_silent_members = has_silent_members
        self._silent_since: float | None = None

    def is_lost(self, status: RendezvousStatus) -> bool:
        """Whether a node is lost, given the latest state of the rendezvous."""
        is_silent = self._can_do_without and self._has_silent_members()
        if is_silent and self._has_waited(SILENCE_SECONDS):
            return True
        now, watchdog = time.monotonic(), self._watchdog
        missing = status.silent or status.left
        self._silent_since = (self._silent_since or now) if missing else None
        if self._silent_since is None:
            return False
        silent = now - self._silent_since
        if silent > self._hang_seconds and watchdog.has_no_heartbeats():
            return True
        return silent > self._least_seconds and self._has_waited(WAIT_SECONDS)

    def _has_waited(self, seconds: float) -> bool:
        """Whether the ranks of this node have waited so long in one collective."""
        least = max(seconds, _WAIT_FACTOR * self._watchdog.longest_wait)
        return self._watchdog.waited_seconds() > least


@dataclass(frozen=True)
class PollResult:
    """The state of the rendezvous, and the generation's document, which is read after it: an agent
    that leaves on purpose writes the document first.
    """

    status: RendezvousStatus = field(
        default_factory=lambda: RendezvousStatus(
            waiting=0, vacant=0, left=0, silent=0, closed=False
        )
    )
    document: Document = field(default_factory=dict)


def warn_of(error: Exception) -> None:
    """Log that the rendezvous cannot be read, or that the API server refuses it."""
    reason = error.__cause__ or error  # torch's own message does not say why
    if isinstance(reason, StoreRefusedError):
        message = f"the workers go on, and no other group can form after this one: {reason}"
        log.warn("rendezvous-refused", message=message)
    else:
        log.warn("rendezvous-unreachable", message=f"the rendezvous cannot be read: {reason}")


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
        self._oom_kills = exit_analysis.OomKills()
        self._terminated_at: float | None = None
        self._joining_since: float | None = None
        self._left_since: float | None = None
        self._node_loss = NodeLossDetector(
            self.config, self.generation, self.watchdog, self.has_silent_members
        )
        self._secondary_since: float | None = None
        self._kill_at = math.inf
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
        polled = self._read_poll()
        if self._has_failed_elsewhere(polled) or self._has_lost_a_node(polled):
            return self._end_after_peer_failure(polled)
        if self._apply_status(polled.status):
            return self._end_on_purpose(JOIN)
        renews = self.survivors.need_renewal(self.workers, self.watchdog.snapshots, self.generation)
        if renews and self._terminated_at is None:
            return self._end_on_purpose(RENEW)
        if time.monotonic() > self._kill_at or self.stop.urgent:
            return self._end_by_force()
        return self._end_unconnected() if self._cannot_hear() else None

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
                warn_of(error)
                self._unreachable_since = time.monotonic()
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
        """End the workers if the run is over, nodes want to join, or nodes have left.

        Returns:
            Whether nodes want to join and the workers can leave their group at once.
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
        """The run is over: kill the workers after a failure, let them finish after a success."""
        code = read_or_empty(self.agent_store.run_result).get("code")
        if code is not None:
            grace = self.config.termination_grace_period_seconds if code == 0 else 0
            self._kill_at = min(self._kill_at, time.monotonic() + grace)

    def _terminate(self, reason: str | None, *, since: float) -> None:
        """Send SIGTERM to the workers, once.

        Args:
            reason: The reason of the planned stop, which keeps the workers' exit from being a
                failure; None if the stop is not planned.
            since: The monotonic time at which the grace period began.
        """
        self._terminated_at = time.monotonic()
        if reason == STOP:  # before the request to a store that may be slow
            self.workers.signal(signal.SIGTERM)
        if reason is not None:
            plan, number = self.agent_store.plan_stop, self.generation.number
            read_or_empty(lambda: plan(number, reason, rank_states=self._rank_states()))
        if reason != STOP:
            self.workers.signal(signal.SIGTERM)
        grace = self.config.termination_grace_period_seconds
        self._kill_at = since + grace - stop_margin(grace)

    def _cannot_hear(self) -> bool:
        """Whether workers that were asked to stop are inside torch's connect, and cannot react."""
        is_asked = self._terminated_at is not None and self.config.train is not None
        return is_asked and self._is_connecting()

    def _end_unconnected(self) -> GroupResult:
        """End a group that has not met yet; what workers have kept of the former one, they keep."""
        if self.generation.kept_step is None:
            return self._end_by_force()
        exits = self.workers.exits()
        self.survivors.keep(self.workers)
        return replace(self._group_result(exits), kept=dict(self.survivors.kept))

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
        if ended.failures or self._is_stop_planned():
            failures = ended.failures
        else:
            lost = self.survivors.why(self.workers) or "a connection to another rank is lost"
            failures = exit_analysis.secondary_failures(self._exit_context(exits), lost)
        return replace(
            ended, failures=failures, rank_states=rank_states, kept=dict(self.survivors.kept)
        )

    def _is_stop_planned(self) -> bool:
        return "planned_stop" in read_or_empty(
            lambda: self.agent_store.generation(self.generation.number)
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
        secondary = exit_analysis.secondary_failures(context, message)
        ended = self._group_result(exits)
        recorded = exit_analysis.recorded_failures(context)
        failures = {**secondary, **recorded, **ended.failures}
        return replace(
            ended, failures=failures, rank_states=rank_states, kept=dict(self.survivors.kept)
        )

    def _end_by_force(self) -> GroupResult:
        exits = self.workers.exits()
        self.workers.kill()
        return GroupResult(outcomes=self._group_result(exits).outcomes, exits=exits, forced=True)

    def _group_result(self, exits: dict[int, int]) -> GroupResult:
        return exit_analysis.group_result(self._exit_context(exits))

    def _failures(self, exits: dict[int, int]) -> dict[int, Failure]:
        return exit_analysis.failures(self._exit_context(exits)) if exits else {}

    def _exit_context(self, exits: dict[int, int]) -> exit_analysis.ExitContext:
        return exit_analysis.ExitContext(
            node=self.node,
            generation=self.generation.number,
            scratch=self.scratch,
            global_ranks=self.global_ranks,
            exits=exits,
            managed=self.config.train is not None,
            terminated=self._terminated_at is not None,
            out_of_memory=self._oom_kills.explain(exits),
            snapshots=self.watchdog.snapshots,
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
