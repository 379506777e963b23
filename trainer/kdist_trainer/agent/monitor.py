"""Supervises the workers of one generation on this node, from their start until all of them have
exited.

The monitor detects exits, hangs, desynchronized collectives, lost nodes and requests to stop, and
returns the result of the worker group. torch elastic's counterpart is the loop of `_invoke_run`.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kdist_trainer import log, result
from kdist_trainer.agent import exit_analysis
from kdist_trainer.agent.coordination import AgentStore, failures_of
from kdist_trainer.agent.desync import DesyncDetector, Mismatch, Note
from kdist_trainer.agent.exit_analysis import GroupResult
from kdist_trainer.agent.exit_record import root_cause
from kdist_trainer.agent.hang_detection import (
    Watchdog,
    dump_stacks,
    find_hung_rank,
    gather_rank_states,
    hang_failures,
    mismatch_failure,
    node_lost_failure,
    read_or_empty,
)
from kdist_trainer.agent.rendezvous_poller import PollResult
from kdist_trainer.agent.restart_policy import JOIN, Generation
from kdist_trainer.agent.telemetry import AgentTelemetry
from kdist_trainer.agent.worker_entry import stacks_path
from kdist_trainer.agent.workers import WorkerProcesses
from kdist_trainer.config import TrainConfig
from kdist_trainer.errors import Failure
from kdist_trainer.liveness import Phase
from kdist_trainer.rendezvous.handler import RendezvousStatus
from kdist_trainer.signals import StopSignals, stop_margin

TICK_SECONDS = 0.1
"""Longest pause between two looks; the end of a rank is noticed at once."""
ECHO_SECONDS = 1.0
"""How long a node that has only seen peers vanish waits for its other ranks to say why."""
LEFT_SECONDS = 5.0
"""How long ranks may go on unaware that other nodes have left their group by plan: the next
collective tells them.
"""
WAIT_SECONDS, SILENT_SECONDS = 5.0, 2.0
"""How long ranks wait in one collective, and how long another node has missed its signs of life,
before it is taken for lost: an agent may pause, or be cut off from the store, while its ranks are
well.
"""
SCRIPT_SILENT_SECONDS = 30.0
"""The same for scripts: in one barrier their ranks may rightly wait for minutes, whatever an agent
elsewhere does meanwhile.
"""
_MEETING = {Phase.START, Phase.RENDEZVOUS}
_LONGER = 2.0
"""How much longer than any wait that has come to its end."""
STOP = "stop"


@dataclass
class WorkerMonitor:
    """Monitors one worker group on this node. Errors of the store are logged and
    count as no news.
    """

    config: TrainConfig
    scratch: Path
    node: str
    generation: Generation
    global_ranks: list[int]
    ranks: WorkerProcesses
    watchdog: Watchdog
    exchange: AgentStore
    hear: Callable[[], PollResult]
    teller: AgentTelemetry
    stop: StopSignals
    alive: Callable[[], None]
    """Called at every look: the agent's own pulse."""

    def __post_init__(self) -> None:
        self._oom_kills = exit_analysis.OomKills()
        self._out_of_memory: bool | None = None  # not known before a rank was killed
        self._terminated_at: float | None = None
        self._joining_since: float | None = None
        self._left_since: float | None = None
        self._silent_since: float | None = None
        self._echoed_since: float | None = None
        self._must_end_at = math.inf
        self._begun = False
        self._running = False
        self._mute = False
        self._comparison = DesyncDetector()
        self._pids = {number: self.ranks.pid(number) for number in range(len(self.global_ranks))}

    def attend(self) -> GroupResult:
        """Monitor the workers until all have exited, by themselves or ended by the agent."""
        while True:
            self.ranks.wait(TICK_SECONDS)
            self.alive()
            stalled = self.watchdog.look()
            self._oom_kills.look()
            exits = self.ranks.exits()
            if self._failures(exits):
                return self._end_badly()
            if not self.ranks.living:
                return self._end_well()
            if stalled:
                return self._end_hanging(stalled)
            if (odd := self._comparison.look(self._notes)) is not None:
                return self._end_disagreeing(odd)
            self._note_running()
            self._pass_on_stop()
            heard = self._listen()
            if self._is_broken(heard) or self._has_lost_a_node(heard.news):
                return self._end_deserted(heard)
            self._take_news(heard.news)
            if (
                time.monotonic() > self._must_end_at
                or self.stop.urgent
                or self._has_nothing_to_save()
            ):
                return self._end_by_force()

    def _pass_on_stop(self) -> None:
        """Pass a request to stop on to the workers, once."""
        if self.stop.requested_at is None or self._terminated_at is not None:
            return
        log.event("stopping", reason="asked to stop")
        self._terminate(STOP, since=self.stop.requested_at)

    def _listen(self) -> PollResult:
        try:
            heard = self.hear()
            self._mute = False
            return heard
        except Exception as error:  # noqa: BLE001 - a store that is away says nothing, and nothing follows from that
            if not self._mute:
                log.warn(
                    "rendezvous-unreachable", message=f"the rendezvous cannot be read: {error}"
                )
            self._mute = True
            return PollResult()

    def _is_broken(self, heard: PollResult) -> bool:
        """Whether the group can neither continue nor save: a rank elsewhere has failed, or a node
        was lost without a plan.

        After a plan workers exit one by one, and a script may save on its own.
        """
        document, now = heard.document, time.monotonic()
        failures = failures_of(document)
        if "plan" in document:
            return self.config.train is not None and any(failure.primary for failure in failures)
        if any(failure.primary for failure in failures):
            return True
        self._echoed_since = (self._echoed_since or now) if failures else None
        # what they have seen the end of may be a rank here that is about to say why
        if self._echoed_since is not None:
            return now - self._echoed_since >= ECHO_SECONDS
        return bool(heard.news.left) and not heard.news.closed

    def _take_news(self, news: RendezvousStatus) -> None:
        if news.closed:
            self._take_verdict()
        now = time.monotonic()
        self._joining_since = (self._joining_since or now) if news.waiting else None
        self._left_since = (self._left_since or now) if news.left else None
        if self._terminated_at is not None:
            return
        if (
            self._joining_since is not None
            and now - self._joining_since >= self.config.join_window_seconds
        ):
            log.event("joining", waiting=news.waiting)
            self._terminate(JOIN, since=now)
        elif self._left_since is not None and now - self._left_since >= max(
            LEFT_SECONDS, self.config.join_window_seconds
        ):
            log.warn(
                "peers-left",
                message=f"{news.left} other nodes left this group: the ranks here end too",
            )
            self._terminate(None, since=now)

    def _take_verdict(self) -> None:
        """The run is over: end the workers now after a failure; let them finish after a success."""
        code = read_or_empty(self.exchange.verdict).get("code")
        if code is not None:
            self._must_end_at = min(
                self._must_end_at,
                time.monotonic()
                + (self.config.termination_grace_period_seconds if code == 0 else 0),
            )

    def _terminate(self, plan: str | None, *, since: float) -> None:
        """Send SIGTERM to the workers, once; with a plan their exit is no failure."""
        self._terminated_at = time.monotonic()
        if plan == STOP:  # nobody who wants to save has time for a store that is slow
            self.ranks.signal(signal.SIGTERM)
        if plan is not None:
            read_or_empty(lambda: self.exchange.plan(self.generation.number, plan))
        if plan != STOP:
            self.ranks.signal(signal.SIGTERM)
        self._must_end_at = (
            since
            + self.config.termination_grace_period_seconds
            - stop_margin(self.config.termination_grace_period_seconds)
        )

    def _has_nothing_to_save(self) -> bool:
        """Whether workers that were asked to stop have not joined the process group yet: inside
        torch's connect they cannot react, and no step is done.
        """
        phases = {beat.phase for beat in self.watchdog.beats}
        return (
            self._terminated_at is not None
            and self.config.train is not None
            and not phases.isdisjoint(_MEETING)
        )

    def _note_running(self) -> None:
        """Notice when all workers have started, and when one has completed a step."""
        if not self._begun and all(
            stacks_path(self.scratch, number).exists() for number in self._pids
        ):
            self._begun = True
            self.ranks.release()
        stepping = self.config.script is not None or any(
            beat.phase is Phase.STEP for beat in self.watchdog.beats
        )
        if stepping and not self._running:
            self._running = True
            self.teller.state("running")

    def _end_well(self) -> GroupResult:
        exits = self.ranks.exits()
        if self.config.script is not None and self._terminated_at is None:
            for number in [
                number
                for number, code in exits.items()
                if code == 0 and not result.read_result(self.scratch, number)
            ]:
                rank = self.global_ranks[number]
                message = (
                    f"rank {rank} ended with code 0 by os._exit or exec: it counts as done, "
                    "as under torchrun"
                )
                log.warn("ended-early", rank=rank, message=message)
        return self._end(exits)

    def _end_badly(self) -> GroupResult:
        """End the group after a failure. If none of the failures is primary, a primary one may
        follow on this node in a moment.
        """
        deadline = time.monotonic() + ECHO_SECONDS
        while self.ranks.living and time.monotonic() < deadline:
            if any(failure.primary for failure in self._failures(self.ranks.exits()).values()):
                break
            self.ranks.wait(TICK_SECONDS)
        self.watchdog.look()
        notes, exits = self._notes(), self.ranks.exits()
        self.ranks.kill()
        return replace(self._end(exits), notes=notes)

    def _has_lost_a_node(self, news: RendezvousStatus) -> bool:
        """Whether another node is lost and the workers here wait for it. A closed connection raises
        at once; a silent node never does.
        """
        now, watchdog = time.monotonic(), self.watchdog
        self._silent_since = (self._silent_since or now) if news.silent or news.left else None
        if self._silent_since is None:
            return False
        silent = now - self._silent_since
        if silent > self.config.hang_timeout_seconds and watchdog.never_beats():
            return True
        least = SILENT_SECONDS if self.config.train is not None else SCRIPT_SILENT_SECONDS
        return silent > least and watchdog.waited_seconds() > max(
            WAIT_SECONDS, _LONGER * watchdog.longest_wait
        )

    def _end_deserted(self, heard: PollResult) -> GroupResult:
        """End a group that failed elsewhere. A failure recorded by a worker here counts, even if
        the worker has not exited yet.
        """
        notes, exits = self._notes(), self.ranks.exits()
        self.ranks.kill()
        known = self._circumstances(exits)
        ended = self._end(exits)
        first = root_cause(failures_of(heard.document))
        message = (
            f"the group has failed elsewhere: {first.message}"
            if first
            else "another node of the group is gone"
        )
        log.warn("node-lost", message=message)
        left = exit_analysis.failures_left(known)
        echoes = {
            number: node_lost_failure(
                beat, rank=rank, node=self.node, generation=self.generation.number, message=message
            )
            for number, (beat, rank) in enumerate(
                zip(self.watchdog.beats, self.global_ranks, strict=True)
            )
            if number not in exits
        }
        return replace(ended, failures={**echoes, **left, **ended.failures}, notes=notes)

    def _end_by_force(self) -> GroupResult:
        exits = self.ranks.exits()
        self.ranks.kill()
        return GroupResult(outcomes=self._end(exits).outcomes, exits=exits, forced=True)

    def _end(self, exits: dict[int, int]) -> GroupResult:
        known = self._circumstances(exits)
        return GroupResult(exit_analysis.outcomes(known), exit_analysis.failures(known), exits)

    def _failures(self, exits: dict[int, int]) -> dict[int, Failure]:
        return exit_analysis.failures(self._circumstances(exits)) if exits else {}

    def _circumstances(self, exits: dict[int, int]) -> exit_analysis.ExitContext:
        beats = self.watchdog.beats
        return exit_analysis.ExitContext(
            node=self.node,
            generation=self.generation.number,
            scratch=self.scratch,
            global_ranks=self.global_ranks,
            exits=exits,
            managed=self.config.train is not None,
            terminated=self._terminated_at is not None,
            out_of_memory=self._is_out_of_memory(exits),
            steps={number: self.watchdog.step(number) for number in range(len(beats))},
            collectives={number: beat.collective for number, beat in enumerate(beats)},
        )

    def _is_out_of_memory(self, exits: dict[int, int]) -> bool:
        """Whether the kernel had made an OOM kill when the first worker was seen killed."""
        if self._out_of_memory is None and -signal.SIGKILL in exits.values():
            self._out_of_memory = self._oom_kills.recent()
        return bool(self._out_of_memory)

    def _notes(self) -> list[Note]:
        """The states of this node's ranks, now or when they exited."""
        size = len(self.global_ranks) * len(self.generation.nodes)
        return [
            self.watchdog.note(
                number, rank=rank, pid=self._pids[number], node=self.node, world_size=size
            )
            for number, rank in enumerate(self.global_ranks)
        ]

    def _end_disagreeing(self, odd: Mismatch) -> GroupResult:
        """End a group whose ranks here have entered different collectives: it cannot recover."""
        notes, exits = self._notes(), self.ranks.exits()
        self.ranks.kill()
        failure = mismatch_failure(
            odd, node=self.node, generation=self.generation.number, step=self.watchdog.last_step()
        )
        local_rank = self.global_ranks.index(odd.ranks[0]) if odd.ranks else 0
        return GroupResult(failures={local_rank: failure}, exits=exits, notes=notes)

    def _end_hanging(self, stalled: list[int]) -> GroupResult:
        """End a group in which ranks hang: find the rank at fault and keep the stacks."""
        notes = self._notes()
        blamed = find_hung_rank(
            gather_rank_states(self.exchange, self.generation, self.node, notes)
        )
        stacks = dump_stacks(
            {number: self._pids[number] for number in stalled if number in self.ranks.living},
            {number: stacks_path(self.scratch, number) for number in stalled},
        )
        exits = self.ranks.exits()
        self.ranks.kill()
        stood = {
            number: (self.global_ranks[number], self.watchdog.beats[number]) for number in stalled
        }
        failures = hang_failures(
            stood, blamed=blamed, node=self.node, generation=self.generation.number, stacks=stacks
        )
        for local_rank, failure in failures.items():
            if failure.primary:
                phase, path = (
                    self.watchdog.beats[local_rank].phase,
                    stacks_path(self.scratch, local_rank),
                )
                self.teller.hang(failure, phase=phase.value, stacks=str(path))
        return GroupResult(failures=failures, exits=exits, notes=notes)
