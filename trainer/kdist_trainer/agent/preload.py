"""What agents and ranks import before their work begins: a process that is going to fork them
imports it once for all.

To import torch, and what the first step of a training needs besides, takes some six seconds of a
core; a fork takes none.

What the forkserver imports once, so that a rank is a fork away: torch, and all that the first
step of a training imports.

Imported by the forkserver only. It watches the lifeline before the long imports: without its agent
it must not live on, and it kills the ranks below it, which cannot do so themselves where they are
stopped or not yet born.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from kdist_trainer import liveness
from kdist_trainer.agent.settings import WORKER

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


liveness.watch(Path(os.environ["KDIST_LIFELINE"]))
# Python warns of forking beside threads; the only other one here sleeps in read(), without a lock.
warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
import_all(RANK)
if os.environ.get("KDIST_ENTRYPOINT") == WORKER:
    import_all(training(Path(os.environ["KDIST_CONFIG"])))
gc.collect()
gc.freeze()  # no collection in a rank writes to the pages it shares with the forkserver
