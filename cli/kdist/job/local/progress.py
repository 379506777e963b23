"""State of a running local job, gathered from the events of its agents and from their replies to
status requests. `kdist.views.live` renders it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kdist.events import Entry, Event
from kdist.job.local.agents import StatusReply
from kdist.status import FetchProgress, documents
from kdist.status.job_status import JOINED, describe_joined
from kdist.status.step_history import StepHistory
from kdist_trainer.formats import FIRST_RETRYABLE_CODE

STALE_SECONDS = 3.0  # without a reply, after which an agent's numbers are marked as stale
_IDLE_SECONDS = 1.0  # without a step, after which the job reports what it waits for
_PACE_MAX_AGE = 10.0  # seconds since the last step, after which there is no estimate of the end
# Events of what is fetched before the agents start.
_FETCHED = ("data-ready", "data-failed", "data-stopped")
_FETCHING = ("data-fetch", "data-progress", "data-waiting", *_FETCHED)
# Events that rank 0 logs about all ranks.
_LOGGED_FOR_ALL_RANKS = ("resumed", "continued", "training-started", "first-step", "progress")

_PHASES = {
    "agent-started": "starting",
    "rendezvous-started": "rendezvous",
    "node-standby": "stands by",
    "rendezvous-completed": "starting ranks",
    **dict.fromkeys(("resumed", "continued", "training-started", "first-step"), "training"),
    "restarting": "restarting",
    "joining": "growing",
    "stopping": "saving, then stops",
    "agent-ended": "ended",
    "agent-killed": "killed",
    "agent-restarting": "agent restarts",
    "done": "done",
    "stopped": "stopped",
    "failed": "failed",
}

_GONE = ("ended", "killed", "agent restarts")


@dataclass
class NodeProgress:
    """State of one agent.

    Attributes:
        name: name of its node.
        phase: what the agent does, in words for the view.
        reply: its last status; None before the first request.
    """

    name: str
    phase: str = "starting"
    reply: StatusReply | None = None

    @property
    def is_here(self) -> bool:
        """Whether its process has not ended, as far as that was told."""
        return self.phase not in _GONE

    @property
    def ranks(self) -> list[Mapping[str, Any]]:
        """Its ranks, as its last status lists them."""
        ranks = self.reply.status.get("ranks") if self.reply else None
        return (
            [rank for rank in ranks if isinstance(rank, Mapping)] if isinstance(ranks, list) else []
        )


@dataclass
class Progress:
    """State of the whole job.

    Attributes:
        job: name of the job.
        nodes: state of each agent, by node.
        min_nodes: nodes without which no worker group starts.
        saves: whether a stop saves: not that of a script which has opened no checkpoints.
        managed: whether kdist runs the training loop; a script may never report its steps.
        clock: monotonic seconds. All times are of this clock, except `saved_at`.
        step: last completed step, counted from 1.
        target: step at which the training ends.
        rate: samples per second.
        world: number of ranks.
        restarts: those of the run since it began.
        left: restarts that the job may make without progress; None before the first one.
        saved_step: step of the last checkpoint.
        saved_at: unix time of the last checkpoint.
        history: recent steps and losses.
        bars: newest state of each rank's progress bar, by the rank's prefix.
        allow_rollback: whether a lower step than before is believed, because a new worker group
            may resume from an earlier checkpoint.
        last_step_at: time of the last completed step, or of the training's start after it.
        started_at: time at which the job started.
        fetching: what is fetched before the agents start, in a sentence; empty if nothing is.
    """

    job: str
    nodes: dict[str, NodeProgress]
    min_nodes: int
    managed: bool = True
    clock: Callable[[], float] = time.monotonic
    step: int = 0
    target: int | None = None
    loss: float | None = None
    learning_rate: float | None = None
    rate: float | None = None
    generation: int = 0
    world: int = 0
    restarts: int = 0
    left: int | None = None
    saved_step: int | None = None
    saved_at: float | None = None
    history: StepHistory = field(default_factory=StepHistory)
    bars: dict[str, Entry] = field(default_factory=dict)
    allow_rollback: bool = False
    saves: bool = field(init=False)
    fetching: str = ""
    last_step_at: float = field(init=False)
    started_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_at = self.clock()
        self.saves = self.managed or self.saved_step is not None
        self.last_step_at = self.started_at

    def observe_event(self, name: str, event: Event) -> None:
        """Apply an event of the node `name`; events of kdist itself have no node of their own."""
        node, kind = self.nodes.get(name) or NodeProgress(name), event["event"]
        if kind in _FETCHING:
            self._observe_fetch(event)
        # After a retryable failure, the events that follow say what happens to the agent.
        if kind != "failed" or (documents.integer(event, "code") or 0) < FIRST_RETRYABLE_CODE:
            node.phase = _PHASES.get(kind, node.phase)
            if kind == "stopping" and event.get("saves") is False:
                node.phase = "stops"
        self.allow_rollback |= kind in ("rendezvous-completed", "resumed")
        if kind in _LOGGED_FOR_ALL_RANKS:
            for each in self.nodes.values():
                each.phase = "training" if each.phase == "starting ranks" else each.phase
        if kind == "rendezvous-completed" and not self.managed:
            node.phase = "running"
        if kind == "agent-started":
            node.reply = None
        self.generation = max(self.generation, documents.integer(event, "generation") or 0)
        if kind in ("rendezvous-completed", "agent-ended"):
            self.bars.clear()
        if kind == "rendezvous-completed":
            self.world = documents.integer(event, "world_size") or self.world
        elif kind == "restarting":
            made = documents.integer(event, "restarts") or 0
            budget = documents.integer(event, "budget")
            self.restarts = max(self.restarts, made)
            if event.get("counted") != "machines":  # which do not spend maxRestarts
                self.left = None if budget is None else budget - made
        elif kind == "training-started":
            self.last_step_at = self.clock()
        elif kind == "checkpoints-opened":
            self.saves = True
        elif kind == "checkpoint-committed":
            self.saves = True
            self.saved_step = documents.integer(event, "step")
            self.saved_at = time.time()
        elif kind in ("progress", "resumed", "continued", "first-step", "done"):
            self.rate = _or(documents.number(event, "samples_per_second"), self.rate)
            self._record_step(event)

    def _observe_fetch(self, event: Event) -> None:
        found = FetchProgress.read(event)
        amount = f": {found}" if found is not None else ""
        over = event["event"] in _FETCHED
        self.fetching = "" if over else f"fetching {event.get('url', '')}{amount}"

    def observe_print(self, entry: Entry) -> None:
        """Apply printed text: a state of a rank's progress bar, or a line, which ends the bar."""
        if entry.is_progress_bar:
            self.bars[entry.prefix] = entry
        else:
            self.bars.pop(entry.prefix, None)

    def observe_reply(self, name: str, reply: StatusReply) -> None:
        """Apply the result of a status request to the agent of the node `name`."""
        node, status = self.nodes[name], reply.status
        if node.reply and node.reply.answered_at == reply.answered_at:
            return
        node.reply = reply
        if status.get("generation") == self.generation or not self.generation:
            fields = {**status, "target": status.get("target_steps")}
            if self.saved_step and not status.get("step"):
                fields.pop("step", None)  # its ranks have not restored the checkpoint yet
            self._record_step(fields)
            statuses = [each.reply.status for each in self.nodes.values() if each.reply]
            rates = [
                rate
                for each in statuses
                if (rate := documents.number(each, "samples_per_second")) is not None
            ]
            self.rate = sum(rates) if rates else self.rate  # each agent reports its own ranks
        step, saved_at = (
            documents.number(status, f"last_checkpoint_{key}") for key in ("step", "time")
        )
        if step and saved_at:
            self.saved_step, self.saved_at = int(step), saved_at
        self.restarts = max(self.restarts, documents.integer(status, "restarts") or 0)
        if self.left is not None:  # a commit gives all of them back
            left = documents.integer(status, "restarts_remaining")
            self.left = self.left if left is None else left

    @property
    def at_risk(self) -> float | None:
        """Seconds of training that no checkpoint holds, as the agent of rank 0 tells; None if none
        tells now.
        """
        replies = [node.reply.status for node in self.nodes.values() if node.is_here and node.reply]
        newest = max((documents.integer(each, "generation") or 0 for each in replies), default=0)
        found = [
            documents.number(each, "at_risk_seconds")
            for each in replies
            if (documents.integer(each, "generation") or 0) == newest
        ]
        return max((each for each in found if each is not None), default=None)

    def _record_step(self, fields: Mapping[str, Any]) -> None:
        step, loss = documents.integer(fields, "step"), documents.number(fields, "loss")
        self.target = documents.integer(fields, "target") or self.target
        self.learning_rate = _or(documents.number(fields, "learning_rate"), self.learning_rate)
        if step is None or step == self.step or (step < self.step and not self.allow_rollback):
            return  # the nodes' replies differ in age: an older one must not reset the step
        self.allow_rollback = False
        self.step = step
        self.last_step_at = self.clock()
        if step == 0:
            loss = None
        self.loss = _or(loss, self.loss)
        self.history.record(self.last_step_at, step, loss)

    def seconds_left(self) -> float | None:
        """Estimate the seconds until the last step; None without a recent pace."""
        return self.history.seconds_left(self.clock(), self.target, max_age=_PACE_MAX_AGE)

    def waiting_for(self) -> str | None:
        """Say in a sentence what the job waits for; None if it made a step in the last second."""
        if self.fetching:
            return self.fetching
        idle = self.clock() - self.last_step_at
        if idle < _IDLE_SECONDS:
            return None
        phases = [node.phase for node in self.nodes.values()]
        for phase, sentence in (
            ("agent restarts", "an agent ended and starts again"),
            ("saving, then stops", "the ranks save their state and stop"),
            ("stops", "the ranks stop"),
            ("killed", "the agents are killed"),
            ("failed", "the other agents are stopped" if phases[1:] else "the agent ends"),
        ):
            if phase in phases:
                return sentence
        if "starting" in phases:
            return f"starting: {phases.count('starting')} of {len(phases)} agents load torch"
        if "rendezvous" in phases:
            expected = len(phases) - phases.count("ended") - phases.count("stands by")
            joined = phases.count("rendezvous")
            return f"rendezvous: {describe_joined(joined, expected, self.min_nodes)}"
        if "starting ranks" in phases:
            return JOINED
        if "restarting" in phases:
            return "the ranks of the failed group are stopped, then a new group forms"
        if idle < STALE_SECONDS or "training" not in phases:
            return None
        ranks = [rank for node in self.nodes.values() for rank in node.ranks]
        activities = {str(rank["phase"]) for rank in ranks if rank.get("phase")}
        if "evaluate" in activities:
            return "the ranks evaluate the model"
        listed = f"; the ranks are in: {', '.join(sorted(activities))}" if activities else ""
        return f"no step for {idle:.0f} s{listed}"


def _or(value: float | None, otherwise: float | None) -> float | None:
    return otherwise if value is None else value
