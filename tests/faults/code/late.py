"""The digits, by a workload that fails where a test wants it: option `orders` is a folder, and the
file `fail` in it says on which node, how, and whether only without a group.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from kdist_trainer.workload import WorkloadContext
from kdist_trainer.workloads.digits import Digits


class Late(Digits):
    """Fails as the order says."""

    def __init__(self, context: WorkloadContext) -> None:
        options = dict(context.options)
        orders = Path(options.pop("orders"))
        super().__init__(
            WorkloadContext(options, context.data, seed=context.seed, device=context.device)
        )
        if not (orders / "fail").exists():
            return
        order = json.loads((orders / "fail").read_text())
        waits = "KDIST_WAITS_FOR_GROUP" in os.environ
        if os.environ["KDIST_NODE"] != order["node"] or (order["waiting"] and not waits):
            return
        (orders / f"failed-{os.getpid()}").write_text(os.environ["RANK"])
        if order["how"] == "exit":
            os._exit(7)
        raise ValueError("ordered to fail")
