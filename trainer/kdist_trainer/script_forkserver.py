"""The forkserver of scripts (`script.preload: torch`): imports torch once for all ranks of a node.

It is `run_script` with the command line, the environment and the working directory that a rank's
new interpreter would get, and it stops before it would run the script. For each rank it forks
itself, and the fork goes on from there: a script sees what it would see in a new interpreter, with
more modules already imported. In a child of multiprocessing's forkserver the start method would be
fixed, `__main__` would be another module, and the variables that torch reads on import would come
too late.

The agent is the parent of the ranks: each is forked by a process that exits at once, and the agent
adopts it. The server itself starts no thread, uses no device, and keeps nothing open that a fork
would inherit.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from kdist_trainer import forked_memory, process_tree
from kdist_trainer.json_text import encode_json
from kdist_trainer.signals import leave_stops_to_others
from kdist_trainer.untrusted_text import parse_json

DESCRIPTOR = "KDIST_FORKSERVER"
"""The variable with the number of the descriptor on which requests arrive, each with a connection
and the three standard streams.
"""
READY, GO = b"ready", b"go"
_MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch._dynamo",  # the first DDP(...) and the first optimizer import it: most of a second
    "kdist_trainer.instrumentation.script_collectives",
    "kdist_trainer.checkpoint.script_api",
)


def serve() -> None:
    """Import torch, then fork for each request until the agent is gone. Returns in the forks only,
    each of which is then a rank.
    """
    requests = socket.socket(fileno=int(os.environ.pop(DESCRIPTOR)))
    process_tree.wake_without_parent()
    leave_stops_to_others()
    try:
        _import_modules()
        requests.sendall(READY)
        while not _serve_one(requests):
            pass
    except (KeyboardInterrupt, ConnectionError):
        os._exit(1)
    except BaseException:  # noqa: BLE001 - only a rank may go on to the script
        traceback.print_exc()
        os._exit(1)


def _import_modules() -> None:
    gc.disable()  # imports leave little garbage, and looking for it takes a quarter of the time
    for name in _MODULES:
        importlib.import_module(name)
    gc.enable()
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate())
        raise RuntimeError(f"a fork has no threads but its own, and importing torch left: {names}")
    forked_memory.share_with_forks()


def _serve_one(requests: socket.socket) -> bool:
    """Wait for a request and fork for it. Returns whether this is the rank."""
    message, descriptors, _, _ = socket.recv_fds(requests, 16, 4)
    if not message:
        os._exit(0)
    streams = descriptors[1:]
    answer: dict[str, Any]
    with socket.socket(fileno=descriptors[0]) as connection:
        try:
            with connection.makefile("rb") as lines:
                request = parse_json(lines.readline(), keep_surrogates=True)
            pid = _fork()
            answer = {"pid": pid}
        except (OSError, ValueError) as error:
            pid, answer = -1, {"error": str(error)}
        if pid == 0:
            requests.close()
            if connection.recv(len(GO)) != GO:
                os._exit(0)  # the agent has started another process instead
            _become_rank(request, streams)
            return True
        with contextlib.suppress(OSError):  # the agent no longer waits
            connection.sendall(encode_json(answer).encode())
    for stream in streams:
        os.close(stream)
    return False


def _fork() -> int:
    """Fork a process that leads a session of its own and that the agent adopts. Returns its pid, 0
    in the process itself.

    Raises:
        OSError: The system starts no more processes.
    """
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        os.close(reader)
        try:
            pid = os.fork()
        except OSError as error:
            os._exit(error.errno or 1)
        if pid != 0:
            os._exit(0)
        os.setsid()
        os.write(writer, str(os.getpid()).encode())
        os.close(writer)
        return 0
    os.close(writer)
    with os.fdopen(reader) as opened:
        text = opened.read()
    # once it has exited, the agent is the rank's parent
    code = os.waitstatus_to_exitcode(os.waitpid(between, 0)[1])
    if not text:
        raise OSError(code, os.strerror(abs(code)))
    return int(text)


def _become_rank(request: dict[str, Any], streams: Sequence[int]) -> None:
    """Give this process what a new one would have: streams, working directory and environment, and
    random numbers and keys that no other process has.
    """
    # torch's agent handles it, and a new interpreter takes over no handler
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # else the server's
    # the module `random` does this by itself, and devices are seeded when they are first used
    sys.modules["torch"].default_generator.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    multiprocessing.current_process().authkey = os.urandom(32)
    tempfile.tempdir = None  # found by an import; the script may set TMPDIR
    importlib.invalidate_caches()
