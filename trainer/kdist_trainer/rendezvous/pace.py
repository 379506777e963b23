"""How often agents look at what they share, and how soon they lose patience with each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """Timings in seconds. They grow with the number of nodes, so that a store sees about the same load from any job."""

    poll: float
    """Between two looks at the state while a group forms."""
    watch: float
    """The same while it is at work."""
    keep_alive: float
    keep_alive_attempts: int
    last_call: float
    """How long a round with enough nodes waits for more when nobody is known to be on the way."""
    patience: float
    """How long it waits at most for those that are, and in the first round for all: nodes are seldom ready together."""

    @classmethod
    def for_nodes(cls, nodes: int, *, remote: bool = False) -> Pace:
        """What suits a job of at most `nodes` nodes; if `remote`, each look and each sign of life asks an API server."""
        slowly = 1.0 if remote else 0.5
        return cls(
            poll=min(1.0, max(0.1 if remote else 0.05, nodes / 64 if remote else nodes / 80)),
            watch=max(0.5, nodes / 12) if remote else min(1.0, max(0.05, nodes / 80)),
            keep_alive=max(1.0, slowly * nodes / 16),
            keep_alive_attempts=4 if remote else 3,
            last_call=0.3 + nodes / 64,
            patience=5.0 + nodes / 32,
        )
