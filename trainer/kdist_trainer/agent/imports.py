"""What agents and ranks import before their work begins: a process that is going to fork them
imports it once for all.

To import torch, and what the first step of a training needs besides, takes some six seconds of a
core; a fork takes none.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

AGENT = (
    "kdist_trainer.agent.elastic",
    "kdist_trainer.rendezvous.dynamic",
    "kdist_trainer.agent.entry",
)
RANK = ("torch.distributed.elastic.multiprocessing.api", "kdist_trainer.agent.entry")
_TRAINING = (
    "torch.nn.parallel",
    "torch._dynamo",  # the first DDP(...) imports it: most of a second
    "torch.distributed.checkpoint.state_dict",
    "kdist_trainer.worker",
)


def training(config: Path) -> Iterator[str]:
    """What the ranks of the managed training at `config` import. A user's own workload may do
    anything on import: not that.
    """
    yield from _TRAINING
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        name: str = json.loads(config.read_bytes())["train"]["workload"]
        if name.isidentifier():
            yield (module := f"kdist_trainer.workloads.{name}")
            yield from getattr(sys.modules.get(module), "PRELOAD", ())


def import_all(modules: Iterable[str]) -> None:
    """Import what can be imported: whoever needs the rest will say why it cannot be had."""
    for module in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
