"""Agents as real processes over one folder, seen from outside: their logs, their scratch folders,
the files of their ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from kdist_trainer.processes.liveness import ParentDeathPipe
from tests.house.tree import ROOT
from tests.trainer.agent.forks import ForkedAgent, fork_agent

PATIENCE = 150.0
"""Seconds; machines that run these tests are small and busy."""
Agent = subprocess.Popen[bytes] | ForkedAgent


class Lab:
    """The agents of one job. `job` holds fields of train.json; ends what it started when the `with`
    block ends.

    `arguments` are words for the command line of every agent that is started from then on. With
    `fresh` an agent is a new interpreter that imports torch itself, as in a pod, and not a fork of
    a process that has.
    """

    def __init__(
        self,
        folder: Path,
        *,
        entrypoint: str = "train",
        run_id: str = "run-1",
        rendezvous: str | None = None,
        fresh: bool = False,
        **job: Any,
    ) -> None:
        self.folder = folder
        self.run_id = run_id
        self.entrypoint = f"tests.trainer.agent.members:{entrypoint}"
        self.checkpoints = folder / "checkpoints"
        self.rendezvous = rendezvous or f"file:{folder / 'store'}"
        self.arguments: list[str] = []
        self.agents: dict[str, Agent] = {}
        self._started: list[Agent] = []
        self._fresh = fresh
        folder.mkdir(parents=True, exist_ok=True)
        # no agent outlives this process
        self.parent_pipe = ParentDeathPipe.create(folder / "parent-pipe")
        defaults = {
            "name": "lab",
            "nodes": {"min": 1, "max": 1},
            "procsPerNode": 1,
            "terminationGracePeriodSeconds": 30,
        }
        document = {**defaults, "joinWindowSeconds": 0, "hangTimeoutSeconds": 100, **job}
        if "script" not in document:
            document["train"] = {"workload": "digits", "steps": 1}  # its entrypoint is another one
        (folder / "train.json").write_text(json.dumps(document))

    def start(self, *nodes: str, run_id: str | None = None, **environment: str) -> None:
        """Start the agents of these nodes, in the environment of this process and `environment`."""
        for node in nodes:
            command = ["--config", self.folder / "train.json", "--node", node]
            command += [
                "--run-id",
                run_id or self.run_id,
                "--scratch",
                self.folder / node,
                "--port",
                "0",
            ]
            command += [
                "--rendezvous",
                self.rendezvous,
                "--address",
                "127.0.0.1",
                *self.arguments,
                "--checkpoints",
            ]
            command += [self.checkpoints if run_id is None else self.folder / run_id]
            command += ["--entrypoint", self.entrypoint, "--parent-pipe", self.parent_pipe.path]
            with (self.folder / f"{node}.log").open("ab") as log:
                agent = self._begin(
                    [str(word) for word in command],
                    {"LAB": str(self.folder), **environment},
                    log.fileno(),
                )
            self.agents[node] = agent
            self._started.append(agent)

    def _begin(self, arguments: list[str], environment: dict[str, str], log: int) -> Agent:
        if not self._fresh:
            return fork_agent(arguments, environment={**os.environ, **environment}, log=log)
        command = [sys.executable, "-m", "kdist_trainer", *arguments]
        environment = {**os.environ, **environment}
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )

    def tell(self, word: str) -> None:
        """Leave a word for the ranks."""
        (self.folder / word).touch()

    def untell(self, word: str) -> None:
        """Take it back."""
        (self.folder / word).unlink()

    def wait(self, condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
        """Wait until `condition` gives something true; returns that."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{what} did not happen:\n{self.logs()}"
            time.sleep(0.05)
        return found

    def end(self, node: str) -> int:
        """Wait for the agent's end; returns its exit code."""
        self.wait(lambda: self.agents[node].poll() is not None, f"the end of {node}")
        return self.agents[node].wait()

    def ranks(self, generation: int) -> dict[int, dict[str, Any]]:
        """What the ranks of a generation last wrote, by rank."""
        found = [json.loads(path.read_text()) for path in self.folder.glob("rank-*.json")]
        return {
            int(one["rank"]): one for one in found if int(one["kdist_generation"]) == generation
        }

    def stepping(self, generation: int, *, world: int, steps: int = 2) -> dict[int, dict[str, Any]]:
        """Wait until all ranks of a generation have made so many steps; returns what they wrote."""

        def all_step() -> dict[int, dict[str, Any]] | None:
            ranks = self.ranks(generation)
            return (
                ranks
                if len(ranks) == world and all(rank["step"] >= steps for rank in ranks.values())
                else None
            )

        found: dict[int, dict[str, Any]] = self.wait(
            all_step, f"generation {generation} of {world} ranks"
        )
        return found

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-4000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    def events(self, node: str, name: str) -> list[dict[str, Any]]:
        """The events of this name that a node has logged."""
        lines = (self.folder / f"{node}.log").read_text(errors="replace").splitlines()
        return [
            event
            for line in lines
            if line.startswith('{"time"') and (event := json.loads(line))["event"] == name
        ]

    def record(self, node: str) -> dict[str, Any]:
        """The exit record of a node's agent."""
        record: dict[str, Any] = json.loads((self.folder / node / "exit.json").read_text())
        return record

    def ledger(self, name: str) -> list[dict[str, Any]]:
        """The run ledger's events of this name."""
        lines = (self.checkpoints / "ledger" / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self._started:
            for pid in [agent.pid, *descendants(agent.pid)] if agent.poll() is None else []:
                kill(pid, signal.SIGKILL)
            agent.wait()
        self.parent_pipe.close()


def kill(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def children(pid: int) -> list[int]:
    """Processes that a process started itself."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text(errors="replace").rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
    return found


def descendants(pid: int) -> list[int]:
    """Its children, their children, and so on."""
    return [one for child in children(pid) for one in (child, *descendants(child))]


def command_of(pid: int) -> str:
    """A process's command line; empty if it is gone."""
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
