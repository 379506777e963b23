"""The entry point of a worker that is a function; children of the agent's forkserver run it.

The worker writes its outcome to a file and exits by `os._exit`. torch's result queue is not used: a
worker killed while torch waits in it for the others would block the agent forever. And destructors
of gloo may abort a worker that has succeeded.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from kdist_trainer import failure, liveness, output, result
from kdist_trainer.config import Exit
from kdist_trainer.instrumentation import fault_handler


def init_worker() -> tuple[Path, int]:
    """Make this process a group leader that dies with the agent, prints to the agent's log, and
    dumps its stacks on request.

    Returns:
        The scratch folder and the local rank.
    """
    os.setpgid(0, 0)  # the agent kills the whole group at once
    scratch, local_rank = Path(os.environ["KDIST_SCRATCH"]), int(os.environ["LOCAL_RANK"])
    output.redirect(scratch, local_rank)
    liveness.watch(Path(os.environ["KDIST_PARENT_PIPE"]))
    fault_handler.register_stack_dump(scratch, local_rank)
    fault_handler.watch(scratch, local_rank)
    return scratch, local_rank


def run_worker(target: str) -> NoReturn:
    """Run the function `target`, given as `module:function`, write its return value for the agent,
    and exit.

    After a failure the exit code is that of the failure, in case it cannot be written.
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
    except BaseException as error:  # noqa: BLE001 - every error must be recorded for the agent
        recorded = failure.record(error)
        code = int(recorded.code)
        # the traceback of a secondary failure in the log would hide the root cause
        if recorded.primary:
            with contextlib.suppress(OSError):
                traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            # a log on a full disk, or a stream that was closed
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
