"""What a kubelet does for pods, done for agents as processes: start them, start them again by the exit table, stop them in order.

An agent that ends with 0 is finished. With a code below 128 the job has failed and the other agents are stopped. From 128 on, or
killed by a signal, it is started again after a pause that doubles from 0.5 s to 10 s; progress of the training sets it back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from kdist.local import leftovers

FIRST_PAUSE = 0.5  # seconds before an agent is started again
LONGEST_PAUSE = 10.0
SETTLE_SECONDS = 3.0  # that the other agents have to learn by themselves why the job failed, before they are told to stop
KILL_SECONDS = 2.0  # after SIGKILL, in which the kernel takes a process away

Kind = Literal["done", "failed", "stopped", "killed"]


class Tell(Protocol):
    """Takes what happens to agents, in the form of the trainer's own events."""

    def __call__(self, node: str, event: str, /, **fields: object) -> None: ...


@dataclass(frozen=True)
class AgentCommand:
    """How to start one agent: argv, whole environment, working directory, and the file that takes what it prints.

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
    """How it ended. `code` is the trainer's exit code that decided, `node` whose it was; a signal's number is negative."""

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
                start_new_session=True,  # so Ctrl-C reaches kdist alone, which asks the agents to save first
                pass_fds=self.command.descriptors,
            )
        return self.process.pid

    def send(self, number: signal.Signals) -> None:
        if self.process:
            # SIGKILL for whatever is in its group; a request to stop for the agent alone, which passes it on in its own way
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if number == signal.SIGKILL else os.kill)(self.process.pid, number)

    def end_leftovers(self) -> None:
        """Kill what has outlived the agent, as the end of a container does."""
        if scratch := self.command.environment.get(leftovers.MARK):
            leftovers.kill(scratch)


@dataclass
class Kubelet:
    """Keeps the agents of one job going. Single-threaded: call `poll` often, it never blocks.

    Attributes:
        commands: one for each agent.
        grace_seconds: from the request to stop to SIGKILL.
        backstop: restarts of one agent without any progress after which the job is given up. The job's own budget is smaller and
            is kept by the agents; this one ends what dies before it can count.
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
