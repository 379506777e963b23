"""Starts the scripts of this node as forks of a process that has imported torch
(`script.preload: torch`), and as new interpreters while there is no such process.

`ScriptForkserver` is the agent's side of `kdist_trainer.script_forkserver`, which runs the server.
The ranks are children of the agent either way, so nothing else here needs to know the difference.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kdist_trainer import log, process_tree
from kdist_trainer.signals import signal_name
from kdist_trainer.agent.settings import Settings
from kdist_trainer.config import START_VARIABLES
from kdist_trainer.json_text import encode_json
from kdist_trainer.script_forkserver import DESCRIPTOR, GO, READY
from kdist_trainer.untrusted_text import parse_json

_READY_SECONDS = 120.0
_FORK_SECONDS = 10.0
_POLL_SECONDS = 0.1
RUN_SCRIPT = ("-u", "-m", "kdist_trainer.run_script")
"""The arguments of the interpreter that runs a script."""


class ForkedScript:
    """A rank that the forkserver has forked, with the part of `subprocess.Popen` that the agent and
    torch use.
    """

    def __init__(self, pid: int, command: Sequence[str]) -> None:
        self.pid = pid
        self.args = command
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its exit; returns the exit code. Raises `subprocess.TimeoutExpired`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self._wait(0 if deadline is None else os.WNOHANG)) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
            time.sleep(0.01)
        return code

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkserverError(Exception):
    """The forkserver cannot fork a rank."""


class ScriptForkserver:
    """The forkserver of the scripts of this node. A server that dies is replaced, unless it did not
    get as far as to have imported torch.

    Args:
        command: The arguments of `run_script`: the script and its arguments.
        directory: The working directory of the scripts.
    """

    def __init__(self, command: Sequence[str], directory: Path) -> None:
        self._command = [sys.executable, *RUN_SCRIPT, *command]
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._environment: dict[str, str] = {}
        self._is_ready = False
        self._reported = ""

    def start(self) -> None:
        """Start the server, which then imports torch. Needs the environment that the scripts will
        get. Main thread only: the server is continued when the thread that started it exits.
        """
        if not process_tree.adopt():
            self._report("this system cannot make the agent the parent of forked processes")
            return
        ours, theirs = socket.socketpair()
        self._environment = dict(os.environ)
        self._is_ready = False
        with theirs:
            try:
                self._process = subprocess.Popen(
                    self._command,
                    cwd=self._directory,
                    env={**self._environment, DESCRIPTOR: str(theirs.fileno())},
                    pass_fds=[theirs.fileno()],
                )
            except OSError as error:
                ours.close()
                self._report(f"the process that forks scripts did not start: {error}")
                return
        self._requests = ours

    def supervise(self) -> int | None:
        """The pid of the server; None without one. A server that has died is replaced."""
        if self._process is not None and (code := self._process.poll()) is not None:
            had_imported = self._poll_ready()
            self.close()
            ended = signal_name(code) or f"exit code {code}"
            when = "" if had_imported else " before it had imported torch"
            self._report(f"the process that forks scripts ended with {ended}{when}")
            if had_imported:
                self.start()
        return None if self._process is None else self._process.pid

    def wait_until_ready(self) -> None:
        """Wait until scripts can be forked, or it is clear that they cannot."""
        deadline = time.monotonic() + _READY_SECONDS
        while self.supervise() is not None and not self._poll_ready(_POLL_SECONDS):
            if time.monotonic() > deadline:
                self._report(f"torch was not imported within {_READY_SECONDS:.0f} s")
                return

    def start_script(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> ForkedScript | None:
        """Start a rank, with this process's working directory and standard streams.

        Args:
            command: The command line that would start a new interpreter for it.
            environment: Its whole environment.

        Returns:
            The running rank; None if it must be a new interpreter, which is reported.
        """
        try:
            pid = self._request(command, environment)
        except (ForkserverError, OSError, ValueError) as error:
            self._report(str(error))
            return None
        self._reported = ""
        return ForkedScript(pid, command)

    def close(self) -> None:
        """End the server; its ranks go on."""
        if self._requests is not None:
            self._requests.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._requests = self._process = None

    def _request(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        if list(command) != self._command:
            raise ForkserverError(f"it was started for {self._command}, not for {command}")
        differing = sorted(
            name
            for name in {*environment, *self._environment}
            if START_VARIABLES.match(name) and environment.get(name) != self._environment.get(name)
        )
        if differing:
            raise ForkserverError(
                f"the environment has changed, and {', '.join(differing)} must be there when a "
                "process starts"
            )
        if self.supervise() is None or self._requests is None:
            raise ForkserverError(self._reported or "there is no process that forks scripts")
        if not self._poll_ready():
            raise ForkserverError("the process that forks scripts still imports torch")
        try:
            return self._exchange(self._requests, environment)
        except TimeoutError:
            self.close()
            self.start()
            raise ForkserverError(
                f"the process that forks scripts did not answer within {_FORK_SECONDS:.0f} s"
            ) from None

    def _exchange(self, requests: socket.socket, environment: Mapping[str, str]) -> int:
        """Have the server fork; returns the pid of the rank, which is then this process's child."""
        request = {"directory": str(Path.cwd()), "environment": dict(environment)}
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                socket.send_fds(requests, [b"fork"], [theirs.fileno(), 0, 1, 2])
            ours.settimeout(_FORK_SECONDS)
            ours.sendall(encode_json(request).encode() + b"\n")
            answer = parse_json(ours.recv(4096) or b'{"error": "it has exited"}')
            if "error" in answer:
                raise ForkserverError(f"the fork failed: {answer['error']}")
            ours.sendall(GO)
        return int(answer["pid"])

    def _poll_ready(self, seconds: float = 0.0) -> bool:
        """Whether the server has imported torch; waits for it at most `seconds`."""
        if not self._is_ready and self._requests is not None:
            readable, _, _ = select.select([self._requests], [], [], seconds)
            with suppress(OSError):
                self._is_ready = bool(readable) and self._requests.recv(len(READY)) == READY
        return self._is_ready

    def _report(self, problem: str) -> None:
        """Warn of a problem, once until a script has been forked again."""
        if problem != self._reported:
            self._reported = problem
            log.warn(
                "preload-unavailable",
                message=f"script.preload: {problem}; ranks then start as new interpreters, which "
                "takes seconds longer",
            )


_running: list[ScriptForkserver] = []


def start_forkserver(settings: Settings) -> None:
    """Start the forkserver of this agent's scripts if the job asks for one."""
    script = settings.config.script
    if script is not None and script.preload == "torch":
        server = ScriptForkserver(script.command, settings.code or Path.cwd())
        server.start()
        _running.append(server)


def running() -> ScriptForkserver | None:
    """The forkserver of this agent's scripts; None if there is none to be."""
    return _running[0] if _running else None


def supervise() -> int | None:
    """The pid of the forkserver, which is replaced if it has died; None without one."""
    return _running[0].supervise() if _running else None


def close_forkserver() -> None:
    """End the forkserver, if there is one."""
    while _running:
        _running.pop().close()
