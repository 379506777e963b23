"""Names the modules that agents and workers import before their work begins.

Importing torch and everything else that the first training step needs takes about six seconds of
CPU time. A process that forks agents or workers imports these modules once for all of them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

AGENT = (
    "kdist_trainer.agent.agent",
    "kdist_trainer.rendezvous.handler",
    "kdist_trainer.agent.worker_entry",
)
RANK = ("torch.distributed.elastic.multiprocessing.api", "kdist_trainer.agent.worker_entry")
_TRAINING = (
    "torch.nn.parallel",
    "torch._dynamo",  # the first DDP(...) imports it: most of a second
    "torch.distributed.checkpoint.state_dict",
    "kdist_trainer.worker",
)


def training(config: Path) -> Iterator[str]:
    """The modules that the workers of the managed training at `config` import. A user's own
    workload is not one of them, since it may do anything on import.
    """
    yield from _TRAINING
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        name: str = json.loads(config.read_bytes())["train"]["workload"]
        if name.isidentifier():
            yield (module := f"kdist_trainer.workloads.{name}")
            yield from getattr(sys.modules.get(module), "PRELOAD", ())


def import_all(modules: Iterable[str]) -> None:
    """Import the modules, ignoring those that fail: their users will raise the error.

    Garbage is collected after it: imports leave little, and looking for it takes a quarter of the
    time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        for module in modules:
            with contextlib.suppress(Exception):
                importlib.import_module(module)
    finally:
        if enabled:
            gc.enable()
