"""One worker group of a run, as its agents agree on it: its number, and why it began."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from kdist_trainer.agent.renewal import NOBODY
from kdist_trainer.checkpoint.interval import HISTORY_VARIABLE
from kdist_trainer.checkpoint.training_time import UNSAVED_VARIABLE
from kdist_trainer.json_text import encode_json
from kdist_trainer.untrusted_text import parse_json

START, RESUME, JOIN, FAILURE = "start", "resume", "join", "failure"
RENEW = "renew"
"""A rank's process is to be replaced, see `kdist_trainer.agent.renewal`."""
PLANNED = (JOIN, RENEW)
"""The reasons of groups that the agents begin by themselves, without a failure or a request."""
STOP = "stop"
"""Why a generation ends, if it is not for a node that joins: its agents were asked to stop."""


@dataclass(frozen=True)
class Generation:
    """One worker group, which corresponds to one completed round of torch's rendezvous.

    Attributes:
        number: Counts from 1 over the whole run.
        reason: Why it began: `start`, `resume`, `join`, `renew` or `failure`.
        nodes: The names of the nodes.
        restarts: The restarts without progress so far.
        cause: The cause of the failure that ended the previous generation.
        lost_steps: The steps of the group before that are after `from_step`, and are done again; 0
            if a rank has kept the state.
        exhausted: Whether the run ends: the restarts exceed the limit, or one failure repeats.
        bounds: The minimum and the maximum number of nodes, as the agent with group rank 0 reads
            them: all ranks must use the same ones.
        message: The message of that failure.
        from_step: The step that the workers continue from: the newest one that a rank has kept or
            that is committed; 0 if there is none.
        repeats: How often in a row the same failure ended a group, unless it is transient.
        over: Why the run ends, with the failure, if it is `exhausted`.
        refusal: Why the workers are not started again, though restarts are left; empty if they are.
        kept_step: The step that the survivors have kept in memory, if any has.
        unsaved_seconds: The training time since the state of the newest checkpoint, work that was
            lost included: the clock of the saves goes on from it.
        at_risk_seconds: The part of it that ranks have kept in memory.
        continues_in_place: Whether ranks may keep their state for the group after this one: not
            after a recovery in place has left ranks that differ, until the job's code changes.
        save_history: What the run's saves and losses were before it; see `SaveHistory.to_text`.
        renewed: The node and the local rank whose process is replaced as it begins.
        slow_start: That starting takes longer than the time between losses, in a sentence; empty
            if it does not.
        total_restarts: The restarts after failures since the run began, this one included; None for
            a group that no restart counts.
        total_lost_steps: The steps that the run has lost since it began.
        committed_step: The step of the newest checkpoint as it begins; None without one.
        committed_at: When that was committed, in Unix seconds; None if that is not known.
    """

    number: int
    reason: str
    nodes: list[str]
    restarts: int = 0
    cause: str | None = None
    lost_steps: int = 0
    exhausted: bool = False
    bounds: tuple[int, int] = (0, 0)
    message: str = ""
    from_step: int = 0
    repeats: int = 0
    refusal: str = ""
    kept_step: int | None = None
    over: str = ""
    unsaved_seconds: float = 0.0
    at_risk_seconds: float = 0.0
    save_history: str = ""
    renewed: tuple[str, int] = NOBODY
    continues_in_place: bool = True
    slow_start: str = ""
    total_restarts: int | None = None
    total_lost_steps: int | None = None
    committed_step: int | None = None
    committed_at: float | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What its ranks are told of it."""
        return {
            "KDIST_GENERATION": str(self.number),
            "KDIST_NODES": "{}:{}".format(*self.bounds),
            UNSAVED_VARIABLE: str(self.unsaved_seconds),
            HISTORY_VARIABLE: self.save_history,
        }

    def to_json(self) -> str:
        return encode_json(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Generation:
        return cls(**parse_json(text))
