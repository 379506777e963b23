"""The first lines of a rank that is a function: what forkserver children of the agent run.

The outcome goes into a file and the process ends by `os._exit`, not through torch's result queue: a
rank killed while torch waits with it for the others would block the agent for ever, and destructors
of gloo may abort a rank that has succeeded.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from kdist_trainer import errors, liveness, output, result
from kdist_trainer.config import Exit
from kdist_trainer.instrumentation import fault_handler


def stacks_path(scratch: Path, local_rank: int) -> Path:
    """The file for a rank's stacks, which are dumped on SIGUSR2."""
    return scratch / f"rank-{local_rank}.stacks"


def show_stacks(path: Path) -> None:
    """Write the stacks of all threads to `path` on SIGUSR2, or to stderr if the disk has no room
    for another file.
    """
    try:
        # Kept open for the life of the process: the handler writes to its descriptor, even where
        # Python is stuck.
        faulthandler.register(signal.SIGUSR2, file=path.open("w"), all_threads=True)
    except OSError:
        faulthandler.register(signal.SIGUSR2, all_threads=True)


def init_worker() -> tuple[Path, int]:
    """Lead a process group, die with the agent, print to its log, and dump the stacks on request.

    Returns scratch folder and local rank.
    """
    os.setpgid(0, 0)  # so that the agent kills all of it at once
    scratch, local_rank = Path(os.environ["KDIST_SCRATCH"]), int(os.environ["LOCAL_RANK"])
    output.redirect(scratch, local_rank)
    liveness.watch(Path(os.environ["KDIST_LIFELINE"]))
    show_stacks(stacks_path(scratch, local_rank))
    fault_handler.watch(scratch, local_rank)
    return scratch, local_rank


def run_worker(target: str) -> NoReturn:
    """Run `module:function` of `target`, record its return value for the agent, and end the
    process.

    The exit code is that of the failure, in case the disk takes no record.
    """
    code = int(Exit.USER)
    try:
        scratch, local_rank = init_worker()
        if folder := os.environ.get("KDIST_CODE"):
            sys.path.insert(0, folder)
        module, _, function = target.partition(":")
        outcome = getattr(importlib.import_module(module), function)()
        result.write_result(outcome, scratch=scratch, local_rank=local_rank)
        code = 0
    except BaseException as error:  # noqa: BLE001 - whatever it is, the agent must hear of it
        left = errors.record(error)
        code = int(left.code)
        # an echo of a peer's death stands in the record; printed, it would bury the cause
        if left.primary:
            with contextlib.suppress(OSError):
                traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            # a log on a full disk, or a stream that was closed
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
