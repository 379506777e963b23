"""What a drill does (`FaultPlan`), and its job (`DrillTarget`), which is a run on this machine
(`local`) or in a cluster (`cluster`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.resources import files
from typing import Protocol

from kdist.drill.faults import Fault, Situation
from kdist.drill.report import Ledger
from kdist.errors import KdistError
from kdist.units import seconds


def refuse_second(job: str, drill: str) -> KdistError:
    """The error of a drill of a job that has one already."""
    return KdistError(f"another drill of {job} is in progress: {drill}")


class Program(Protocol):
    """The program `injection` while it runs next to an agent."""

    def read_line(self, timeout: float) -> bytes | None:
        """The next line that it prints; None if it ended, or printed nothing in time."""

    def is_open(self) -> bool:
        """Whether it still runs."""


@dataclass(frozen=True)
class FaultPlan:
    """What a drill does.

    Attributes:
        fault: the fault.
        node: the agent that it strikes, or on whose node it begins.
        rank: the rank that it kills; None for other faults.
        local_rank: the number of that rank on its node.
        agent: the process id of the agent.
        seconds: how long it lasts; 0 for a fault that does not.
    """

    fault: Fault
    node: str
    rank: int | None
    local_rank: int
    agent: int
    seconds: float

    @property
    def target(self) -> str:
        """What it strikes, in words."""
        return {
            "rank": f"rank {self.rank} on {self.node}",
            "agent": f"the agent of {self.node}",
            "pod": self.node,
            "silence": f"all processes of {self.node}",
        }[self.fault]

    @property
    def action(self) -> str:
        """What it does, as a verb with its object."""
        verbs = {"rank": "kills", "agent": "kills", "pod": "takes away", "silence": "stops"}
        verb = verbs[self.fault]
        lasting = f" for {seconds(self.seconds)}" if self.seconds else ""
        return f"{verb} {self.target}{lasting}"

    @property
    def arguments(self) -> list[str]:
        """Options of the program `injection`."""
        named = {"--agent": self.agent, "--local-rank": self.local_rank, "--seconds": self.seconds}
        return [str(word) for each in named.items() for word in each]


class DrillTarget(Protocol):
    """A job, and how it is reached; `interval` is the seconds between two looks at it."""

    interval: float

    def look(self, *, without: str = "") -> Situation:
        """The job now. The agent `without` is not asked: it is silent."""

    def read_ledger(self) -> Ledger:
        """The ledger of its run, as far as it can be read."""

    def find_drill(self) -> str:
        """The drill that is in progress, in words; empty without one."""

    def find_forbidden(self) -> Mapping[Fault, str]:
        """The rights that the user lacks, for each fault that needs them."""

    def require_rights(self, fault: Fault) -> None:
        """Raises `KdistError` (FORBIDDEN) if the user lacks a right for a fault."""

    def claim(self, plan: FaultPlan) -> AbstractContextManager[object]:
        """Keep other drills away. Raises `KdistError` if there is one."""

    def start_program(self, plan: FaultPlan, action: str) -> AbstractContextManager[Program]:
        """Run the program `injection` next to the agent of the plan; it ends with the context."""

    def delete_pod(self, node: str) -> bool:
        """Delete the pod of an agent; False where agents have no pods."""


def program_source() -> str:
    """The text of the program `injection`."""
    return files("kdist.drill").joinpath("injection.py").read_text(encoding="utf-8")
