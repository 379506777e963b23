"""A process that only saves, for tests that stop it or let its system calls fail: `python -m
tests.trainer.checkpoint.saver`.

It reads one request a line (JSON) on standard input, forks, and answers with one line: what became
of the child's saves, and how the child ended. The fork spares every case the start of torch. strace
is attached when the store is open, so that only the save itself is touched; the child goes on once
strace answers one of its calls. With `watch_load` it is the load that is touched.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kdist_trainer.checkpoint import storage
from kdist_trainer.errors import StorageError
from tests.trainer.checkpoint.states import load, open_store, save

_ATTACHED = 424_242
_PR_SET_PTRACER = 0x59616D61
_PATIENCE_SECONDS = 120


def main() -> None:
    """Serve requests until standard input ends."""
    torch.set_num_threads(1)
    # what torch only reads the first time is none of the children's calls
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "checkpoints")
        assert save(open_store(root), 1).ok
        assert load(open_store(root, generation=2)) == 1
    for line in sys.stdin:
        os.write(1, json.dumps(_serve(json.loads(line))).encode() + b"\n")


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    """Fork a child that saves `steps` in `root`, strace with `inject` attached for the first of
    them.
    """
    ours, theirs = socket.socketpair()  # a socket's calls are none of those that strace touches
    child = os.fork()
    if child == 0:
        ours.close()
        _save_all(request, theirs)
    theirs.close()
    results = []
    with ours, ours.makefile() as answers:
        answers.readline()  # the store is open and has loaded
        strace = _attach(child, request["inject"]) if request["inject"] else None
        for line in answers:
            results.append(json.loads(line))
            if strace is not None:
                strace.terminate()
                strace.wait()
                strace = None
            ours.send(b"g")
    _, status = os.waitpid(child, 0)
    if strace is not None:
        strace.wait()
    return {
        "killed": os.WIFSIGNALED(status),
        "code": os.waitstatus_to_exitcode(status),
        "results": results,
    }


def _attach(child: int, inject: list[str]) -> subprocess.Popen[bytes]:
    options = [part for one in inject for part in ("-e", f"inject={one}")]
    names = ",".join(["getppid", *(one.split(":")[0] for one in inject)])
    options += ["-e", f"trace={names}", "-e", f"inject=getppid:retval={_ATTACHED}"]
    return subprocess.Popen(["strace", "-f", "-qq", "-o", os.devnull, *options, "-p", str(child)])


def _save_all(request: dict[str, Any], parent: socket.socket) -> None:
    """In the child: open the store, load, wait for strace, save."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1 & (2**64 - 1)), 0, 0, 0)
        storage.BUFFER_BYTES = request["buffer"]
        store = open_store(
            Path(request["root"]), generation=request["generation"], keep=request["keep"]
        )
        if not request["watch_load"]:
            load(store)
        parent.send(b"ready\n")
        if request["inject"]:
            deadline = time.monotonic() + _PATIENCE_SECONDS
            while os.getppid() != _ATTACHED:
                if time.monotonic() > deadline:
                    os._exit(3)
        if request["watch_load"]:
            try:
                answer: dict[str, Any] = {
                    "loaded": load(store),
                    "fallbacks": [asdict(one) for one in store.fallbacks],
                }
            except (OSError, StorageError) as error:
                answer = {"error": str(error)}
            parent.send(json.dumps(answer).encode() + b"\n")
            parent.recv(1)
        for step in request["steps"]:
            result = asdict(save(store, step))
            parent.send(json.dumps(result, default=str).encode() + b"\n")
            parent.recv(1)
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - told to the test
        os.write(2, "".join(traceback.format_exception(error)).encode())
        os._exit(4)


if __name__ == "__main__":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    main()
