"""The digits, on storage that stops answering at one operation of each save while a file says so.

Option `folder` is where the files are: with `hold` in it, a save waits at the operation that option
`at` names, and `reached-PID` says that this process does, and of which step. Once `bad` is there,
rank 0's next loss is not a number, and `was-bad` is left.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from kdist_trainer.checkpoint.manifest import NAME_PATTERN
from kdist_trainer.checkpoint.storage import Operation, observed
from kdist_trainer.workload import WorkloadContext
from kdist_trainer.workloads.digits import Digits

_STEP = re.compile(r"step-(\d+)-e\d+")
_observing = contextlib.ExitStack()


def is_at(operation: Operation, at: str) -> bool:
    """Whether a save has come to `write` its tensors, to its `manifest`, to the `rename` of its
    folder, or to `latest`, or a group to the `lock` of the folder.
    """
    name, target = operation.name, operation.target
    return {
        "write": name == "fsync" and operation.path.suffix == ".distcp",
        "manifest": name == "fsync" and operation.path.name == "manifest.json",
        "rename": name == "rename" and NAME_PATTERN.fullmatch(target.name if target else ""),
        "lock": name == "create" and operation.path.parent.name == "lock",
        "latest": name == "replace" and target is not None and target.name == "LATEST",
    }[at] not in (False, None)


def hold_storage(folder: Path, at: str) -> None:
    """Have the saves of this process wait there while `hold` is in the folder."""
    step = [0]

    def hold(operation: Operation) -> None:
        if found := _STEP.search(str(operation.path)):
            step[0] = int(found[1])
        if not is_at(operation, at) or not (folder / "hold").exists():
            return
        mark = folder / f"writing-{os.getpid()}"
        mark.write_text(str(step[0]))
        mark.replace(folder / f"reached-{os.getpid()}")
        while (folder / "hold").exists():
            time.sleep(0.01)

    _observing.close()
    _observing.enter_context(observed(hold))


class Paused(Digits):
    """Options: see the file."""

    def __init__(self, context: WorkloadContext) -> None:
        options = dict(context.options)
        folder, at = Path(options.pop("folder")), options.pop("at")
        super().__init__(
            WorkloadContext(options, context.data, seed=context.seed, device=context.device)
        )
        self._folder = folder
        hold_storage(folder, at)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """See base class."""
        loss, count = super().loss(model, batch)
        bad = self._folder / "bad"
        if dist.is_initialized() and dist.get_rank() == 0 and bad.exists():
            bad.rename(bad.with_name("was-bad"))
            loss = loss * math.nan
        return loss, count
