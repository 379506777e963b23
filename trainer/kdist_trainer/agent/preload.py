"""Imported by the forkserver only: preloads torch and all that the first training step imports.

Starting a worker process then takes only a fork. The forkserver watches the agent's parent-death
pipe before the long imports: without its agent it must exit, and it kills the worker processes
below it, which cannot exit by themselves while they are stopped or not yet started.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from kdist_trainer import forked_memory, liveness
from kdist_trainer.agent import preload_modules
from kdist_trainer.agent.settings import WORKER

liveness.watch(Path(os.environ["KDIST_PARENT_PIPE"]))
# Python warns of a fork with other threads; the only one sleeps in read() and holds no lock.
warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
preload_modules.import_all(preload_modules.RANK_MODULES)
if os.environ.get("KDIST_ENTRYPOINT") == WORKER:
    preload_modules.import_all(preload_modules.training_modules(Path(os.environ["KDIST_CONFIG"])))
    preload_modules.register_gloo()
    preload_modules.look_up_operators()
    preload_modules.build_config()
forked_memory.share_with_forks()
