"""Agents without the seconds of their imports: forked from a process that has imported torch, one
for each process of pytest.

What is forked is the agent of `python -m kdist_trainer` with a session, environment, folder and
output of its own; only what it would have imported is there already. `python -m
tests.trainer.agent.forks DESCRIPTOR FOLDER` is the process that forks.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import itertools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.house.tree import ROOT

_LARGEST = 1 << 17  # bytes of a request: a command line and an environment
_IMPORTED = (
    "kdist_trainer.agent.agent",
    "kdist_trainer.rendezvous.handler",
    "kdist_trainer.agent.worker_group",
    "torch.nn.parallel",
    "torch._dynamo",
    "kdist_trainer.worker",
)


class ForkedAgent:
    """An agent as its starter sees it, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, end: Path) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._end = end

    def poll(self) -> int | None:
        if self.returncode is None and self._end.exists():
            self.returncode = int(self._end.read_text())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"agent {self.pid}", timeout or 0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork_agent(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: int,
    imports: Sequence[str] = (),
) -> ForkedAgent:
    """Start `python -m kdist_trainer ARGUMENTS` in the repository's root; the descriptor `log`
    takes what it prints. It and all later ones have the modules `imports` too.
    """
    asking, ends = _server()
    words = {"arguments": list(arguments), "environment": dict(environment)}
    request = json.dumps({**words, "imports": list(imports)}).encode()
    assert len(request) <= _LARGEST
    socket.send_fds(asking, [request], [log])
    answer = asking.recv(64)
    assert answer, "the process that forks agents has ended"
    number, pid = answer.split()
    return ForkedAgent(int(pid), ends / number.decode())


@functools.cache
def _server() -> tuple[socket.socket, Path]:
    """Where to ask for agents, and the folder of their exit codes."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends = Path(tempfile.mkdtemp(prefix="kdist-forks-"))  # the server removes it
    with theirs:
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), str(ends)]
        subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return ours, ends


def serve(requests: socket.socket, ends: Path) -> NoReturn:
    """Fork an agent for each request and note how it ends, until whoever asks is gone. Only one
    thread may be at work here.
    """
    numbers: dict[int, int] = {}

    def reap(*_: object) -> None:
        # A second signal interrupts this between the wait for the last agent and its removal.
        with contextlib.suppress(ChildProcessError):
            while numbers and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                path = ends / f"{numbers.pop(ended[0])}"
                path.with_suffix(".new").write_text(str(os.waitstatus_to_exitcode(ended[1])))
                path.with_suffix(".new").rename(path)

    signal.signal(signal.SIGCHLD, reap)
    for number in itertools.count():
        text, descriptors, _, _ = socket.recv_fds(requests, _LARGEST, 1)
        if not text:  # who asked is gone, and would have ended them
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
            for pid in numbers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            shutil.rmtree(ends, ignore_errors=True)
            os._exit(0)
        request = json.loads(text)
        for module in request["imports"]:
            importlib.import_module(module)
        # no end is met before its pid is known
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        if (pid := os.fork()) == 0:
            requests.close()
            _be_agent(request, descriptors[0])
        numbers[pid] = number
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        os.close(descriptors[0])
        requests.sendall(f"{number} {pid}".encode())
    raise AssertionError("unreachable")


def _be_agent(request: dict[str, Any], log: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.environ.clear()
        os.environ.update(request["environment"])
        agent: Any = importlib.import_module("kdist_trainer.__main__")
        sys.modules["__main__"] = agent  # from which multiprocessing prepares ranks
        sys.argv = [agent.__file__, *request["arguments"]]
        code = agent.main(request["arguments"])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - nothing of the server may run on in here
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    for module in _IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # no collection in an agent writes to the pages it shares with the others
    serve(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]))
