"""What is known of a running job at this moment, gathered from its events and from the agents'
answers; drawn by `kdist.views.live_run`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kdist.events import Entry
from kdist.local.agents import StatusReply

SLOW = 3.0  # seconds without an answer after which an agent's numbers are marked as old
QUIET = 1.0  # seconds of a job that says nothing, after which it says what it waits for
_RETRYABLE = 128  # exit codes of agents from here on are no end of the job
_HISTORY = 240
_PACE = 60
# said by rank 0 of what all ranks do
_JOINT = ("resumed", "training-started", "first-step", "progress")

_PHASES = {
    "agent-started": "starting",
    "rendezvous-started": "rendezvous",
    "rendezvous-completed": "starting ranks",
    "resumed": "training",
    "training-started": "training",
    "first-step": "training",
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


@dataclass
class NodeProgress:
    """One agent as it is seen. `answer` is its last status, None before the first question."""

    name: str
    phase: str = "starting"
    starts: int = 0
    answer: StatusReply | None = None

    @property
    def ranks(self) -> list[Mapping[str, Any]]:
        found = self.answer.status.get("ranks") if self.answer else None
        return (
            [rank for rank in found if isinstance(rank, Mapping)] if isinstance(found, list) else []
        )


@dataclass
class Progress:
    """The job as a whole. Steps count from 1; times are monotonic seconds of `clock`, except
    `saved_at`, which is unix time.
    """

    job: str
    nodes: dict[str, NodeProgress]
    needed: int  # nodes without which nothing starts
    managed: bool = True  # false for a script, which may never tell its steps
    clock: Callable[[], float] = time.monotonic
    step: int = 0
    target: int | None = None
    loss: float | None = None
    learning_rate: float | None = None
    rate: float | None = None
    generation: int = 0
    world: int = 0
    restarts: int = 0
    budget: int | None = None
    saved_step: int | None = None
    saved_at: float | None = None
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    # (time, step) of the last moves
    pace: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_PACE))
    bars: dict[str, Entry] = field(default_factory=dict)  # newest state of each rank's progress bar
    rewound: bool = False  # a new group may begin at an earlier step
    moved_at: float = field(init=False)
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.moved_at = self.clock()

    def observe(self, name: str, event: Mapping[str, Any]) -> None:
        """Take in one event of the node `name`."""
        # kdist itself speaks too and is no node
        node, kind = self.nodes.get(name) or NodeProgress(name), event["event"]
        # else what follows says what becomes of it
        if kind != "failed" or (_integer(event.get("code")) or 0) < _RETRYABLE:
            node.phase = _PHASES.get(kind, node.phase)
        self.rewound |= kind in ("rendezvous-completed", "resumed")
        if kind in _JOINT:
            for each in self.nodes.values():
                each.phase = "training" if each.phase == "starting ranks" else each.phase
        if kind == "rendezvous-completed" and not self.managed:
            node.phase = "running"
        if kind == "agent-started":
            node.starts += 1
            node.answer = None
        self.generation = max(self.generation, _integer(event.get("generation")) or 0)
        if kind in ("rendezvous-completed", "agent-ended"):
            self.bars.clear()
        if kind == "rendezvous-completed":
            self.world = _integer(event.get("world_size")) or self.world
        elif kind == "restarting":
            self.restarts = max(self.restarts, _integer(event.get("restarts")) or 0)
            self.budget = _integer(event.get("budget"))
        elif kind == "checkpoint-committed":
            self.saved_step, self.saved_at = _integer(event.get("step")), time.time()
        elif kind in ("progress", "resumed", "first-step", "done"):
            self.rate = _or(_number(event.get("samples_per_second")), self.rate)
            self._take_step(event)

    def observe_print(self, entry: Entry) -> None:
        """Take in what a rank printed: a state of its progress bar, or a line, which ends the
        bar.
        """
        speaker, _ = entry.speaker
        if entry.is_state:
            self.bars[speaker] = entry
        else:
            self.bars.pop(speaker, None)

    def observe_answer(self, name: str, answer: StatusReply) -> None:
        """Take in what an agent answered, or that it did not."""
        node, status = self.nodes[name], answer.status
        if node.answer and node.answer.answered_at == answer.answered_at:
            return
        node.answer = answer
        if status.get("generation") == self.generation or not self.generation:
            self._take_step({**status, "target": status.get("target_steps")})
            answers = [each.answer.status for each in self.nodes.values() if each.answer]
            rates = [
                rate
                for one in answers
                if (rate := _number(one.get("samples_per_second"))) is not None
            ]
            self.rate = sum(rates) if rates else self.rate  # each agent speaks of its own ranks
        if _number(status.get("last_checkpoint_step")) and _number(
            status.get("last_checkpoint_time")
        ):
            self.saved_step, self.saved_at = (
                int(status["last_checkpoint_step"]),
                float(status["last_checkpoint_time"]),
            )

    def _take_step(self, seen: Mapping[str, Any]) -> None:
        step, loss = _integer(seen.get("step")), _number(seen.get("loss"))
        self.target = _integer(seen.get("target")) or self.target
        self.learning_rate = _or(_number(seen.get("learning_rate")), self.learning_rate)
        if step is None or step == self.step or (step < self.step and not self.rewound):
            return  # the nodes' answers differ in age: an older one must not turn the clock back
        if step < self.step:
            self.pace.clear()
        self.rewound = False
        self.step, self.moved_at = step, self.clock()
        self.pace.append((self.moved_at, step))
        if loss is not None and step > 0:
            self.loss = loss
            self.losses.extend([loss] if math.isfinite(loss) else [])

    def seconds_left(self) -> float | None:
        """Estimate from the pace of the last moves; None while there is none."""
        if not self.target or len(self.pace) < 2 or self.clock() - self.moved_at > 10:
            return None
        (since, first), (until, last) = self.pace[0], self.pace[-1]
        return (self.target - last) * (until - since) / (last - first) if last > first else None

    def waiting_for(self) -> str | None:
        """What a job that has not moved for a second waits for, in one sentence; None while it
        moves.
        """
        quiet = self.clock() - self.moved_at
        if quiet < QUIET:
            return None
        phases = [node.phase for node in self.nodes.values()]
        for phase, sentence in (
            ("agent restarts", "an agent ended and starts again"),
            ("saving, then stops", "the ranks save their state and stop"),
            ("killed", "the agents are killed"),
            ("failed", "the other agents are told to stop"),
        ):
            if phase in phases:
                return sentence
        if "starting" in phases:
            return f"starting: {phases.count('starting')} of {len(phases)} agents load torch"
        if "rendezvous" in phases:
            here = len(phases) - phases.count("ended")
            at_the_table = phases.count("rendezvous")
            return f"rendezvous: {at_the_table} of {here} nodes are there, {self.needed} needed"
        if "starting ranks" in phases:
            return "the ranks start and load the workload"
        if "restarting" in phases:
            return "the ranks of the failed group are stopped, then a new group forms"
        if quiet < SLOW or "training" not in phases:
            return None
        doing = {str(rank.get("phase")) for node in self.nodes.values() for rank in node.ranks}
        if "evaluate" in doing:
            return "the ranks evaluate the model"
        return (
            f"no step for {quiet:.0f} s; the ranks are in: {', '.join(sorted(doing)) or 'unknown'}"
        )


def _number(value: object) -> float | None:
    if value in ("nan", "inf", "-inf"):  # what JSON has no number for comes as a word
        return float(str(value))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _integer(value: object) -> int | None:
    found = _number(value)
    return None if found is None or not math.isfinite(found) else int(found)


def _or(value: float | None, otherwise: float | None) -> float | None:
    return otherwise if value is None else value
