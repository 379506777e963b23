"""Which process of a rank is replaced by a new one, since too many groups that it has left are
still waited in: each of them holds threads, descriptors and memory until its time-out.

The new process takes over in place, so another rank must hold the state. It happens where a group
forms anyway, after a loss; where no group does, the agents begin one for it. The agent with group
rank 0 decides for all, so that never two ranks are replaced at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from kdist_trainer.liveness import RankSnapshot

NOBODY = ("", -1)


class KeptRank(NamedTuple):
    """A rank that has left its group, as its agent tells the others; a list in JSON."""

    local_rank: int
    step: int
    """The step whose state it has; -1 for none."""
    crowd: int
    """The groups that are still waited in, if they are too many; else 0."""


def choose_renewed(kept: Mapping[str, Iterable[Sequence[int]]]) -> tuple[str, int]:
    """The rank whose process is to be replaced, of those that are kept, by node: the node and the
    local rank; `NOBODY` if none is to be, or none can be without losing the newest state.
    """
    ranks = [(node, KeptRank(*each)) for node, those in kept.items() for each in those]
    newest = max((each.step for _, each in ranks), default=-1)
    holders = sum(each.step == newest for _, each in ranks)
    crowded = [
        (-each.crowd, node, each.local_rank)
        for node, each in ranks
        if each.crowd and newest >= 0 and (each.step < newest or holders > 1)
    ]
    _, node, local_rank = min(crowded, default=(0, *NOBODY))
    return node, local_rank


def is_renewal_due(
    crowds: Collection[int], snapshots: Iterable[RankSnapshot], *, nodes: int, from_step: int
) -> bool:
    """Whether the agents are to begin a new group, in which one of the ranks of this node is
    replaced: only where there are others, and a step shows that they hold the state.

    Args:
        crowds: What each rank of this node has told.
        snapshots: Their heartbeats.
        nodes: The number of nodes of the group.
        from_step: The step that the group has begun with.
    """
    others = nodes > 1 or len(crowds) > 1
    return others and any(crowds) and all(each.step > from_step for each in snapshots)
