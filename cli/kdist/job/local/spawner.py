"""The process that imports torch for all agents of a run and forks them
(`kdist_trainer.agent.spawner`).

Each agent is started as a shim that requests the agent from the spawner; if the spawner is gone,
the shim becomes the agent and imports torch itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import replace

from kdist.job.local import supervisor
from kdist.job.local.run_dir import RunFolder
from kdist.job.local.supervisor import AgentCommand

_VARIABLE = "KDIST_SPAWNER"
_AGENT, _SHIM, _SPAWNER = "kdist_trainer", "kdist_trainer.agent.shim", "kdist_trainer.agent.spawner"


class Spawner:
    """Runs from its creation to `close`, or until the parent-death pipe is closed."""

    def __init__(self, folder: RunFolder, command: AgentCommand) -> None:
        """Start the process; the run's parent-death pipe exists already.

        Args:
            folder: The run's folder.
            command: Command line of one of the agents that will be forked.

        Raises:
            OSError: If the process cannot be started.
        """
        self._requests, serving = socket.socketpair(type=socket.SOCK_DGRAM)
        with serving:
            environment = dict(command.environment)
            # else the end of one agent would end the spawner too
            environment.pop(supervisor.MARK, None)
            argv = [
                command.argv[0],
                "-m",
                _SPAWNER,
                str(folder.root / "train.json"),
                str(folder.parent_pipe),
            ]
            self._process = subprocess.Popen(
                argv,
                env={**environment, _VARIABLE: str(serving.fileno())},
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
                environment={**command.environment, _VARIABLE: str(descriptor)},
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
