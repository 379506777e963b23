"""Imported by the forkserver only: preloads torch and all that the first training step imports.

A worker process is then one fork away. The lifeline is watched before the long imports: without its
agent the forkserver must exit, and it kills the worker processes below it, which cannot exit by
themselves while they are stopped or not yet started.
"""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path

from kdist_trainer import liveness
from kdist_trainer.agent import preload_modules
from kdist_trainer.agent.settings import WORKER

liveness.watch(Path(os.environ["KDIST_LIFELINE"]))
# Python warns of forking beside threads; the only other one here sleeps in read(), without a lock.
warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
preload_modules.import_all(preload_modules.RANK)
if os.environ.get("KDIST_ENTRYPOINT") == WORKER:
    preload_modules.import_all(preload_modules.training(Path(os.environ["KDIST_CONFIG"])))
gc.collect()
gc.freeze()  # no collection in a rank writes to the pages it shares with the forkserver
