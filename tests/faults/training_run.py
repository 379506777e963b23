"""A training under `kdist run`, observed and damaged from outside: what the tests of faults share.

Everything is read where a user could read it: the ledger, the agents' notes and logs, the ranks'
heartbeats. Faults are real signals.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from kdist_trainer.checkpoint.ledger import RunLedger, read_lines
from kdist_trainer.formats import LEDGER, STEPS_FILE
from kdist_trainer.processes.liveness import Heartbeat, RankSnapshot
from tests.trainer.agent.lab import Agent
from tests.trainer.checkpoint.exported import assert_done_tells_what_is_kept

PATIENCE = 180.0  # seconds; a condition on a loaded machine of two cores


@dataclass(frozen=True)
class Rank:
    """A live rank as its heartbeat shows it."""

    node: str
    number: int
    """On the node, from 0."""
    pid: int
    beat: RankSnapshot


def describe_job(
    name: str, *, nodes: int | dict[str, int], train: dict[str, Any], **spec: Any
) -> dict[str, Any]:
    """A job document around the given `train` section, with time-outs made for tests."""
    times = {
        "hangTimeoutSeconds": 60,
        "collectiveTimeoutSeconds": 60,
        "terminationGracePeriodSeconds": 30,
        "joinWindowSeconds": 1,
    }
    body = {
        "image": "kdist-trainer:test",
        "nodes": nodes,
        "procsPerNode": 1,
        "train": train,
        **times,
        **spec,
    }
    return {
        "apiVersion": "kdist.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": body,
    }


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


class TrainingRun:
    """One `kdist run` in a folder of its own; ends what it started when the `with` block ends."""

    def __init__(self, home: Path, job: dict[str, Any], *args: str) -> None:
        self.home = home
        self.name: str = job["metadata"]["name"]
        self.folder = home / ".kdist" / self.name
        self.checkpoints = self.folder / "checkpoints"
        home.mkdir(parents=True, exist_ok=True)
        self.file = home / f"{self.name}.yaml"
        self.file.write_text(yaml.safe_dump(job))
        self.args = args
        self.kdist: Agent | None = None

    def start(self) -> Self:
        environment = {**os.environ, "KDIST_HOME": str(self.home / ".kdist"), "NO_COLOR": "1"}
        command = [sys.executable, "-m", "kdist", "run", str(self.file), *self.args]
        with (self.home / "output").open("ab") as output:
            self.kdist = subprocess.Popen(
                command,
                cwd=self.home,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.kdist and self.kdist.poll() is None:
            self.kdist.send_signal(signal.SIGCONT)
            self.kdist.kill()
            self.kdist.wait()

    @property
    def process(self) -> Agent:
        assert self.kdist, "not started"
        return self.kdist

    def wait(self, seconds: float = PATIENCE) -> int:
        """Exit code of `kdist run`; of a run that is done, DONE must be about the weights that were
        kept.
        """
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.name} did not end in {seconds} s\n{self.output()[-6000:]}"
            ) from None
        if code == 0 and (self.checkpoints / "DONE").exists():
            assert_done_tells_what_is_kept(self.checkpoints, self.done())
        return code

    def has_ended(self) -> bool:
        """Whether `kdist run` has ended."""
        return self.process.poll() is not None

    def wait_until(
        self,
        condition: Callable[[], Any],
        what: str,
        *,
        seconds: float = PATIENCE,
        every: float = 0.01,
    ) -> Any:
        """The first true value of `condition`; fails with the run's output when the run ends or
        time is up before.
        """
        end = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > end or self.process.poll() is not None:
                state = (
                    f"ended with {self.process.returncode}"
                    if self.process.poll() is not None
                    else f"{seconds} s are over"
                )
                raise AssertionError(f"waiting for {what}: {state}\n{self.output()[-6000:]}")
            time.sleep(every)
        return value

    # ── what can be seen
    # ────────────────────────────────────────────────────────────────────────────────────────────

    def output(self) -> str:
        return (self.home / "output").read_text(errors="replace")

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Events of the run ledger, all or of one name."""
        return [e for e in RunLedger(self.checkpoints).events() if name in (None, e["event"])]

    def steps(self) -> list[dict[str, Any]]:
        """Lines of the step ledger in the order in which they were written."""
        return read_lines(self.checkpoints / LEDGER / STEPS_FILE)

    def done(self) -> dict[str, Any]:
        """The DONE document."""
        document: dict[str, Any] = json.loads((self.checkpoints / "DONE").read_text())
        return document

    def report(self) -> dict[str, Any]:
        """The end report."""
        document: dict[str, Any] = json.loads((self.folder / "report.json").read_text())
        return document

    def agents(self) -> dict[str, int]:
        """Pids of the live agents by node."""
        found = {}
        for note in sorted(self.folder.glob("node-*/agent.json")):
            try:
                pid = json.loads(note.read_text())["pid"]
            except (OSError, ValueError):
                continue
            if is_alive(pid):
                found[note.parent.name] = pid
        return found

    def ranks(self) -> list[Rank]:
        """The live ranks of all nodes."""
        return list(self._ranks())

    def _ranks(self) -> Iterator[Rank]:
        for path in sorted(self.folder.glob("node-*/rank-*.heartbeat")):
            try:
                beat = Heartbeat(path).read()
            except (OSError, ValueError):
                continue  # not yet whole
            if beat.pid and is_alive(beat.pid):
                number = int(path.stem.removeprefix("rank-"))
                yield Rank(path.parent.name, number, beat.pid, beat)

    def log(self, node: str) -> list[dict[str, Any]]:
        """The agent's and its ranks' events, in order."""
        lines = (
            (self.folder / node / "log").read_text(errors="replace").splitlines()
            if (self.folder / node / "log").exists()
            else []
        )
        return [
            json.loads(line) for line in lines if line.startswith('{"time"') and line.endswith("}")
        ]

    def processes(self) -> set[int]:
        """Pids of every process that carries this run's folder in its environment or command
        line.
        """
        needle, found = str(self.folder).encode(), set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                except OSError:
                    continue
                if needle in text and is_alive(int(entry.name)) and int(entry.name) != os.getpid():
                    found.add(int(entry.name))
        return found


def kill(pid: int) -> None:
    """SIGKILL; a process that is gone already is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def wait_for_step(run: TrainingRun, step: int, *, ranks: int) -> dict[int, int]:
    """The processes of all ranks of one node once each is in `step` or further."""

    def are_there() -> dict[int, int]:
        found = [one for one in run.ranks() if one.beat.phase.name in ("STEP", "DATA")]
        if len(found) < ranks or min(one.beat.step for one in found) < step:
            return {}
        return {one.number: one.pid for one in found}

    found: dict[int, int] = run.wait_until(are_there, f"step {step}", every=0.002)
    return found
