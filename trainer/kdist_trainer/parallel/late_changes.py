"""Says that a value of the model began to change after the warm-up."""

from __future__ import annotations

import torch.distributed as dist

from kdist_trainer import log


def report_late(names: set[str], *, differ: bool) -> None:
    """Log that values which seemed constant, or the same on every rank, are not."""
    what = f"{len(names)} values of the model ({min(names)})"
    before = ", before that each had its own" if differ else ""
    log.warn(
        "buffers-late",
        message=f"{what} changed for the first time after the warm-up: ranks synchronize them "
        f"from now on{before}",
    )
    if differ and dist.get_rank() == 0:
        why = f"{what} were different on the ranks until they were synchronized"
        log.event(
            "not-reproducible",
            why=why,
            message=f"the training continues correctly, but is not bitwise identical: {why}",
        )
