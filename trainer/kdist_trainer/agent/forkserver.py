"""The forkserver of the workers, started as a fork of the agent, so that a node imports torch once
and holds it in memory once.

The server itself is multiprocessing's; only its start differs. A new interpreter would import torch
again, so the server is a fork of the agent, which must have no running threads and no CUDA context
yet. If the server dies, multiprocessing starts the next one as usual.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterable, Sequence
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any, NoReturn

from kdist_trainer.agent import preload_modules
from kdist_trainer.signals import leave_stops_to_others

_PRELOAD = "kdist_trainer.agent.preload"
"""What the server imports in addition, while the agent joins the rendezvous."""


def start() -> None:
    """Import torch, then fork the server. Main thread only, before this process starts threads or
    uses a GPU.
    """
    preload_modules.import_all(preload_modules.AGENT_MODULES)
    multiprocessing.set_forkserver_preload([_PRELOAD])
    resource_tracker.ensure_running()
    util.spawnv_passfds = _fork  # what multiprocessing starts the server with
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = _SPAWN


_SPAWN = util.spawnv_passfds


def _fork(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:  # noqa: ARG001 - the standard library's signature
    """Start the server by a fork instead of `python -c PROGRAM`; returns its pid.

    Args:
        path: The path of the interpreter, which is not used.
        args: Its arguments, of which the last one is the program.
        passfds: The descriptors that the server keeps.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    gc.collect()
    with warnings.catch_warnings():
        # The other threads, if any, sleep in read() or belong to a numerical library, which handles
        # forks.
        warnings.filterwarnings(
            "ignore", message=".*multi-threaded.*fork", category=DeprecationWarning
        )
        pid = os.fork()
    if pid == 0:
        _serve(args[-1], passfds)
    return pid


def _serve(program: str, kept: Sequence[int]) -> NoReturn:
    """Run the server in the fork, without the agent's descriptors, above all its parent-death pipe,
    and without its signal handlers.
    """
    code = 1
    try:
        close_descriptors(keep=kept)
        leave_stops_to_others()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        util.spawnv_passfds = _SPAWN
        forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]  # the agent holds the inherited one
        arguments, keywords = read_call(program)
        forkserver.main(*arguments, **keywords)
    except SystemExit:
        code = 0
    except BaseException:  # noqa: BLE001 - the agent's own code must not continue in the fork
        traceback.print_exc()
    finally:
        os._exit(code)


def close_descriptors(*, keep: Iterable[int] = ()) -> None:
    """Close all inherited descriptors except the standard streams and those in `keep`."""
    for descriptor in {int(path.name) for path in Path("/dev/fd").iterdir()} - {0, 1, 2, *keep}:
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            os.close(descriptor)


def read_call(program: str) -> tuple[list[Any], dict[str, Any]]:
    """The positional and keyword arguments of the call at the end of `program`, such as `import it;
    it(1, "two", **{"three": 3})`.
    """
    last = ast.parse(program).body[-1]
    assert isinstance(last, ast.Expr)  # noqa: S101 - the program is multiprocessing's
    assert isinstance(last.value, ast.Call)  # noqa: S101
    keywords: dict[str, Any] = {}
    for keyword in last.value.keywords:
        value = ast.literal_eval(keyword.value)
        keywords.update(value if keyword.arg is None else {keyword.arg: value})
    return [ast.literal_eval(argument) for argument in last.value.args], keywords
