"""Words about the ranks of a script of which none has formed a process group with the others."""

from __future__ import annotations

from typing import Final

SEPARATE_RANKS_FIX: Final = (
    "to train one model on all ranks, call torch.distributed.init_process_group() and wrap the "
    "model, such as in DistributedDataParallel (docs/how-to/migrating.md); for one rank, "
    "nodes: 1 and procsPerNode: 1"
)
"""What to do about ranks of a script that train without a process group."""


def describe_separate_ranks(ranks: int) -> str:
    """What is known of the ranks of a script of which none has formed a process group with the
    others, without a full stop.

    Args:
        ranks: Their number.
    """
    return (
        f"none of its {ranks} ranks has formed a process group with the others: unless they "
        "exchange by other means than torch.distributed, each has trained a model of its own"
    )
