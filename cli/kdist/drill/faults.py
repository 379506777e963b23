"""The faults of `kdist drill`: what each one does to a job, and whether the job would survive it.

Pure: a `Situation` is what is known of a job at one moment, and `why_refused` says why a fault
must not be tried now.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

from kdist.spec import TrainConfig
from kdist.status import documents
from kdist.status.agent_status import RUNNING_STATES, AgentStatus
from kdist.units import count

Fault = Literal["rank", "agent", "pod", "silence"]

FAULTS: Final[dict[Fault, str]] = {
    "rank": "kill the process of one rank",
    "agent": "kill the agent of one node",
    "pod": "take one node away: its agent with its ranks",
    "silence": "stop all processes of one node for a while",
}
"""What each fault does."""

_Number = TypeVar("_Number", int, float)
_LEAST_RESTARTS = 2
_LEAST_SILENCE = 15.0  # seconds
_SILENCE_RATIO = 1.5
_SCRIPT_SECONDS = 30.0  # in which a script on gloo notices a peer that is silent


@dataclass(frozen=True)
class Situation:
    """A job at one moment, as far as drills are concerned.

    Attributes:
        name: of the job.
        place: `local` or `cluster`.
        config: fields of job.yaml's spec, as in `train.json`.
        nodes: its agents in the order of their index: a node's name, or that of its pod.
        documents: the `/status` of each agent that answers, by node.
        has_checkpoints: whether its checkpoints outlive a pod.
        rendezvous: `file`, `kubernetes` or `c10d`.
        inactive: why it does not run; empty if it does.
        drill: the drill that is in progress; empty without one.
        saved: the step of the last checkpoint in the ledger; None if there is none.
        forbidden: for each fault the rights that the user lacks; empty if none is missing.
        unreturnable: nodes that could not come back, with the reason.
        check: the command that shows what the job is doing.
    """

    name: str
    place: Literal["local", "cluster"]
    config: Mapping[str, Any]
    nodes: tuple[str, ...] = ()
    documents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    has_checkpoints: bool = True
    rendezvous: str = "file"
    inactive: str = ""
    drill: str = ""
    saved: int | None = None
    forbidden: Mapping[Fault, str] = field(default_factory=dict)
    unreturnable: Mapping[str, str] = field(default_factory=dict)
    check: str = ""

    @property
    def reports(self) -> list[AgentStatus]:
        """The agents of the newest worker group that answer."""
        found = [AgentStatus.read(node, dict(each)) for node, each in self.documents.items()]
        known = [one for one in found if one is not None]
        newest = max((one.generation for one in known), default=0)
        return [one for one in known if one.generation == newest]

    @property
    def ranks(self) -> dict[int, tuple[str, int]]:
        """Node and local rank of each rank."""
        return {
            rank.rank: (report.pod, rank.local_rank)
            for report in self.reports
            for rank in report.ranks
        }

    @property
    def generation(self) -> int:
        return max((report.generation for report in self.reports), default=0)

    @property
    def world_size(self) -> int:
        return max((report.world_size for report in self.reports), default=0)

    @property
    def step(self) -> int | None:
        """The last step that a rank of the newest group has finished; None before the first."""
        return _most(rank.step for report in self.reports for rank in report.ranks)

    @property
    def step_seconds(self) -> float | None:
        return _most(rank.step_seconds for report in self.reports for rank in report.ranks)

    @property
    def committed(self) -> int | None:
        """The step of the last checkpoint."""
        return _most([self.saved, *(report.checkpoint_step for report in self.reports)]) or None

    @property
    def restarts_left(self) -> int | None:
        found = [report.restarts_left for report in self.reports]
        return min((left for left in found if left is not None), default=None)

    @property
    def trains(self) -> bool:
        """Whether all agents of the newest group say that its ranks run."""
        reports = self.reports
        return bool(reports) and all(report.state in RUNNING_STATES for report in reports)

    @property
    def is_script(self) -> bool:
        return documents.at(self.config, "script") is not None

    @property
    def max_restarts(self) -> int | None:
        """The number that the job file names; None if it names none."""
        return documents.integer(self.config, "maxRestarts")

    @property
    def bits_are_promised(self) -> bool:
        """Whether a repeated step gives the same bits: with ddp, on CPUs."""
        gpus = documents.integer(self.config, "resources", "gpu") or 0
        return documents.text(self.config, "train", "strategy") == "ddp" and not gpus


def _most(values: Iterable[_Number | None]) -> _Number | None:
    return max((value for value in values if value is not None), default=None)


def silence_bound(situation: Situation) -> float:
    """Seconds after which the other nodes go on without a silent one."""
    nodes = documents.integer(situation.config, "nodes", "max") or len(situation.nodes)
    if documents.text(situation.config, "train", "collectiveTiming") == "off":
        default: int = TrainConfig.model_fields["hang_timeout_seconds"].default
        return documents.number(situation.config, "hangTimeoutSeconds") or default
    if situation.is_script:
        return _SCRIPT_SECONDS
    # repeated from `RendezvousTimings` of kdist_trainer.rendezvous.state, which imports torch:
    # the time between keep-alives, and how many may be missed
    if situation.place == "local":
        return 3 * max(1.0, nodes / 32)
    return max(1.0, nodes / 5) * (4 if nodes <= 8 else 3)


def default_seconds(fault: Fault, situation: Situation) -> float:
    """How long a fault lasts by default: a silence for so long that the others notice it."""
    if fault != "silence":
        return 0.0
    return max(_LEAST_SILENCE, _SILENCE_RATIO * silence_bound(situation))


def why_refused(fault: Fault, situation: Situation, *, node: str = "") -> str:
    """Why the fault must not be tried now, for a node if that is known; empty if it may be."""
    return next(_obstacles(fault, situation, node), "")


def _obstacles(fault: Fault, situation: Situation, node: str) -> Iterator[str]:
    if situation.inactive:
        yield situation.inactive
    if missing := situation.forbidden.get(fault):
        yield f"you may not {missing}"
    if situation.drill:
        yield f"another drill is in progress: {situation.drill}"
    if not situation.documents:
        yield "none of its agents answers: it starts, ends, or cannot be reached from here"
    if not situation.trains:
        states = ", ".join(sorted({report.state for report in situation.reports}))
        yield f"it is not training now ({states or 'unknown'}): a second fault would prove nothing"
    yield from _fatal_obstacles(situation)
    if fault in ("agent", "silence") and situation.place == "cluster":
        for each in _among(situation.documents, node):
            # an image without an init process has the agent as process 1
            if documents.integer(situation.documents[each], "pid") == 1:
                yield (
                    f"the agent of {each} is process 1 of its container, and the kernel drops "
                    "SIGKILL and SIGSTOP to it from inside; the fault `pod` takes the whole pod"
                )
    if fault in ("agent", "pod") and (lost := [*_among(situation.unreturnable, node)]):
        yield f"{lost[0]} could not come back: {situation.unreturnable[lost[0]]}"


def _among(found: Iterable[str], node: str) -> list[str]:
    """Those of the nodes that are this one; all of them if it is not known."""
    return [each for each in found if node in ("", each)]


def _fatal_obstacles(situation: Situation) -> Iterator[str]:
    """Why a fault that ends the worker group must not be tried."""
    if not situation.has_checkpoints:
        yield "it keeps no checkpoints, so all that it has trained would be lost"
    elif not situation.is_script and situation.step is None:
        yield "it has not finished a step yet"
    elif not situation.is_script and situation.committed is None:
        yield (
            f"it has no checkpoint yet, so all {count(situation.step, 'step')} would be done again"
        )
    left = situation.restarts_left
    if left is None and situation.is_script and situation.max_restarts is None:
        yield (
            "its script is not started again: no rank has opened a Checkpointer, and "
            "spec.maxRestarts names no number"
        )
    elif left is None:
        yield "its agents do not say how many restarts are left"
    elif left < _LEAST_RESTARTS:
        named = "" if situation.max_restarts is None else f": {situation.max_restarts}"
        yield (
            f"only {count(left, 'restart')} of maxRestarts"
            f"{named} {'is' if left == 1 else 'are'} left; the next checkpoint resets the count"
        )


def list_warnings(fault: Fault, situation: Situation, *, seconds: float = 0.0) -> Iterator[str]:
    """What the user should know of a fault that may be tried."""
    if situation.is_script and situation.committed is None:
        yield (
            "it is a script that has saved no checkpoint known to kdist: it may begin at its "
            "first step again"
        )
    if fault == "silence":
        bound = silence_bound(situation)
        after = f"the other nodes notice a silent one after about {bound:.0f} s"
        if len(situation.nodes) < 2:
            yield "it has no other node that could notice the silence: it only waits"
        elif seconds > bound:
            yield f"{after}, so they go on without it, or wait for it if they need it"
        else:
            yield f"{after}, so they wait for it"
    if situation.rendezvous == "c10d" and fault in ("agent", "pod", "silence"):
        yield "node 0 holds the rendezvous (c10d): if it is struck, all pods restart and resume"


def describe_risk(situation: Situation) -> str:
    """What a fault may cost, for the question and the preview."""
    step, committed = situation.step, situation.committed
    if step is None or committed is None:
        return "an unknown number of steps, and a restart"
    return f"at most {count(step - committed, 'step')} (since step {committed:,}), and a restart"
