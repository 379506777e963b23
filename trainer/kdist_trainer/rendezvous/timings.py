"""How often the agents of a job poll the rendezvous, send keep-alives and try again."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_SINGLE = 8
_CONNECT_SECONDS, _CONNECT_POLLS = 1.0, 4


@dataclass(frozen=True)
class RendezvousTimings:
    """Timings in seconds. They grow with the number of nodes, so that a store sees about the same
    load from any job.
    """

    nodes: int
    """The most nodes of the job."""
    poll: float
    """The poll interval of the state while a round is open."""
    first_poll: float
    """The first such interval after this node has changed the state, since others answer such a
    change at once; each one is longer than the one before.
    """
    watch: float
    """The poll interval of the state while workers run."""
    relay: float
    """The interval at which one agent reads the state for all others, while workers run."""
    keep_alive: float
    """The interval of keep-alives; a node that misses `keep_alive_attempts` of them in a row counts
    as dead.
    """
    keep_alive_attempts: int
    write: float
    """About how long the store is busy with one change of the state."""
    pace: float
    """The longest random pause of a node before it joins."""
    gathers: bool
    """Whether nodes join together: each join replaces the whole state if it has not changed since,
    so joins that meet are repeated, all but one.
    """
    spread: float
    """The longest random pause of nodes that want to change the state at the same time."""
    max_wait: float
    """How long a round with enough nodes waits at most for nodes that are known to be joining, and
    in the first round for all nodes: they are seldom ready together.
    """

    def connect_seconds(self, failures: int) -> float:
        """How long the members of a complete round may take to see that it is complete and connect
        to its host, after so many failed exchanges in a row: a slow node gets more time.
        """
        return max(_CONNECT_SECONDS, _CONNECT_POLLS * self.poll) * 2.0 ** min(failures, 4)

    @classmethod
    def for_nodes(cls, nodes: int, *, remote: bool = False) -> RendezvousTimings:
        """The timings for a job of at most `nodes` nodes; if `remote`, each poll and each
        keep-alive is a request to an API server.
        """
        max_wait = 5.0 + nodes / 32
        if remote:  # without the relay: about five writes and a dozen reads a second in total
            keep_alive = max(1.0, nodes / 5)
            return cls(
                nodes=nodes,
                poll=(poll := min(2.0, max(0.1, nodes / 128))),
                first_poll=poll,
                watch=max(1.0, nodes / 12),
                relay=min(1.0, keep_alive / 4),
                keep_alive=keep_alive,
                keep_alive_attempts=4 if nodes <= 8 else 3,
                write=0.02,
                pace=nodes * 0.002 if nodes > _MOST_SINGLE else 0.0,
                gathers=nodes > _MOST_SINGLE,
                spread=min(5.0, max(0.1, nodes * 0.03)),
                max_wait=max_wait,
            )
        return cls(
            nodes=nodes,
            poll=(poll := min(1.0, max(0.05, nodes / 80))),
            first_poll=0.005 if nodes <= _MOST_SINGLE else poll,
            watch=min(1.0, max(0.05, nodes / 80)),
            relay=min(1.0, max(0.05, nodes / 80)),
            keep_alive=max(1.0, nodes / 32),
            keep_alive_attempts=3,
            write=0.0,
            pace=0.0,
            gathers=False,
            spread=min(0.5, max(0.02, nodes * 0.002)),
            max_wait=max_wait,
        )
