"""The forkserver of scripts (`script.preload`), which imports torch once for all ranks of a
node, and the memory that ranks share with the process that they are forked from.

The server is `run_script` with the command line, the environment and the working directory that a
rank's new interpreter would get, and it stops before it would run the script. For each rank it
forks itself, and the fork goes on from there: a script sees what it would see in a new interpreter,
with more modules already imported. In a child of multiprocessing's forkserver the start method
would be fixed, `__main__` would be another module, and the variables that torch reads on import
would come too late. The agent is the parent of the ranks: each is forked by a process that exits at
once, and the agent adopts it. The server itself starts no thread, uses no device, and keeps nothing
open that a fork would inherit.

A fork shares its parent's pages until it writes to one, which is copied then. What imports have
freed lies as small gaps between what they have left. glibc hands the gaps out in turn, the oldest
one first: a rank that allocates much for a moment, as one does that leaves its group and joins the
next, would write to other pages each time, and own a few more of them with every loss of a rank.
`share_with_forks` fills the gaps before the first fork.
"""

from __future__ import annotations

import ctypes
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
from contextlib import suppress
from pathlib import Path
from typing import Any

from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import parse_json
from kdist_trainer.processes import process_tree
from kdist_trainer.processes.signals import leave_stops_to_others

_SIZES = tuple(2**power for power in range(16, 9, -1)) + tuple(range(504, 8, -16))
"""Of the blocks that fill the gaps, the largest first; of small gaps, each has its own size."""
_MOST_BLOCKS = 1_000_000
"""A limit, should the heap not be what it is taken for."""


def share_with_forks() -> None:
    """Have forks of this process write to few of its pages. Called once, after all imports."""
    gc.collect()
    gc.freeze()  # garbage collection in a fork then writes to none of them
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):  # another C library, with another heap
            _fill_gaps(ctypes.CDLL(None))


def return_free_memory() -> None:
    """Give the system what is free in this process, also between what is in use. glibc keeps it: in
    the heap and in sixteen more that threads use, of which each group of ranks starts others.
    """
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def _fill_gaps(libc: ctypes.CDLL) -> None:
    """Allocate all free memory of the heap below its end, and keep it: none of it is used again,
    and its pages stay as they are.
    """
    libc.gnu_get_libc_version  # noqa: B018 - raises where the heap is not glibc's
    allocate, free = libc.malloc, libc.free
    allocate.restype, allocate.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    free.restype, free.argtypes = None, (ctypes.c_void_p,)
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t,)
    libc.malloc_trim(ctypes.c_size_t(0))  # so that what is free at the end is short
    libc.mallinfo2.restype = _Mallinfo
    limit = (libc.sbrk(0) or 0) - int(libc.mallinfo2().part_9)
    blocks = 0
    for size in _SIZES:
        while blocks < _MOST_BLOCKS and (block := allocate(size)) is not None:
            if block >= limit:  # no gap is as large any more; mappings are above the heap, too
                free(block)
                break
            blocks += 1


class _Mallinfo(ctypes.Structure):
    """mallinfo2(3)."""

    _fields_ = tuple((f"part_{number}", ctypes.c_size_t) for number in range(10))
    part_9: int
    """The bytes that are free at the end of the heap, in one piece."""


DESCRIPTOR = "KDIST_FORKSERVER"
"""The variable with the number of the descriptor on which requests arrive, each with a connection
and the three standard streams.
"""
READY, GO = b"ready", b"go"
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/dxg")
_MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch._dynamo",  # the first DDP(...) and the first optimizer import it: most of a second
    "kdist_trainer.script.collectives",
    "kdist_trainer.script.api",
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
    opened = {str(each.resolve()) for each in Path("/proc/self/fd").iterdir()}
    if devices := sorted(each for each in opened if each.startswith(_DEVICES)):
        raise RuntimeError(f"a fork cannot use devices that importing torch has opened: {devices}")
    share_with_forks()


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
        with suppress(OSError):  # the agent no longer waits
            connection.sendall(encode_json(answer).encode())
    for stream in streams:
        os.close(stream)
    return False


def _fork() -> int:
    """Fork a process that leads a session of its own and that the agent adopts. Returns its pid, 0
    in the process itself. Raises `OSError` if the system starts no more processes.
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
