"""An agent's `/status` document, taken as what it is: words from a pod, which may be old, foreign
or broken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kdist.status import documents
from kdist.status.exit_record import ExitRecord

WORKING = ("running", "checkpointing")
MEETING = ("pending", "rendezvous", "initializing")
OVER = ("succeeded", "failed")


@dataclass(frozen=True)
class RankStatus:
    """One rank as its agent sees it. Seconds are means or smoothed times of a step; `silence` is
    since its last sign of life.

    `collective` is the one that it is in, such as `all_reduce(float32[1024]) #17`; empty in none.
    """

    rank: int
    pod: str
    local_rank: int = 0
    step: int | None = None
    phase: str = ""
    step_seconds: float | None = None
    busy_seconds: float | None = None
    all_reduce_seconds: float | None = None
    silence: float | None = None
    collective: str = ""


@dataclass(frozen=True)
class AgentStatus:
    """What one agent says. Numbers that it does not know are None; a loss may be NaN."""

    pod: str
    state: str
    run_id: str = ""
    generation: int = 0
    world_size: int = 0
    step: int | None = None
    target_steps: int | None = None
    loss: float | None = None
    learning_rate: float | None = None
    samples_per_second: float | None = None
    restarts: int = 0
    restarts_left: int | None = None
    lost_steps: int = 0
    checkpoint_step: int | None = None
    checkpoint_time: float | None = None
    ranks: tuple[RankStatus, ...] = ()
    exit: ExitRecord | None = None

    @property
    def parked(self) -> bool:
        """Whether the agent's work is over, though its pod stays."""
        return self.state in OVER

    @classmethod
    def read(cls, pod: str, document: object) -> AgentStatus | None:
        """The report in a `/status` document; None if it says nothing."""
        state = documents.text(document, "state")
        if not state:
            return None
        return cls(
            pod=pod,
            state=state,
            run_id=documents.text(document, "run_id"),
            generation=documents.integer(document, "generation") or 0,
            world_size=documents.integer(document, "world_size") or 0,
            step=documents.integer(document, "step"),
            target_steps=documents.integer(document, "target_steps"),
            loss=documents.number(document, "loss"),
            learning_rate=documents.number(document, "learning_rate"),
            samples_per_second=documents.number(document, "samples_per_second"),
            restarts=documents.integer(document, "restarts") or 0,
            restarts_left=documents.integer(document, "restarts_remaining"),
            lost_steps=documents.integer(document, "lost_steps") or 0,
            checkpoint_step=documents.integer(document, "last_checkpoint_step"),
            checkpoint_time=documents.number(document, "last_checkpoint_time"),
            ranks=tuple(_ranks(pod, document)),
            exit=ExitRecord.read(documents.at(document, "exit")),
        )


def _ranks(pod: str, document: object) -> list[RankStatus]:
    found = []
    for each in documents.items(document, "ranks"):
        rank = documents.integer(each, "rank")
        if rank is None:
            continue
        found.append(
            RankStatus(
                rank=rank,
                pod=pod,
                local_rank=documents.integer(each, "local_rank") or 0,
                step=documents.integer(each, "step"),
                phase=documents.text(each, "phase"),
                step_seconds=documents.number(each, "step_seconds"),
                busy_seconds=documents.number(each, "busy_seconds"),
                all_reduce_seconds=documents.number(each, "all_reduce_seconds"),
                silence=documents.number(each, "heartbeat_age"),
                collective=documents.text(each, "collective"),
            )
        )
    return found


def read_all(documents: Mapping[str, object], *, run_id: str) -> dict[str, AgentStatus]:
    """The reports of this run by pod; what another run's agent says is left out, where both say
    which run they are of.
    """
    read = {pod: AgentStatus.read(pod, document) for pod, document in documents.items()}
    return {
        pod: report
        for pod, report in read.items()
        if report and (not run_id or report.run_id in ("", run_id))
    }


def latest(reports: Mapping[str, AgentStatus]) -> list[AgentStatus]:
    """The reports of the newest generation, the one with rank 0 first: an agent that was cut off
    still shows an old one.
    """
    newest = max((report.generation for report in reports.values()), default=0)
    current = [report for report in reports.values() if report.generation == newest]
    return sorted(
        current, key=lambda report: min((rank.rank for rank in report.ranks), default=1 << 30)
    )
