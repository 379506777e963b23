"""The termination policy: decides, after a worker group exits, whether to re-rendezvous or to end
the run.

If the node joins no further group, because it was asked to stop or too few nodes have come, one of
the workers that have left their group with the training in memory forms a group alone, in a
generation of its own, saves and ends (`save_kept_state`). The agents agree on that generation by
compare-and-set. If the others have begun it, they continue with the state, and there is nothing to
save here; if they form a group later, they take the lock of the checkpoint folder over, as after
any other generation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousError

from kdist_trainer import log
from kdist_trainer.agent import exits
from kdist_trainer.agent.coordination import (
    NOTHING_KEPT,
    RESUME,
    STOP,
    AgentStore,
    FinishExchange,
    Generation,
    failures_of,
)
from kdist_trainer.agent.exits import (
    GroupResult,
    RunOutcome,
    failed,
    find_early_exit,
    root_cause,
    stopped,
    success,
)
from kdist_trainer.agent.hangs import (
    find_mismatch,
    format_collectives,
    gather_rank_states,
    resolve_root_cause,
)
from kdist_trainer.agent.monitor import AgentTelemetry
from kdist_trainer.agent.restart_policy import RestartLedger, end_for_good, final_failure
from kdist_trainer.agent.settings import Settings
from kdist_trainer.agent.worker_group import Survivors, WorkerProcesses
from kdist_trainer.config import Cause, Exit
from kdist_trainer.ipc import result
from kdist_trainer.ipc.control import (
    STOPS_VARIABLE,
)
from kdist_trainer.ipc.failure import Failure
from kdist_trainer.ipc.failure import read as read_failure
from kdist_trainer.ipc.result import DONE
from kdist_trainer.processes.signals import StopSignals, kill_deadline
from kdist_trainer.rendezvous.handler import Rendezvous
from kdist_trainer.rendezvous.stores import StoreRefusedError

EARLIER_FAILURE_SECONDS = 0.3
"""How long a permanent failure waits for an earlier one of another node to be posted."""
REFUSED_SECONDS = 2.0
"""How long an API server may refuse what an agent has to tell the others at the end."""
_POLL_SECONDS = 0.1
_SAVE_POLL_SECONDS = 0.05


class TerminationPolicy:
    """Decides, after a worker group exits, whether to re-rendezvous or to end the run. `save_kept`
    saves what this node's workers have kept of a broken group; returns the outcome, or None if
    nothing was saved.
    """

    def __init__(
        self,
        settings: Settings,
        agent_store: AgentStore,
        rendezvous: Rendezvous,
        telemetry: AgentTelemetry,
        ledger: RestartLedger,
        stop: StopSignals,
        save_kept: Callable[[], str | None],
    ) -> None:
        self._settings = settings
        self._agent_store = agent_store
        self._rendezvous = rendezvous
        self._telemetry = telemetry
        self._ledger = ledger
        self._stop = stop
        self._save_kept = save_kept
        self._single_start = ledger.single_start

    def decide(self, generation: Generation, result: GroupResult) -> None:
        """Record the result of the worker group on this node and decide; returns if the agents
        shall rendezvous again. Raises `RunOutcome` if the run has ended.
        """
        self._telemetry.group_ended(result.outcomes.values(), is_kept=bool(result.kept))
        for local_rank, failure in result.failures.items():
            if local_rank not in result.kept:
                self._telemetry.rank_failed(failure, result.exits.get(local_rank))
        early = find_early_exit(result.early, result.failures.values())
        cause = early or root_cause(result.failures.values())
        is_end = result.is_done if cause is None else cause.permanent
        self._agent_store.limit_refusals(REFUSED_SECONDS if is_end else math.inf)
        try:
            cause = self._share_failures(generation, result, cause)
        except RuntimeError as error:
            self._handle_lost_store(error, generation, result, cause)
        # what came first: a signal while the ranks save at the deadline changes nothing
        is_late = generation.is_past_deadline(self._settings.config, at=self._stop.requested_at)
        if is_late and not result.is_done:
            self._end_at_deadline(generation, result)
        if self._stop.requested:
            self._end_stopped(result, cause)
        if cause is not None:
            self._telemetry.group_failed(cause)
        elif self._all_done(generation, result):
            # a managed training has passed a barrier; scripts may still run on other nodes
            if self._settings.config.train is not None or self._wait_for_others(generation, result):
                self._finish_now(None, result)
            self._telemetry.state("restarting")
        else:
            # the ranks were asked to stop: that is no failure
            self._agent_store.plan_stop(generation.number, STOP)
            self._telemetry.state("restarting")

    def _handle_lost_store(
        self,
        error: RuntimeError,
        generation: Generation,
        result: GroupResult,
        cause: Failure | None,
    ) -> None:
        """Raise `error` again unless this node can end without the store."""
        is_refused = isinstance(error, StoreRefusedError)
        if is_refused and cause is not None and cause.permanent and not self._stop.requested:
            self._end_failed(cause)
        managed = self._settings.config.train is not None
        succeeded = not result.failures and result.is_done
        if succeeded and not managed:
            is_alone = is_refused and not self._stop.requested
            succeeded = is_alone and self._wait_for_others(generation, result)
        if not (succeeded or self._stop.requested):
            raise error
        log.warn(
            "rendezvous-refused" if is_refused else "rendezvous-unreachable",
            message=f"the other nodes cannot be notified that this node ends: {error}",
        )
        if succeeded:
            self._finish_now(None, result)  # the other nodes know: all ranks have passed a barrier

    def _end_stopped(self, result: GroupResult, cause: Failure | None) -> NoReturn:
        """End this agent after a request to stop."""
        if result.kept and (cause is None or cause.code is not Exit.STORAGE):
            raise RunOutcome(stopped("stopped on request", step=self.leave_and_save()))
        self.leave()
        # the workers were asked to save, and the disk refused
        if cause is not None and cause.code is Exit.STORAGE:
            raise RunOutcome(failed(cause))
        saved = bool(result.outcomes) and not result.forced and not result.failures
        step = self._ledger.committed_step() if saved else 0
        message = "stopped on request" if saved else "stopped on request, in the middle of work"
        raise RunOutcome(stopped(message, step=step or None))

    def _share_failures(
        self, generation: Generation, result: GroupResult, cause: Failure | None
    ) -> Failure | None:
        """Post this node's failures to the other agents, and end with them if the run has ended or
        the failure is permanent; returns the root cause over all nodes.
        """
        states = result.rank_states
        step = max(result.kept.values(), default=NOTHING_KEPT)
        if result.failures:
            posted = list(result.failures.values())
            if cause is not None and cause not in posted:
                posted.append(cause)
            self._agent_store.post_failures(
                generation.number, posted, rank_states=states, kept_step=step
            )
        elif step > NOTHING_KEPT:
            self._agent_store.post_kept_step(generation.number, step)
        self._end_if_over()
        if cause is None:
            return None
        if cause.permanent:
            cause = self._wait_for_earlier_failure(generation.number, cause)
        if states and (cause.permanent or cause.code is Exit.HANG or find_mismatch(states)):
            # once all agents have posted the states of their ranks
            every = gather_rank_states(
                self._agent_store, generation, self._settings.node, states, after_failures=True
            )
            resolved = resolve_root_cause(cause, every)
            if resolved != cause and not resolved.permanent:
                self._agent_store.post_failures(generation.number, [resolved])
            cause = replace(resolved, collectives=format_collectives(every))
        if cause.permanent:
            self._end_failed(cause)
        if self._single_start.applies and not self._stop.requested:
            # the run ends if its script is not started again
            failure = self._single_start.find_end(
                cause,
                others=[node for node in generation.nodes if node != self._settings.node],
                committed=self._ledger.committed_step(),
                read=lambda: self._agent_store.generation(generation.number),
                status=self._rendezvous.status,
            )
            if failure is not None and not self._stop.requested:
                self._end_failed(failure)
        return cause

    def _end_if_over(self) -> None:
        """End if the run has ended, whatever the result on this node."""
        done = self._read_done()
        if done is not None:
            self._finish_now(done.get("step"))
        record = self._agent_store.run_result()
        if record:
            raise RunOutcome(record)

    def _wait_for_earlier_failure(self, number: int, failure: Failure) -> Failure:
        """The root cause over all agents, after a short wait for earlier failures to be posted."""
        deadline = time.monotonic() + EARLIER_FAILURE_SECONDS
        while True:
            first = (
                root_cause([failure, *failures_of(self._agent_store.generation(number))]) or failure
            )
            if not first.permanent or time.monotonic() > deadline:
                return first
            time.sleep(_POLL_SECONDS)

    def _end_failed(self, failure: Failure, *, is_new: bool = True) -> NoReturn:
        """End all agents with this failure; `is_new` if the ledger does not have it yet."""
        record = failed(failure)
        final = self._commit_result(record)
        if final == record:
            if is_new:
                self._ledger.append_failure(failure)
            self._ledger.append_event(
                "failed",
                cause=failure.cause.value,
                code=int(failure.code),
                message=failure.message[:500],
                signature=failure.signature,
                fault=failure.fault.value,
                advice=failure.advice[:500],
                rerun=failure.rerun.value,
            )
        self._close()
        raise RunOutcome(final)

    def _end_at_deadline(self, generation: Generation, result: GroupResult) -> NoReturn:
        """End all agents, since the job has been active for as long as it may be."""
        if result.kept:
            self.leave_and_save()
        step = self._ledger.committed_step()
        message = (
            "the job was active longer than activeDeadlineSeconds "
            f"({self._settings.config.active_deadline_seconds} s)"
        )
        message += f"; step {step} is saved" if step else ""
        failure = Failure.of_node(
            Cause.DEADLINE, Exit.BUDGET, message, generation=generation.number
        )
        self._end_failed(failure)

    def end_exhausted(self, generation: Generation) -> NoReturn:
        """End all agents because the restart budget is exhausted, or one failure repeats."""
        message = generation.over
        if full := self._telemetry.find_full(has="had"):
            message = f"{message}; {full}"
        document = self._agent_store.generation(generation.number - 1)
        last = root_cause(failures_of(document))
        failure = Failure.of_node(
            Cause.BUDGET, Exit.BUDGET, message, generation=generation.number - 1
        )
        if generation.refusal:
            known = last if last is not None and last.primary else failure
            cause = Cause(generation.cause or Cause.UNKNOWN)
            known = replace(known, cause=cause, message=generation.message)
            failure = end_for_good(known, generation.refusal)
        else:
            states = [state for node in document.get("rank_states", {}).values() for state in node]
            collectives = format_collectives(states)
            known = last if last is not None else failure
            failure = final_failure(known, generation, message, collectives=collectives)
        self._end_failed(failure, is_new=False)

    def final_record(self) -> dict[str, Any]:
        """The exit record of a run whose rendezvous is closed."""
        record = self._agent_store.run_result()
        if record:
            return record
        done = self._read_done()
        if done is not None:
            return success(step=done.get("step"))
        return failed(
            Failure.of_node(
                Cause.RENDEZVOUS,
                Exit.PEERS_LOST,
                "the rendezvous was closed without a result of the run",
                node=self._settings.node,
            )
        )

    def _all_done(self, generation: Generation, result: GroupResult) -> bool:
        if not result.is_done:
            return False
        if self._settings.config.train is not None:
            return True
        # A script that stops on request exits with 0 too, also on nodes whose ranks got the request
        # from their peers only.
        return "planned_stop" not in self._agent_store.generation(generation.number)

    def _wait_for_others(self, generation: Generation, result: GroupResult) -> bool:
        """Wait for the other nodes' scripts; False if not all succeed, so that all restart."""
        number, nodes = generation.number, generation.nodes
        exchange = FinishExchange(self._rendezvous, self._settings.node, nodes)
        read = self._agent_store.mark_finished
        while not exchange.all_finished():
            try:
                document = read(number)
                if len(document.get("finished", [])) >= len(nodes):
                    return True
                read = self._agent_store.generation
                self._end_if_over()
                has_lost_nodes = self._rendezvous.count_members() < len(nodes)
            except StoreRefusedError:
                document, has_lost_nodes = {}, exchange.has_lost_members()
            except RendezvousError:
                has_lost_nodes = False  # the next read waits until it can be known
            if self._stop.requested:
                self.leave()
                raise RunOutcome(
                    stopped("stopped on request, waiting for other nodes to finish", step=None)
                )
            if document.get("failures") or "planned_stop" in document or has_lost_nodes:
                message = "other nodes did not finish: all restart"
                known = [] if "planned_stop" in document else failures_of(document)
                if (early := find_early_exit(result.early, known)) is not None:
                    message = f"{early.message}: all restart"
                    self._telemetry.rank_failed(early, 0)
                    with suppress(RuntimeError):  # the others know of their own failures
                        self._agent_store.post_failures(early.generation, [early])
                log.warn("peers-not-finished", message=message)
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _finish_now(self, step: int | None, result: GroupResult | None = None) -> NoReturn:
        done = self._read_done()
        step = step if done is None else done.get("step")
        ranks = self._telemetry.count_separate(is_known=result is not None and result.separate)
        final = self._commit_result(success(step=step, separate_ranks=ranks))
        if ranks:
            self._ledger.append_event("separate-ranks", ranks=ranks)
        self._close()
        raise RunOutcome(final)

    def _commit_result(self, record: dict[str, Any]) -> dict[str, Any]:
        """End the run for all agents; returns its exit record, which is `record` if the store is
        unreachable.
        """
        try:
            return self._agent_store.commit_result(record)
        except RuntimeError as error:
            log.warn(
                "rendezvous-unreachable",
                message=f"the other nodes cannot be notified of the result of the run: {error}",
            )
            return record

    def _read_done(self) -> dict[str, Any] | None:
        return self._ledger.read_done(self._settings)

    def _close(self) -> None:
        with suppress(RendezvousError):
            self._rendezvous.set_closed()

    def leave_and_save(self) -> int | None:
        """Leave the rendezvous, and save what this node's workers have kept of a broken group.
        Returns the step of the newest checkpoint; None if nothing was saved. Raises `RunOutcome` if
        that was the last step of the run.
        """
        self.leave()
        outcome = self._save_kept()
        if outcome == DONE:
            self._finish_now(None)
        return self._ledger.committed_step() if outcome is not None else None

    def leave(self) -> None:
        """Leave the rendezvous, so that the other nodes need not wait for a timeout."""
        with suppress(RendezvousError, RuntimeError):
            self._rendezvous.leave()


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
    """Have the worker that has kept the newest step save it, and wait until it has ended. The
    workers have left the generation `former`. The grace period counts from the first request to
    stop, and a second one ends the wait. Returns "stopped", or "done" if the step was the last one;
    None if nothing was saved.
    """
    survivors.forget_exited(workers)
    step = survivors.finished_step
    if step is None or settings.checkpoints is None:
        return None
    try:
        number = open_generation(
            former, agent_store, ledger, agents=agents, step=step, is_asked=stop.requested
        )
        exits.reset_files(settings.scratch, len(workers.local_ranks))
    except (dist.DistError, RuntimeError, OSError) as refusal:
        warn_unsaved(step, str(refusal), ledger)
        return None
    local_rank = next(number for number, kept in survivors.kept.items() if kept == step)
    log.event("saving-kept-state", step=step, generation=number)
    # the environment of a rank that is alone in its group, and is to stop
    ranks = ("RANK", "GROUP_RANK", "ROLE_RANK")
    sizes = ("WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
    survivors.join_alone(
        workers,
        local_rank,
        {
            **dict.fromkeys(ranks, "0"),
            **dict.fromkeys(sizes, "1"),
            "KDIST_GENERATION": str(number),
            STOPS_VARIABLE: "1",
        },
    )
    since = time.monotonic() if stop.requested_at is None else stop.requested_at
    deadline = kill_deadline(since, settings.config.termination_grace_period_seconds)
    while local_rank in workers.living:
        if time.monotonic() > deadline or stop.urgent:
            why = "a second request to stop came" if stop.urgent else "the grace period was over"
            warn_unsaved(step, why, ledger)
            return None
        workers.wait(_SAVE_POLL_SECONDS)
    outcome = result.read_result(settings.scratch, local_rank)
    if outcome is None:
        error = read_failure(settings.scratch, local_rank)
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
    is_asked: bool,
) -> int:
    """Open the generation of the save of `step`, after generation `former`; returns its number.
    Only after a stop that somebody `is_asked` for may the job be active for its whole time again.
    Raises `RuntimeError` if other agents have begun the generation after `former`.
    """
    number = former + 1
    document = agent_store.generation(former)
    newest = max(step, document.get("kept_step", 0))
    agent_store.open_generation(
        number,
        agents,
        active_since=document.get("active_since", 0.0),
        agents_before=document.get("agents", {}),
    )
    agent_store.plan_stop(number, STOP if is_asked else RESUME)
    agent_store.post_kept_step(number, newest)
    ledger.append_generation(
        Generation(number, RESUME, sorted(agents), from_step=step, kept_step=step), world_size=1
    )
    return number
