"""The termination policy: decides, after a worker group exits, whether to re-rendezvous or to end
the run.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

from torch.distributed.elastic.rendezvous.api import RendezvousError

from kdist_trainer import log
from kdist_trainer.agent import restart_policy
from kdist_trainer.agent.coordination import AgentStore, failures_of
from kdist_trainer.agent.desync import find_odd, format_collectives
from kdist_trainer.agent.exit_analysis import GroupResult
from kdist_trainer.agent.exit_record import (
    RunOutcome,
    failed,
    read_done,
    root_cause,
    stopped,
    success,
)
from kdist_trainer.agent.hang_detection import gather_rank_states, resolve_root_cause
from kdist_trainer.agent.monitor import STOP
from kdist_trainer.agent.restart_policy import Generation, RestartLedger
from kdist_trainer.agent.settings import Settings
from kdist_trainer.agent.telemetry import AgentTelemetry
from kdist_trainer.config import Cause, Exit
from kdist_trainer.errors import Failure
from kdist_trainer.rendezvous.handler import Rendezvous
from kdist_trainer.result import DONE
from kdist_trainer.signals import StopSignals

SETTLE_SECONDS = 0.3
"""How long a failure that would end the job waits for word of an earlier one elsewhere."""
_POLL_SECONDS = 0.1


class TerminationPolicy:
    """Decides, after a worker group exits, whether to re-rendezvous or to end the run. `draw`
    returns for a new rendezvous and raises `RunOutcome` otherwise.
    """

    def __init__(
        self,
        settings: Settings,
        exchange: AgentStore,
        rendezvous: Rendezvous,
        teller: AgentTelemetry,
        book: RestartLedger,
        stop: StopSignals,
    ) -> None:
        self._settings = settings
        self._exchange = exchange
        self._rendezvous = rendezvous
        self._teller = teller
        self._book = book
        self._stop = stop

    def draw(self, generation: Generation, end: GroupResult) -> None:
        """Record the result of the worker group and decide."""
        for outcome in end.outcomes.values():
            self._teller.rank_ended(outcome)
        for local_rank, failure in end.failures.items():
            self._teller.rank_failed(failure, end.exits.get(local_rank))
        decisive = root_cause(end.failures.values())
        try:
            decisive = self._confer(generation, end, decisive)
        except RuntimeError as error:
            managed = self._settings.config.train is not None
            over = (
                managed
                and not end.failures
                and bool(end.outcomes)
                and self._all_done(generation, end)
            )
            if not (over or self._stop.requested):
                raise
            log.warn(
                "rendezvous-unreachable",
                message=f"the others cannot be told that this node ends: {error}",
            )
            if over:  # all have met at a barrier, so the others know
                self._finish_now(None)
        if self._stop.requested:
            self.leave()
            # asked to save, which the disk refused
            if decisive is not None and decisive.code is Exit.STORAGE:
                raise RunOutcome(failed(decisive))
            saved = bool(end.outcomes) and not end.forced and not end.failures
            step = self._book.committed_step() if saved else 0
            raise RunOutcome(
                stopped(
                    "stopped on request" if saved else "stopped on request, in the middle of work",
                    step=step or None,
                )
            )
        if decisive is not None:
            self._teller.group_failed(decisive.cause)
        elif self._all_done(generation, end):
            self._finish(generation)
        else:
            # somebody asked the ranks to stop: that is no failure
            self._exchange.plan(generation.number, STOP)
            self._teller.state("restarting")

    def _confer(
        self, generation: Generation, end: GroupResult, decisive: Failure | None
    ) -> Failure | None:
        """Post the failure to the other agents, and end with them if a failure has ended the run;
        returns the failure that decides.
        """
        if end.failures:
            self._exchange.post_failures(
                generation.number, list(end.failures.values()), notes=end.notes
            )
        self._end_if_over()
        if decisive is None:
            return None
        if decisive.permanent:
            decisive = self._settle_on(generation.number, decisive)
        if end.notes and (decisive.permanent or decisive.code is Exit.HANG or find_odd(end.notes)):
            decisive = self._weigh(generation, end, decisive)
        if decisive.permanent:
            self._end_failed(decisive)
        return decisive

    def _weigh(self, generation: Generation, end: GroupResult, failure: Failure) -> Failure:
        """The failure that decides once all agents have posted the states of their ranks; posted if
        it is another one.
        """
        notes = gather_rank_states(
            self._exchange, generation, self._settings.node, end.notes, after_failures=True
        )
        weighed = resolve_root_cause(failure, notes)
        if weighed != failure and not weighed.permanent:
            self._exchange.post_failures(generation.number, [weighed])
        return replace(weighed, collectives=format_collectives(notes))

    def _end_if_over(self) -> None:
        """End if the run has ended, whatever the result here."""
        done = self._read_done()
        if done is not None:
            self._finish_now(done.get("step"))
        verdict = self._exchange.verdict()
        if verdict:
            raise RunOutcome(verdict)

    def _settle_on(self, number: int, failure: Failure) -> Failure:
        """The failure that decides over all agents, after a short wait for earlier ones to be
        posted.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            first = (
                root_cause([failure, *failures_of(self._exchange.generation(number))]) or failure
            )
            if not first.permanent or time.monotonic() > deadline:
                return first
            time.sleep(_POLL_SECONDS)

    def _end_failed(self, failure: Failure) -> NoReturn:
        record = failed(failure)
        final = self._settle(record)
        if final == record:
            self._book.note_failure(failure)
            self._book.note(
                "failed",
                cause=failure.cause.value,
                code=int(failure.code),
                message=failure.message[:500],
            )
        self._close()
        raise RunOutcome(final)

    def end_spent(self, generation: Generation) -> NoReturn:
        """End all agents because the restart budget is used up."""
        budget = self._settings.config.max_restarts
        message = (
            f"{budget} restarts without progress are spent; the last failure: {generation.message}"
        )
        if generation.same >= restart_policy.MOST:
            message = (
                f"the same failure {generation.same} times in a row without progress: "
                f"{generation.message}"
            )
        document = self._exchange.generation(generation.number - 1)
        last = root_cause(failures_of(document))
        failure = Failure(
            Cause.BUDGET,
            Exit.BUDGET,
            True,
            message,
            generation=generation.number - 1,
            time=time.time(),
        )
        if last is not None:
            known = format_collectives(
                note for notes in document.get("beats", {}).values() for note in notes
            )
            failure = replace(
                last,
                cause=Cause.BUDGET,
                code=Exit.BUDGET,
                primary=True,
                message=message,
                collectives=known,
            )
        record = failed(failure)
        final = self._settle(record)
        if final == record:
            self._book.note(
                "failed", cause=Cause.BUDGET.value, code=int(Exit.BUDGET), message=message[:500]
            )
        self._close()
        raise RunOutcome(final)

    def final_record(self) -> dict[str, Any]:
        """The exit record of a run whose rendezvous is closed."""
        verdict = self._exchange.verdict()
        if verdict:
            return verdict
        done = self._read_done()
        if done is not None:
            return success(step=done.get("step"))
        message = "the rendezvous was closed and nobody said why"
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

    def _all_done(self, generation: Generation, end: GroupResult) -> bool:
        if end.forced or any(outcome != DONE for outcome in end.outcomes.values()):
            return False
        if self._settings.config.train is not None:
            return True
        # A script that stops on request also ends with 0, on nodes that heard of the request from
        # their peers alone.
        return "plan" not in self._exchange.generation(generation.number)

    def _finish(self, generation: Generation) -> None:
        """This node is done. A managed training has passed a barrier; scripts may still run on
        other nodes.
        """
        if self._settings.config.train is not None or self._wait_for_others(generation):
            self._finish_now(None)
        self._teller.state("restarting")

    def _wait_for_others(self, generation: Generation) -> bool:
        """Wait for the other nodes' scripts; False if not all succeed, so that all restart."""
        document = self._exchange.finish(generation.number)
        while len(document.get("finished", [])) < len(generation.nodes):
            self._end_if_over()
            if self._stop.requested:
                self.leave()
                raise RunOutcome(
                    stopped("stopped on request, waiting for other nodes to finish", step=None)
                )
            members = self._rendezvous.members()
            if document.get("failures") or "plan" in document or members < len(generation.nodes):
                log.warn(
                    "peers-not-finished", message="other nodes did not finish: all begin again"
                )
                return False
            time.sleep(_POLL_SECONDS)
            document = self._exchange.generation(generation.number)
        return True

    def _finish_now(self, step: int | None) -> NoReturn:
        done = self._read_done()
        final = self._settle(success(step=step if done is None else done.get("step")))
        self._close()
        raise RunOutcome(final)

    def _settle(self, record: dict[str, Any]) -> dict[str, Any]:
        """End the run for all agents; returns its exit record, which is this one if the store stays
        unreachable.
        """
        try:
            return self._exchange.settle(record)
        except RuntimeError as error:
            log.warn(
                "rendezvous-unreachable",
                message=f"the others cannot be told how the run ended: {error}",
            )
            return record

    def _read_done(self) -> dict[str, Any] | None:
        return read_done(
            self._settings.checkpoints, self._settings.config, run_id=self._settings.run_id
        )

    def _close(self) -> None:
        with suppress(RendezvousError):
            self._rendezvous.set_closed()

    def leave(self) -> None:
        """Leave the rendezvous, so that the others need not wait for a timeout."""
        with suppress(RendezvousError, RuntimeError):
            self._rendezvous.leave()
