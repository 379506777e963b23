"""What the forkserver imports once, so that a rank is a fork away: torch, and all that the first step of a training imports.

Imported by the forkserver only. It watches the lifeline before the long imports: without its agent it must not live on, and
it kills the ranks below it, which cannot do so themselves where they are stopped or not yet born.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from kdist_trainer import lifeline
from kdist_trainer.agent.settings import WORKER

_ANY = ("torch.distributed.elastic.multiprocessing.api", "kdist_trainer.agent.entry")
_TRAINING = (
    "torch.nn.parallel",
    "torch._dynamo",  # the first DDP(...) imports it: most of a second
    "torch.distributed.checkpoint.state_dict",
    "kdist_trainer.worker",
)


def _modules() -> Iterator[str]:
    """All that is to be imported. A user's own workload is not: it may do anything on import, so it waits for the rank."""
    yield from _ANY
    if os.environ.get("KDIST_ENTRYPOINT") != WORKER:
        return
    yield from _TRAINING
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        name: str = json.loads(Path(os.environ["KDIST_CONFIG"]).read_bytes())["train"]["workload"]
        if name.isidentifier():
            yield (module := f"kdist_trainer.workloads.{name}")
            yield from getattr(sys.modules.get(module), "PRELOAD", ())


lifeline.watch(Path(os.environ["KDIST_LIFELINE"]))
# Python warns of forking beside threads; the only other thread here sleeps in read() and holds no lock.
warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
for _module in _modules():
    with contextlib.suppress(Exception):  # the rank that needs it will say why it cannot be had
        importlib.import_module(_module)
gc.collect()
gc.freeze()  # no collection in a rank writes to the pages it shares with the forkserver
