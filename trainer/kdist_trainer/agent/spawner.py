"""Forks the agents of `kdist run`: imports torch and what the training needs once, for all nodes
and for every restart.

An agent that dies is then replaced in milliseconds instead of the many seconds that its imports
take on a busy machine. One shim per agent (`kdist_trainer.agent.shim`) requests it. This process
and all agents end with its parent-death pipe. If it exits earlier, agents start by themselves.
"""

from __future__ import annotations

import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from kdist_trainer.agent import forkserver
from kdist_trainer.config import TrainConfig
from kdist_trainer.formats import SPAWNER
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import MalformedTextError, parse_json
from kdist_trainer.processes import liveness, process_tree
from kdist_trainer.processes.signals import leave_stops_to_others

_ORPHAN_SECONDS = 2.0


class Spawner:
    """Serves the requests that arrive at `requests`, each with a connection, stdout and stderr.
    Only `serve` reaps children.
    """

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._agents: dict[int, socket.socket] = {}
        """The connection of each running agent to its shim, by pid."""
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe()

    def serve(self) -> NoReturn:
        """Fork agents and report their exits to their shims, until this process is killed."""
        for descriptor in (self._woken, self._wake):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self._wake)
        leave_stops_to_others()
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the handler only enables the wake-up
        self._selector.register(self._requests, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._requests:
                    self._handle_request()
                elif key.fileobj == self._woken:
                    os.read(self._woken, 4096)
                    self._reap()
                else:
                    self._kill_without_shim(key.fileobj)

    def _handle_request(self) -> None:
        _, descriptors, _, _ = socket.recv_fds(self._requests, 16, 3)
        connection, streams = socket.socket(fileno=descriptors[0]), descriptors[1:]
        try:
            with connection.makefile("rb") as lines:
                request = parse_json(lines.readline(), keep_surrogates=True)
        except (OSError, MalformedTextError):  # the shim has ended meanwhile
            connection.close()
        else:
            self._fork(request, connection, streams)
        finally:
            for stream in streams:
                os.close(stream)

    def _fork(
        self, request: dict[str, Any], connection: socket.socket, streams: Sequence[int]
    ) -> None:
        with warnings.catch_warnings():
            # The only other thread sleeps in read() and holds no lock.
            warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            self._release_in_child(connection, streams)
            run_as_agent(request)
        self._agents[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ, pid)
        _send(connection, pid=pid)

    def _release_in_child(self, connection: socket.socket, streams: Sequence[int]) -> None:
        """Release the spawner's descriptors, handlers and session in a forked child."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), *streams)):
            os.dup2(descriptor, number)
        self._selector.close()
        for held in (connection, *self._agents.values(), self._requests):
            held.close()
        forkserver.close_descriptors()

    def _reap(self) -> None:
        """Reap every child that has exited: agents, and orphans of agents that have exited."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                connection = self._agents.pop(pid, None)
                if connection is not None:
                    self._kill_orphans()
                    self._forget(connection)
                    _send(connection, code=os.waitstatus_to_exitcode(status))
                    connection.close()

    def _kill_orphans(self) -> None:
        """Kill the orphans of agents that have exited; this process has adopted them."""
        deadline = time.monotonic() + _ORPHAN_SECONDS
        while time.monotonic() < deadline:
            orphans = [pid for pid in process_tree.find_children() if pid not in self._agents]
            if not process_tree.find(below=orphans):
                return
            process_tree.kill(below=orphans, seconds=_ORPHAN_SECONDS)

    def _kill_without_shim(self, connection: Any) -> None:
        """Kill an agent whose shim was killed."""
        self._forget(connection)
        for pid, known in self._agents.items():
            if known is connection:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def _forget(self, connection: socket.socket) -> None:
        with suppress(KeyError):
            self._selector.unregister(connection)


def run_as_agent(request: dict[str, Any]) -> NoReturn:
    """Run as the requested agent, as if this process had been started for it."""
    code = 1
    try:
        os.chdir(request["directory"])
        os.environ.clear()
        os.environ.update(request["environment"])
        agent: Any = importlib.import_module("kdist_trainer.__main__")
        sys.modules["__main__"] = agent  # otherwise workers would import the spawner's
        code = agent.main(request["arguments"])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - the spawner's own code must not continue in the fork
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # a log on a full disk
                stream.flush()
        os._exit(code)


def _send(connection: socket.socket, **message: int) -> None:
    with suppress(OSError):  # the shim has ended
        connection.sendall(encode_json(message).encode() + b"\n")


def main(config_path: Path, parent_pipe: Path) -> NoReturn:
    """Import what the agents of the job at `config_path` and their workers need, then fork agents
    on request; `parent_pipe` ends this process.
    """
    requests = socket.socket(fileno=int(os.environ.pop(SPAWNER)))
    process_tree.adopt()  # orphans of agents become children of this process, which kills them
    liveness.watch(parent_pipe)
    config = TrainConfig.read(config_path)
    # torch reads it on import.
    os.environ.setdefault("OMP_NUM_THREADS", str(config.threads_per_rank))
    forkserver.import_all(forkserver.AGENT_MODULES)
    if config.train is not None:
        forkserver.import_all(forkserver.RANK_MODULES)
        forkserver.import_all(forkserver.training_modules(config_path))
    gc.collect()
    gc.freeze()  # garbage collection in an agent then writes to no shared pages
    Spawner(requests).serve()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
