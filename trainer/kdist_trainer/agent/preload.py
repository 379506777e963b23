"""What the forkserver imports once, so that a rank is a fork away: torch, and all that the first
step of a training imports.

Imported by the forkserver only. It watches the lifeline before the long imports: without its agent
it must not live on, and it kills the ranks below it, which cannot do so themselves where they are
stopped or not yet born.
"""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path

from kdist_trainer import lifeline
from kdist_trainer.agent import imports
from kdist_trainer.agent.settings import WORKER

lifeline.watch(Path(os.environ["KDIST_LIFELINE"]))
# Python warns of forking beside threads; the only other one here sleeps in read(), without a lock.
warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
imports.import_all(imports.RANK)
if os.environ.get("KDIST_ENTRYPOINT") == WORKER:
    imports.import_all(imports.training(Path(os.environ["KDIST_CONFIG"])))
gc.collect()
gc.freeze()  # no collection in a rank writes to the pages it shares with the forkserver
