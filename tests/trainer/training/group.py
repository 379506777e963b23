"""Real ranks for tests: forked from a warm server, joined by gloo, each running one function.

    results = run_group(train_once, 2, document, folder)      # what rank 0, rank 1 returned

Functions and arguments travel by pickle: module-level functions and plain values.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.trainer.checkpoint.ranks import prepared_context

PATIENCE = 120.0
"""Seconds for one group, on a machine that others use too."""


class RankFailed(AssertionError):  # noqa: N818 - it reads as what happened
    """A rank raised or died; the text is its traceback or its exit code."""


def run_group(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `function(*args)` on `size` ranks; what each returned, in the order of ranks. Raises
    `RankFailed`.
    """
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is this process's: no port is guessed
        "KDIST_GENERATION": "1",
        "KDIST_RUN_ID": "test",
        **(environment or {}),
    }
    context = prepared_context()
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        variables = {**shared, "RANK": str(rank), "LOCAL_RANK": "0"}
        process = context.Process(
            target=_be_rank, args=(theirs, variables, function, args), daemon=False
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return [
            _result(pipe, process, rank)
            for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True))
        ]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _result(pipe: Connection, process: Any, rank: int) -> Any:
    ready = wait([pipe, process.sentinel], PATIENCE)
    if pipe in ready or pipe.poll():
        try:
            kind, value = pipe.recv()
        except EOFError:
            kind, value = "died", None
        if kind == "returned":
            return value
        if kind == "raised":
            raise RankFailed(f"rank {rank} raised\n{value}")
    process.join(5)
    raise RankFailed(f"rank {rank} ended without a result: exit code {process.exitcode}")


def _be_rank(
    pipe: Connection, variables: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """The child's part. It leaves by `_exit`, as a rank of an agent does: gloo's destructors may
    abort a success.
    """
    for name in ("CHECKPOINTS", "SCRATCH", "METRICS_SOCKET", "DATA", "INIT"):
        os.environ.pop(f"KDIST_{name}", None)
    os.environ.update(variables)
    try:
        result = ("returned", function(*args))
    except BaseException:  # noqa: BLE001 - the parent shows it
        result = ("raised", traceback.format_exc())
    pipe.send(result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
