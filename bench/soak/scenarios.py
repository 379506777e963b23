"""What a soak disturbs, and how: a job, and the accidents that befall it in turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

CODE = Path(__file__).parent / "code"
INTERVAL_SECONDS = 5
HOLD_SECONDS = 30.0
"""How long the storage stops answering in the middle of a save."""


class Accident(NamedTuple):
    """What befalls a job: a rank is killed, an agent is, or the storage pauses."""

    what: Literal["rank", "agent", "storage"]
    node: str = ""
    rank: int = 0
    """Its number on the node."""


class Scenario(NamedTuple):
    """A job and the accidents that befall it in turn, each `pause` seconds after the job has come
    back from the one before.
    """

    name: str
    nodes: int
    procs: int
    accidents: Sequence[Accident]
    recovery: Literal["inPlace", "restart", "script"] = "inPlace"
    pause: float = 4.0

    def job(self, hold: Path) -> dict[str, Any]:
        """The document of the job, whose saves wait while the file `hold` is there."""
        spec: dict[str, Any] = {
            "image": "none",
            "nodes": self.nodes,
            "procsPerNode": self.procs,
            "maxRestarts": 100_000,
            "code": str(CODE),
        }
        if self.recovery == "script":
            spec["script"] = {"path": "script.py", "args": [str(hold)]}
        else:
            spec["train"] = {
                "workload": "soaked:Soaked",
                "options": {"hold": str(hold)},
                "steps": 10**9,
                "globalBatch": 240,
                "evaluate": "never",
                "recovery": self.recovery,
                "checkpoint": {"every": {"seconds": INTERVAL_SECONDS}},
            }
        return {
            "apiVersion": "kdist.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": self.name},
            "spec": spec,
        }


STORAGE = Accident("storage")
OTHER, FIRST = Accident("rank", "node-1"), Accident("rank", "node-0")
"""FIRST is the rank 0 of the whole group, as long as no node joins again."""
FOUR = [Accident("rank", "node-1", number) for number in range(4)]
ANY = [OTHER, FIRST, Accident("agent", "node-1"), OTHER, FIRST, Accident("agent", "node-0")]
SCENARIOS = (
    Scenario("in-place-2", 2, 1, [*[OTHER] * 40, STORAGE]),
    Scenario("in-place-8", 2, 4, [*FOUR * 10, STORAGE], pause=8.0),
    Scenario("in-place-any", 2, 1, ANY),
    Scenario("restart-2", 2, 1, [*ANY * 3, STORAGE], recovery="restart"),
    Scenario("script-2", 2, 1, [*ANY * 3, STORAGE], recovery="script"),
)
