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

from kdist_trainer.config import Exit
from kdist_trainer.instrumentation import fault_handler
from kdist_trainer.ipc import failure, output, result
from kdist_trainer.ipc.control import WAITING_VARIABLE
from kdist_trainer.processes import liveness


def init_worker() -> None:
    """Make this process a group leader that dies with the agent, prints to the agent's log, and
    dumps its stacks on request.

    A worker that has no group yet prints as one of no rank, and does the last when it joins one:
    its local rank may be that of another worker, or of none.
    """
    os.setpgid(0, 0)  # the agent kills the whole group at once
    scratch, local_rank = _place()
    if WAITING_VARIABLE in os.environ:
        output.redirect(scratch, output.EARLY)
    else:
        output.redirect(scratch, local_rank)
        fault_handler.register_stack_dump(scratch, local_rank)
        fault_handler.watch(scratch, local_rank)
    liveness.watch(Path(os.environ["KDIST_PARENT_PIPE"]))


def _place() -> tuple[Path, int]:
    """The scratch folder and the local rank."""
    return Path(os.environ["KDIST_SCRATCH"]), int(os.environ["LOCAL_RANK"])


def run_worker(target: str) -> NoReturn:
    """Run the function `target`, given as `module:function`, write its return value for the agent,
    and exit.

    After a failure the exit code is that of the failure, in case it cannot be written.
    """
    code = int(Exit.USER)
    try:
        init_worker()
        if folder := os.environ.get("KDIST_CODE"):
            sys.path.insert(0, folder)
        module, _, function = target.partition(":")
        outcome = getattr(importlib.import_module(module), function)()
        scratch, local_rank = _place()  # in the group, in which it may be another one
        result.write_result(outcome, scratch=scratch, local_rank=local_rank)
        code = 0
    except BaseException as error:  # noqa: BLE001 - every error must be recorded for the agent
        # a worker without a group has no rank whose failure this is
        has_group = WAITING_VARIABLE not in os.environ
        recorded = failure.record(error) if has_group else failure.describe(error)
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
