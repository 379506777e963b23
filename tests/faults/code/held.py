"""The digits, on storage that holds each file of tensors until two more ranks are lost: option
`losses` is a folder with a file for each rank that was lost.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from kdist_trainer.checkpoint.storage import Operation, observed
from kdist_trainer.workload import WorkloadContext
from kdist_trainer.workloads.digits import Digits

HELD_FOR = 2
_observing = contextlib.ExitStack()


class Held(Digits):
    """Options: see the file."""

    def __init__(self, context: WorkloadContext) -> None:
        options = dict(context.options)
        losses = Path(options.pop("losses"))
        super().__init__(
            WorkloadContext(options, context.data, seed=context.seed, device=context.device)
        )

        def hold(operation: Operation) -> None:
            if operation.name == "fsync" and operation.path.suffix == ".distcp":
                until = count(losses) + HELD_FOR
                while count(losses) < until:
                    time.sleep(0.01)

        _observing.close()
        _observing.enter_context(observed(hold))


def count(losses: Path) -> int:
    """How many ranks were lost."""
    return len(list(losses.iterdir()))
