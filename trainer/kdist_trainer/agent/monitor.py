"""Hears what the others say, on a thread of its own: a store may be slow or away, and the agent
must not wait for it.

Looking after one group's ranks on this node, from their start to the end of the last one.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from kdist_trainer import log, result
from kdist_trainer.agent import exit_analysis
from kdist_trainer.agent.coordination import AgentStore, Document, failures_of
from kdist_trainer.agent.desync import DesyncDetector, Mismatch, Note
from kdist_trainer.agent.exit_analysis import GroupResult
from kdist_trainer.agent.exit_record import root_cause
from kdist_trainer.agent.hang_detection import (
    Watchdog,
    hang_failures,
    read_or_empty,
    gather_rank_states,
    mismatch_failure,
    find_hung_rank,
    node_lost_failure,
    dump_stacks,
)
from kdist_trainer.agent.restart_policy import JOIN, Generation
from kdist_trainer.agent.telemetry import AgentTelemetry
from kdist_trainer.agent.worker_entry import stacks_path
from kdist_trainer.agent.workers import WorkerProcesses
from kdist_trainer.config import TrainConfig
from kdist_trainer.errors import Failure
from kdist_trainer.liveness import Phase
from kdist_trainer.rendezvous.handler import RendezvousStatus
from kdist_trainer.signals import StopSignals, stop_margin


@dataclass(frozen=True)
class PollResult:
    """What the rendezvous says, and the generation's document as it was read after that: who leaves
    by plan says so first.
    """

    news: RendezvousStatus = field(
        default_factory=lambda: RendezvousStatus(waiting=0, left=0, silent=0, closed=False)
    )
    document: Document = field(default_factory=dict)


class RendezvousPoller:
    """Asks `source` every `seconds` while the `with` block lasts; calling it gives the last answer,
    or raises its error.
    """

    def __init__(self, source: Callable[[], PollResult], *, seconds: float) -> None:
        self._source = source
        self._seconds = seconds
        self._last: PollResult | Exception = PollResult()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="kdist-hearing", daemon=True)

    def __call__(self) -> PollResult:
        last = self._last
        if isinstance(last, Exception):
            raise last
        return last

    def __enter__(self) -> RendezvousPoller:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()  # from here on the rendezvous is used by the agent alone

    def _listen(self) -> None:
        while not self._over.wait(self._seconds):
            try:
                self._last = self._source()
            except Exception as error:  # noqa: BLE001 - handed on to whoever asks
                self._last = error


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
    """One group at work. What the store raises is warned of and taken as no news."""

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
        """Look after the ranks until all have ended, by themselves or by the agent's hand."""
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
        """Hand a request to stop on to the ranks, once."""
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
                log.warn("rendezvous-mute", message=f"the rendezvous cannot be read: {error}")
            self._mute = True
            return PollResult()

    def _is_broken(self, heard: PollResult) -> bool:
        """Whether the group can neither go on nor save: a rank elsewhere has failed, or a node was
        lost without a plan.

        After a plan ranks end one by one, and a script may save on its own.
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
                "group-left",
                message=f"{news.left} other nodes left this group: the ranks here end too",
            )
            self._terminate(None, since=now)

    def _take_verdict(self) -> None:
        """The run is over: after a failure end now, after a success let the ranks come to their own
        end.
        """
        code = read_or_empty(self.exchange.verdict).get("code")
        if code is not None:
            self._must_end_at = min(
                self._must_end_at,
                time.monotonic() + (self.config.grace_seconds if code == 0 else 0),
            )

    def _terminate(self, plan: str | None, *, since: float) -> None:
        """Ask the ranks to end, once; with a plan their end is no failure."""
        self._terminated_at = time.monotonic()
        if plan == STOP:  # nobody who wants to save has time for a store that is slow
            self.ranks.signal(signal.SIGTERM)
        if plan is not None:
            read_or_empty(lambda: self.exchange.plan(self.generation.number, plan))
        if plan != STOP:
            self.ranks.signal(signal.SIGTERM)
        self._must_end_at = (
            since + self.config.grace_seconds - stop_margin(self.config.grace_seconds)
        )

    def _has_nothing_to_save(self) -> bool:
        """Whether ranks that were asked to end have yet to meet: in torch's connect they hear
        nothing, and no step is done.
        """
        phases = {beat.phase for beat in self.watchdog.beats}
        return (
            self._terminated_at is not None
            and self.config.train is not None
            and not phases.isdisjoint(_MEETING)
        )

    def _note_running(self) -> None:
        """Notice that all ranks have begun, and that one has made a step."""
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
        """Some rank failed. If none of these failures is a first cause, one may follow on this node
        in a moment.
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
        """Whether another node is gone and the ranks here wait for it: a cut connection shows at
        once, a silent node never.
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
        """End a group that others have broken. What a rank here has left to say counts, though it
        has not ended yet.
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
        """Whether the kernel had killed for want of memory when the first rank was seen to be
        killed.
        """
        if self._out_of_memory is None and -signal.SIGKILL in exits.values():
            self._out_of_memory = self._oom_kills.recent()
        return bool(self._out_of_memory)

    def _notes(self) -> list[Note]:
        """What this node's ranks are in, or were in when they ended."""
        size = len(self.global_ranks) * len(self.generation.nodes)
        return [
            self.watchdog.note(
                number, rank=rank, pid=self._pids[number], node=self.node, world_size=size
            )
            for number, rank in enumerate(self.global_ranks)
        ]

    def _end_disagreeing(self, odd: Mismatch) -> GroupResult:
        """The ranks here have entered different collectives: nothing good can come of it, however
        long they go on.
        """
        notes, exits = self._notes(), self.ranks.exits()
        self.ranks.kill()
        failure = mismatch_failure(
            odd, node=self.node, generation=self.generation.number, step=self.watchdog.last_step()
        )
        local_rank = self.global_ranks.index(odd.ranks[0]) if odd.ranks else 0
        return GroupResult(failures={local_rank: failure}, exits=exits, notes=notes)

    def _end_hanging(self, stalled: list[int]) -> GroupResult:
        """Some ranks stand still: find out who is to blame, keep the stacks, end the group."""
        notes = self._notes()
        blamed = find_hung_rank(gather_rank_states(self.exchange, self.generation, self.node, notes))
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
