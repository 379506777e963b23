"""Supervises the agents of a run on this machine as a kubelet supervises pods: starts them,
restarts them by their exit codes, and stops them in order. An exit code of 0 is success; a code
below 128 fails the job and stops the other agents; with any other code, or after a signal, the
agent is restarted after a pause that doubles from 0.5 s to 10 s and is reset by progress of the
training.

When `kdist run` dies, the end of file of a FIFO ends every agent (`kdist_trainer.liveness.watch`
holds the other end). Processes that outlive their agent are found by the environment that they
inherited, and killed. Signals to `kdist run` are queued for its loop.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Protocol

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """While the `with` block lasts, signals are counted instead of ending the process. For the main
    thread only.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def __enter__(self) -> Interrupts:
        for number in REQUESTS:
            # nohup keeps its promise: a signal that the caller has us ignore stays ignored
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGINT:
                self._before[number] = signal.signal(number, self._note)
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, _only_wake)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than until the next signal; the end of a child is one."""
        select.select([self._reader], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a handler's signature
        self.received.append(signal.Signals(number))


def _only_wake(number: int, frame: FrameType | None) -> None:
    """SIGCHLD needs a handler to reach the wake-up file; whoever waits for the child learns the
    rest.
    """


class ParentDeathPipe:
    """The one write end. It is not inherited by any child and goes when this process goes."""

    def __init__(self, path: Path) -> None:
        """Make the FIFO anew. Raises `OSError`."""
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        # For reading as well, because a FIFO without a reader cannot be opened for writing alone;
        # nobody ever writes into it.
        self._end: int | None = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        """Let go: whoever still watches ends at once. Closing twice is fine."""
        if self._end is not None:
            os.close(self._end)
            self._end = None


MARK = "KDIST_SCRATCH"
"""The variable that tells an agent, and whatever comes from it, from all others: its scratch
folder.
"""

_LOOK_SECONDS = 0.01


def find(scratch: str) -> list[int]:
    """Pids of the processes that come from the agent with this scratch folder; none where the
    system does not show them.
    """
    mark = f"{MARK}={scratch}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


def kill(scratch: str, *, seconds: float = 2.0) -> None:
    """Kill them until there are none, for so many seconds at most. Call it when the agent has
    ended.
    """
    deadline = time.monotonic() + seconds
    while (found := find(scratch)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)


FIRST_PAUSE = 0.5  # seconds before an agent is started again
LONGEST_PAUSE = 10.0
# that the other agents have to learn by themselves why the job failed, before they are told to stop
SETTLE_SECONDS = 3.0
KILL_SECONDS = 2.0  # after SIGKILL, in which the kernel takes a process away

Kind = Literal["done", "failed", "stopped", "killed"]


class Tell(Protocol):
    """Takes what happens to agents, in the form of the trainer's own events."""

    def __call__(self, node: str, event: str, /, **fields: object) -> None: ...


@dataclass(frozen=True)
class AgentCommand:
    """How to start one agent: argv, whole environment, working directory, and the file that takes
    what it prints.

    `descriptors` are those that it inherits.
    """

    node: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    directory: Path
    log: Path
    descriptors: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """How it ended. `code` is the trainer's exit code that decided, `node` whose it was; a signal's
    number is negative.
    """

    kind: Kind
    code: int
    node: str | None = None


@dataclass
class _Agent:
    command: AgentCommand
    process: subprocess.Popen[bytes] | None = None
    due: float | None = None  # when it is to be started again
    code: int | None = None  # its last exit code
    pause: float = field(default_factory=lambda: FIRST_PAUSE)
    fruitless: int = 0  # restarts since the training last made progress

    @property
    def ended(self) -> bool:
        return self.process is None and self.due is None

    def start(self) -> int:
        self.due = None
        with self.command.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command.argv,
                env=dict(self.command.environment),
                cwd=self.command.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # so Ctrl-C reaches kdist alone, which asks the agents to save first
                start_new_session=True,
                pass_fds=self.command.descriptors,
            )
        return self.process.pid

    def send(self, number: signal.Signals) -> None:
        if self.process:
            # SIGKILL for whatever is in its group; a request to stop for the agent alone, which
            # passes it on in its own way
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if number == signal.SIGKILL else os.kill)(self.process.pid, number)

    def end_leftovers(self) -> None:
        """Kill what has outlived the agent, as the end of a container does."""
        if scratch := self.command.environment.get(MARK):
            kill(scratch)


@dataclass
class Supervisor:
    """Keeps the agents of one job going. Single-threaded: call `poll` often, it never blocks.

    Attributes:
        commands: one for each agent.
        grace_seconds: from the request to stop to SIGKILL.
        backstop: restarts of one agent without any progress after which the job is given up. The
            job's own budget is smaller and is kept by the agents; this one ends what dies before
            it can count.
        tell: is told what happens.
    """

    commands: Sequence[AgentCommand]
    grace_seconds: float
    backstop: int
    tell: Tell
    clock: Callable[[], float] = time.monotonic
    _agents: list[_Agent] = field(init=False)
    _failure: Outcome | None = field(init=False, default=None)
    _asked: Kind | None = field(init=False, default=None)  # what somebody outside wants of it
    _term_at: float | None = field(init=False, default=None)
    _kill_at: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._agents = [_Agent(command) for command in self.commands]

    def start(self) -> None:
        """Start every agent. Raises `OSError` when a process cannot be started."""
        for agent in self._agents:
            self._start(agent)

    def poll(self) -> bool:
        """Look after the agents; False once all have ended for good."""
        now = self.clock()
        for agent in self._agents:
            if agent.process and (code := agent.process.poll()) is not None:
                agent.process = None
                agent.end_leftovers()
                self._take_end(agent, code, now)
        for agent in self._agents:
            if agent.due is not None and now >= agent.due:
                self._start(agent)
        if self._term_at is not None and now >= self._term_at:
            self._term_at = None
            self._terminate(now)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._asked = "killed" if self._asked else None
            self._kill_all("they did not end in time")
        return not all(agent.ended for agent in self._agents)

    def stop(self) -> None:
        """Ask the job to save and stop; whatever is left after the grace is killed."""
        if self._asked is None:
            self._asked = "stopped"
            self._drop_restarts()
            self._terminate(self.clock())

    def kill(self) -> None:
        """End everything now, nothing saved."""
        self._asked = "killed"
        self._drop_restarts()
        self._kill_all("asked to")

    def note_progress(self) -> None:
        """The training moved on: pauses and the backstop begin anew."""
        for agent in self._agents:
            agent.pause, agent.fruitless = FIRST_PAUSE, 0

    @property
    def stopping(self) -> bool:
        return self._asked is not None or self._failure is not None

    @property
    def outcome(self) -> Outcome:
        """How the job ended, once `poll` has said that it did."""
        if self._failure:
            return self._failure
        codes = [(agent.code or 0, agent.command.node) for agent in self._agents]
        if all(code == 0 for code, _ in codes):
            return Outcome("done", 0)
        code, node = max(codes)  # a save that failed (203) says more than the others' 200
        return Outcome(self._asked or "failed", code, node)

    def close(self, patience: float = KILL_SECONDS) -> None:
        """Kill what is still there and wait for it, at most `patience` seconds for each."""
        for agent in self._agents:
            agent.send(signal.SIGKILL)
            if agent.process:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    agent.process.wait(patience)
                    agent.end_leftovers()

    def _start(self, agent: _Agent) -> None:
        pid = agent.start()
        self.tell(agent.command.node, "agent-started", pid=pid)

    def _take_end(self, agent: _Agent, code: int, now: float) -> None:
        agent.code = code
        node = agent.command.node
        if code == 0 or self._asked or self._failure:
            self.tell(node, "agent-ended", code=code)
            if 0 < code < 128 and not self._failure:
                self._failure = Outcome("failed", code, node)
        elif 0 < code < 128 or agent.fruitless >= self.backstop:
            self._fail(Outcome("failed", code, node), now)
        else:
            agent.due = now + agent.pause
            agent.fruitless += 1
            self.tell(node, "agent-restarting", code=code, seconds=agent.pause)
            agent.pause = min(2 * agent.pause, LONGEST_PAUSE)

    def _fail(self, outcome: Outcome, now: float) -> None:
        self.tell(outcome.node or "", "agent-ended", code=outcome.code)
        self._failure = outcome
        self._drop_restarts()
        self._term_at = now + SETTLE_SECONDS

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
                self.tell(agent.command.node, "agent-killed", reason=why)
                agent.send(signal.SIGKILL)
