"""Reports the agent's state and events, to the log and to the metrics exporter."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kdist_trainer import log
from kdist_trainer.agent.exit_analysis import signal_name
from kdist_trainer.agent.restart_policy import FAILURE, Generation
from kdist_trainer.errors import Failure

if TYPE_CHECKING:
    from kdist_trainer.agent.log_relay import LogRelay
    from kdist_trainer.metrics.exporter import Exporter


class AgentTelemetry:
    """Reports each event once, to the log and the exporter. `max_restarts` is the job's budget;
    `managed` distinguishes a managed training from a script.
    """

    def __init__(
        self, exporter: Exporter, relay: LogRelay, *, max_restarts: int, managed: bool = True
    ) -> None:
        self._exporter = exporter
        self._relay = relay
        self._max_restarts = max_restarts
        self._managed = managed
        self._waiting_since = time.monotonic()

    def state(self, word: str) -> None:
        """Set the state of the agent."""
        self._exporter.set_state(word)

    def rendezvous_started(self) -> None:
        self._waiting_since = time.monotonic()
        self.state("rendezvous")
        log.event("rendezvous-started")

    def rendezvous_ended(self, outcome: str) -> None:
        """Count a rendezvous: `formed`, `timeout` or `failed`."""
        self._exporter.observe_rendezvous(time.monotonic() - self._waiting_since, outcome)

    def group_formed(
        self, generation: Generation, *, world_size: int, ranks: list[int], leader: bool
    ) -> None:
        """A group has formed and its workers start. `ranks` are this node's."""
        self.state("initializing")
        self._relay.begin(ranks)
        self._exporter.set_group(
            generation=generation.number, world_size=world_size, local_ranks=ranks
        )
        self._exporter.set_restarts_remaining(
            max(0, self._max_restarts - generation.restarts), budget=self._max_restarts
        )
        if leader and generation.lost_steps:
            self._exporter.add_lost_steps(generation.lost_steps)
        log.bind(generation=generation.number)
        if generation.reason == FAILURE:
            fields = {
                "restarts": generation.restarts,
                "budget": self._max_restarts,
                "cause": generation.cause,
            }
            if not generation.from_step and not self._managed:
                fields["message"] = (
                    "the script starts again from the beginning: kdist knows of no "
                    "checkpoint that it saves"
                )
            log.warn("restarting", **fields)
        log.event(
            "rendezvous-completed",
            world_size=world_size,
            nodes=len(generation.nodes),
            reason=generation.reason,
        )

    def rank_started(self, rank: int, pid: int) -> None:
        log.event("worker-started", rank=rank, pid=pid)

    def rank_ended(self, outcome: str) -> None:
        """A worker ended well: `done` or `stopped`."""
        self._exporter.add_worker_exit(outcome, None)

    def rank_failed(self, failure: Failure, exit_code: int | None) -> None:
        """A worker failed; `exit_code` is its process's, None if the agent killed it."""
        name = None if exit_code is None else signal_name(exit_code)
        op = (failure.collective or "").partition("(")[0]
        self._exporter.add_worker_exit(failure.cause, name, collective=op)
        tell = log.error if failure.primary else log.warn
        tell(
            "worker-failed",
            cause=failure.cause,
            rank=failure.rank,
            step=failure.step,
            signal=name,
            code=exit_code if name is None else None,
            message=failure.message,
            primary=failure.primary,
        )

    def group_failed(self, cause: str) -> None:
        """The group ended by a failure; whether it restarts is decided later."""
        self.state("restarting")
        self._exporter.add_restart(cause)

    def hang(self, failure: Failure, *, phase: str, stacks: str) -> None:
        self.state("hung")
        log.error(
            "hang",
            rank=failure.rank,
            step=failure.step,
            phase=phase,
            collective=failure.collective,
            stacks=stacks,
        )
