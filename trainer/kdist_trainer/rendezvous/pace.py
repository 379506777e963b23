"""How often agents look at what they share, and how soon they lose patience with each other."""

from __future__ import annotations

import random
from dataclasses import dataclass

JITTER = random.SystemRandom()
"""Spreads the agents' requests. It is not the module's generator, which user code may have seeded."""


@dataclass(frozen=True)
class Pace:
    """Timings in seconds. They grow with the number of nodes, so that a store sees about the same load from any job."""

    poll: float
    """Between two looks at the state while a group forms."""
    watch: float
    """The same while it is at work."""
    keep_alive: float
    """Between two signs of life; a node without `keep_alive_attempts` of them in a row is taken for dead."""
    keep_alive_attempts: int
    spread: float
    """Over how long nodes spread at most that want to change the state at the same time."""
    last_call: float
    """How long a round with enough nodes waits for more when nobody is known to be on the way."""
    patience: float
    """How long it waits at most for those that are, and in the first round for all: nodes are seldom ready together."""

    @classmethod
    def for_nodes(cls, nodes: int, *, remote: bool = False) -> Pace:
        """What suits a job of at most `nodes` nodes; if `remote`, each look and each sign of life asks an API server."""
        call = {"last_call": 0.3 + nodes / 64, "patience": 5.0 + nodes / 32}
        if remote:  # at work about five changes and a dozen looks a second, from however many nodes
            return cls(
                poll=min(1.0, max(0.1, nodes / 64)),
                watch=max(1.0, nodes / 12),
                keep_alive=max(1.0, nodes / 5),
                keep_alive_attempts=4 if nodes <= 8 else 3,
                spread=min(2.0, max(0.1, nodes * 0.03)),
                **call,
            )
        return cls(
            poll=min(1.0, max(0.05, nodes / 80)),
            watch=min(1.0, max(0.05, nodes / 80)),
            keep_alive=max(1.0, nodes / 32),
            keep_alive_attempts=3,
            spread=min(0.5, max(0.02, nodes * 0.002)),
            **call,
        )
