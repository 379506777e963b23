"""Imported by the forkserver only: preloads torch and all that the first training step imports.

Starting a worker process then takes only a fork. The forkserver watches the agent's parent-death
pipe before the long imports: without its agent it must exit, and it kills the worker processes
below it, which cannot exit by themselves while they are stopped or not yet started.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from kdist_trainer.agent import forkserver
from kdist_trainer.agent.settings import WORKER
from kdist_trainer.processes import liveness, script_forkserver

liveness.watch(Path(os.environ["KDIST_PARENT_PIPE"]))
# Python warns of a fork with other threads; the only one sleeps in read() and holds no lock.
warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
forkserver.import_all(forkserver.RANK_MODULES)
if os.environ.get("KDIST_ENTRYPOINT") == WORKER:
    forkserver.import_all(forkserver.training_modules(Path(os.environ["KDIST_CONFIG"])))
    forkserver.register_gloo()
    forkserver.look_up_operators()
    forkserver.build_config()
script_forkserver.share_with_forks()
