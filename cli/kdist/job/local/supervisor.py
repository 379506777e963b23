"""Supervises the agents of a run on this machine as a kubelet supervises pods: starts them,
restarts them by their exit codes, and stops them in order. An exit code of 0 is success; a code
below 128 fails the job and stops the other agents; with any other code, or after a signal, the
agent is restarted after a pause that doubles from 0.5 s to 10 s and is reset by progress of the
training.

When `kdist run` dies, the end of file of a FIFO ends every agent
(`kdist_trainer.processes.liveness.watch` holds the other end). Processes that outlive their agent
are found by the environment that they inherited, and killed. Signals to `kdist run` are queued for
its loop.

With a `Spawner` (`kdist_trainer.agent.forkserver`) one process imports torch for all agents of a
run and forks them. Each agent is then started as a shim that requests the agent from the spawner;
if the spawner is gone, the shim becomes the agent and imports torch itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol

from kdist.job.local.run_dir import RunFolder, open_private
from kdist_trainer.formats import SAME_REQUEST_SECONDS, SCRATCH, SPAWNER, is_permanent_code

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAME_CTRL_C_SECONDS = 0.1  # shorter than between two presses
_LATE_CTRL_C_SECONDS = 0.5  # after the end of a run, for which it was meant


class SignalQueue:
    """Queues signals instead of ending the process while the context lasts. What comes with the
    first one is the same request: `timeout` signals a process and then its group. If it received
    one, a Ctrl-C within `_LATE_CTRL_C_SECONDS` after the context is ignored: it was meant for what
    has ended. For the main thread only.

    Attributes:
        received: the signals so far, without those that were taken out.
        stopped_by: the signal that requested the stop; None without one.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self.stopped_by: signal.Signals | None = None
        self._received_at: float | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def __enter__(self) -> SignalQueue:
        for number in STOP_SIGNALS:
            # a signal that the caller had us ignore, as nohup does, stays ignored
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGINT:
                self._before[number] = signal.signal(number, self._receive)
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, _only_wake)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        if (
            self._received_at is not None
            and self._before[signal.SIGINT] is signal.default_int_handler
        ):
            self._before[signal.SIGINT] = _interrupt_from(time.monotonic() + _LATE_CTRL_C_SECONDS)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)

    def take(self) -> Iterator[tuple[signal.Signals, bool]]:
        """Each signal, and whether it kills: the first one requests the stop, any other kills."""
        while self.received:
            number, kills = self.received.pop(0), self.stopped_by is not None
            self.stopped_by = self.stopped_by or number
            yield number, kills

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than until the next signal; the end of a child is one."""
        select.select([self._reader], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)

    def _receive(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a handler's signature
        same = _SAME_CTRL_C_SECONDS if number == signal.SIGINT else SAME_REQUEST_SECONDS
        now = time.monotonic()
        if self._received_at is None:
            self._received_at = now
        elif now - self._received_at < same:
            return
        self.received.append(signal.Signals(number))


def _interrupt_from(moment: float) -> Callable[[int, FrameType | None], None]:
    """A handler of SIGINT that ignores it before a moment of the monotonic clock."""

    def handle(number: int, frame: FrameType | None) -> None:
        if time.monotonic() >= moment:
            signal.default_int_handler(number, frame)

    return handle


def _only_wake(number: int, frame: FrameType | None) -> None:
    """Handle SIGCHLD, which without a handler would not be written to the wake-up file."""


class ParentDeathPipe:
    """The only write end of a FIFO. No child inherits it, so its readers see the end of file when
    this process ends.
    """

    def __init__(self, path: Path) -> None:
        """Create the FIFO. Raises `OSError`."""
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        # For reading as well, because a FIFO without a reader cannot be opened for writing alone;
        # nobody ever writes into it.
        self._end: int | None = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        """Close it, which ends all processes that watch it. Idempotent."""
        if self._end is not None:
            os.close(self._end)
            self._end = None


_POLL_SECONDS = 0.01  # between two looks for what has outlived an agent
_LEFT_SECONDS = 2.0  # of killing it


def find_descendants(scratch: str) -> list[int]:
    """Pids of the agent with this scratch folder and its descendants; empty if the system does not
    show them.
    """
    mark = f"{SCRATCH}={scratch}".encode()  # which the agent and its descendants have
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or it has ended
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


FIRST_PAUSE = 0.5  # seconds before an agent is restarted
LONGEST_PAUSE = 10.0
# that the other agents get to detect the failure by themselves, before they are stopped
FAILURE_GRACE_SECONDS = 3.0
KILL_SECONDS = 2.0  # after SIGKILL, for a process to end

Kind = Literal["done", "failed", "stopped", "killed"]


class OnEvent(Protocol):
    """Receives what happens to agents, as trainer events."""

    def __call__(self, node: str, event: str, /, **fields: object) -> None: ...


@dataclass(frozen=True)
class AgentCommand:
    """How to start one agent: with its whole environment, and the file descriptors that it
    inherits.
    """

    node: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    directory: Path
    log: Path
    descriptors: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """How the job ended.

    Attributes:
        kind: how.
        code: the deciding exit code; for a signal, its negative number.
        node: of the agent with that code.
    """

    kind: Kind
    code: int
    node: str | None = None


@dataclass
class _Agent:
    command: AgentCommand
    process: subprocess.Popen[bytes] | None = None
    due: float | None = None  # when it is restarted
    code: int | None = None  # its last exit code
    pause: float = field(default_factory=lambda: FIRST_PAUSE)
    restarts: int = 0  # restarts since the training last made progress

    @property
    def ended(self) -> bool:
        return self.process is None and self.due is None

    def start(self) -> int:
        self.due = None
        with open_private(self.command.log, "ab") as log:
            self.process = subprocess.Popen(
                self.command.argv,
                env=dict(self.command.environment),
                cwd=self.command.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # so that Ctrl-C reaches only kdist, which lets the agents save first
                start_new_session=True,
                pass_fds=self.command.descriptors,
            )
        return self.process.pid

    def send(self, number: signal.Signals) -> None:
        if self.process:
            # SIGKILL goes to its whole process group, other signals to the agent, which forwards
            # them
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if number == signal.SIGKILL else os.kill)(self.process.pid, number)

    def end_leftovers(self) -> None:
        """Kill processes that have outlived the agent, as the end of a container does."""
        scratch, deadline = self.command.environment.get(SCRATCH), time.monotonic() + _LEFT_SECONDS
        while scratch and (found := find_descendants(scratch)) and time.monotonic() < deadline:
            for pid in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)


@dataclass
class Supervisor:
    """Keeps the agents of one job running. Single-threaded: call `poll` often, it never blocks.

    Attributes:
        commands: one for each agent.
        grace_seconds: between SIGTERM and SIGKILL.
        max_restarts: restarts of one agent without progress after which the job fails. The agents
            enforce the job's own, smaller limit; this one is for agents that die before they can.
        on_event: receives what happens to the agents, as trainer events.
    """

    commands: Sequence[AgentCommand]
    grace_seconds: float
    max_restarts: int
    on_event: OnEvent
    clock: Callable[[], float] = time.monotonic
    _agents: list[_Agent] = field(init=False)
    _failure: Outcome | None = field(init=False, default=None)
    _requested: Kind | None = field(init=False, default=None)  # requested by the caller
    _term_at: float | None = field(init=False, default=None)
    _kill_at: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._agents = [_Agent(command) for command in self.commands]

    def start(self) -> None:
        """Start every agent. Raises `OSError` when a process cannot be started."""
        for agent in self._agents:
            self._start(agent)

    def poll(self) -> bool:
        """Handle ended agents, restarts and timeouts. Returns False once all agents have ended."""
        now = self.clock()
        for agent in self._agents:
            if agent.process and (code := agent.process.poll()) is not None:
                agent.process = None
                agent.end_leftovers()
                self._handle_exit(agent, code, now)
        for agent in self._agents:
            if agent.due is not None and now >= agent.due:
                self._start(agent)
        if self._term_at is not None and now >= self._term_at:
            self._term_at = None
            self._terminate(now)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._requested = "killed" if self._requested else None
            self._kill_all("they did not end in time")
        return not all(agent.ended for agent in self._agents)

    def stop(self) -> None:
        """Let the job save and stop. What still runs after the grace period is killed."""
        if self._requested is None:
            self._requested = "stopped"
            self._drop_restarts()
            self._terminate(self.clock())

    def kill(self) -> None:
        """Kill all agents at once, without saving."""
        self._requested = "killed"
        self._drop_restarts()
        self._kill_all("asked to")

    def record_progress(self) -> None:
        """Reset pauses and restart counts, because the training has made progress."""
        for agent in self._agents:
            agent.pause = FIRST_PAUSE
            agent.restarts = 0

    @property
    def outcome(self) -> Outcome:
        """How the job ended; valid once `poll` has returned False."""
        if self._failure:
            return self._failure
        codes = [(agent.code or 0, agent.command.node) for agent in self._agents]
        if all(code == 0 for code, _ in codes):
            return Outcome("done", 0)
        code, node = max(codes)  # a failed save (203) takes precedence over 200
        return Outcome(self._requested or "failed", code, node)

    def close(self, timeout: float = KILL_SECONDS) -> None:
        """Kill all agents that still run, and wait for each for at most `timeout` seconds."""
        for agent in self._agents:
            agent.send(signal.SIGKILL)
            if agent.process:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    agent.process.wait(timeout)
                    agent.end_leftovers()

    def _start(self, agent: _Agent) -> None:
        pid = agent.start()
        self.on_event(agent.command.node, "agent-started", pid=pid)

    def _handle_exit(self, agent: _Agent, code: int, now: float) -> None:
        agent.code = code
        node = agent.command.node
        if code == 0 or self._requested or self._failure:
            self.on_event(node, "agent-ended", code=code)
            if is_permanent_code(code) and not self._failure:
                self._failure = Outcome("failed", code, node)
        elif is_permanent_code(code) or agent.restarts >= self.max_restarts:
            self.on_event(node, "agent-ended", code=code)
            self._failure = Outcome("failed", code, node)
            self._drop_restarts()
            self._term_at = now + FAILURE_GRACE_SECONDS
        else:
            agent.due = now + agent.pause
            agent.restarts += 1
            self.on_event(node, "agent-restarting", code=code, seconds=agent.pause)
            agent.pause = min(2 * agent.pause, LONGEST_PAUSE)

    def _drop_restarts(self) -> None:
        for agent in self._agents:
            agent.due = None

    def _terminate(self, now: float) -> None:
        for agent in self._agents:
            agent.send(signal.SIGTERM)
        self._kill_at = now + self.grace_seconds

    def _kill_all(self, why: str) -> None:
        for agent in self._agents:
            if agent.process:
                self.on_event(agent.command.node, "agent-killed", reason=why)
                agent.send(signal.SIGKILL)


_AGENT, _SHIM = "kdist_trainer", "kdist_trainer.processes.shim"
_SPAWNER = "kdist_trainer.agent.forkserver"


class Spawner:
    """Runs from its creation to `close`, or until the parent-death pipe is closed."""

    def __init__(self, folder: RunFolder, command: AgentCommand) -> None:
        """Start the process, by the command of one of the agents that will be forked; the run's
        parent-death pipe exists already. Raises `OSError` if the process cannot be started.
        """
        self._requests, serving = socket.socketpair(type=socket.SOCK_DGRAM)
        with serving:
            environment = dict(command.environment)
            # else the end of one agent would end the spawner too
            environment.pop(SCRATCH, None)
            argv = [
                command.argv[0],
                "-m",
                _SPAWNER,
                str(folder.root / "train.json"),
                str(folder.parent_pipe),
            ]
            self._process = subprocess.Popen(
                argv,
                env={**environment, SPAWNER: str(serving.fileno())},
                cwd=command.directory,
                stdin=subprocess.DEVNULL,
                # Agents report import errors: they then import torch themselves.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[serving.fileno()],
            )

    def serve(self, commands: Sequence[AgentCommand]) -> list[AgentCommand]:
        """Convert the agents' commands to those of shims, which let the spawner fork the agents."""
        descriptor = self._requests.fileno()
        return [
            replace(
                command,
                argv=[_SHIM if word == _AGENT else word for word in command.argv],
                environment={**command.environment, SPAWNER: str(descriptor)},
                descriptors=(descriptor,),
            )
            for command in commands
        ]

    def close(self) -> None:
        """Kill it, which may still import torch. All agents have ended."""
        self._requests.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
