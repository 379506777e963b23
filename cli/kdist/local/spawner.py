"""The process that imports torch for all agents of a run and forks them
(`kdist_trainer.agent.spawner`).

Each agent is started as a shim that asks it for the agent; without it, the shim becomes the agent
and imports torch itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import replace

from kdist.local import supervisor
from kdist.local.run_dir import RunFolder
from kdist.local.supervisor import AgentCommand

_VARIABLE = "KDIST_SPAWNER"
_AGENT, _SHIM, _SPAWNER = "kdist_trainer", "kdist_trainer.agent.shim", "kdist_trainer.agent.spawner"
_END_SECONDS = 5.0


class Spawner:
    """Runs from its creation to `close`, or until the run's lifeline ends."""

    def __init__(self, folder: RunFolder, command: AgentCommand) -> None:
        """Start it beside the agents of which `command` is one; the lifeline is there already.
        Raises `OSError`.
        """
        self._asking, serving = socket.socketpair(type=socket.SOCK_DGRAM)
        with serving:
            environment = dict(command.environment)
            # by which the end of one agent would end this too
            environment.pop(supervisor.MARK, None)
            argv = [
                command.argv[0],
                "-m",
                _SPAWNER,
                str(folder.root / "train.json"),
                str(folder.lifeline),
            ]
            self._process = subprocess.Popen(
                argv,
                env={**environment, _VARIABLE: str(serving.fileno())},
                cwd=command.directory,
                stdin=subprocess.DEVNULL,
                # An agent that has to import for itself says what does not work.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[serving.fileno()],
            )

    def serve(self, commands: Sequence[AgentCommand]) -> list[AgentCommand]:
        """The same agents, forked by this process."""
        descriptor = self._asking.fileno()
        return [
            replace(
                command,
                argv=[_SHIM if word == _AGENT else word for word in command.argv],
                environment={**command.environment, _VARIABLE: str(descriptor)},
                descriptors=(descriptor,),
            )
            for command in commands
        ]

    def close(self) -> None:
        """Wait for its end, which the end of the lifeline brings about."""
        self._asking.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
