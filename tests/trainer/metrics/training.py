"""A real agent with two ranks that train digits, for tests of its metrics."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from kdist_trainer.checkpoint.ledger import read_lines
from kdist_trainer.config import Checkpointing, Every, Nodes, TrainConfig, Training
from kdist_trainer.formats import LEDGER, STEPS_FILE
from tests.trainer.agent.forks import fork_agent
from tests.trainer.checkpoint.exported import assert_done_tells_what_is_kept
from tests.trainer.metrics.scrape import fetch, wait_until

PATIENCE = 240.0
Recovery = Literal["auto", "restart"]


class TrainingRun:
    """An agent with two ranks that trains digits, and its files."""

    def __init__(
        self, home: Path, *, steps: int, checkpoint_steps: int, recovery: Recovery = "auto"
    ) -> None:
        self.checkpoints = home / "checkpoints"
        self.scratch = home / "node-0"
        self.log = home / "log"
        checkpoint = Checkpointing(every=Every(steps=checkpoint_steps))
        training = Training(
            workload="digits",
            steps=steps,
            global_batch=64,
            checkpoint=checkpoint,
            recovery=recovery,
        )
        nodes = Nodes(min=1, max=1)
        config = TrainConfig(name="digits", nodes=nodes, procs_per_node=2, train=training)
        (home / "train.json").write_text(config.to_json())
        command = ["--config", str(home / "train.json"), "--run-id", "r", "--port", "0"]
        command += [
            "--node",
            "node-0",
            "--scratch",
            str(self.scratch),
            "--rendezvous",
            f"file:{home / 'store'}",
        ]
        command += ["--on-finish", "keep-alive"]  # so that it answers as long as the test needs
        command += ["--checkpoints", str(self.checkpoints)]
        with self.log.open("wb") as log:
            self.agent = fork_agent(command, environment=os.environ, log=log.fileno())

    def wait_for_step(self, step: int) -> None:
        """Return once the ledger has this step."""
        wait_until(lambda: self.agent.poll() is not None or self.last_step() >= step, PATIENCE)
        assert self.agent.poll() is None, self.log.read_text()[-4000:]

    def last_step(self) -> int:
        """The last step in the ledger; 0 before the first."""
        return int(self.losses()[-1][0]) if self.losses() else 0

    def losses(self) -> list[tuple[int, str]]:
        """Step and exact loss of every line of the ledger."""
        if not (self.checkpoints / "ledger" / "steps.jsonl").exists():
            return []
        return [
            (line["step"], line["loss"])
            for line in read_lines(self.checkpoints / LEDGER / STEPS_FILE)
        ]

    def wait_for_end(self) -> dict[str, Any]:
        """The DONE document, once it is there."""
        wait_until(
            lambda: self.agent.poll() is not None or self.status()["state"] == "succeeded",
            PATIENCE,
            every=0.2,
        )
        assert self.agent.poll() is None, self.log.read_text()[-4000:]
        document: dict[str, Any] = json.loads((self.checkpoints / "DONE").read_text())
        assert_done_tells_what_is_kept(self.checkpoints, document)
        return document

    def port(self) -> int:
        """Port of the exporter, once it listens."""
        wait_until(
            lambda: self.agent.poll() is not None or (self.scratch / "agent.json").exists(),
            PATIENCE,
        )
        assert self.agent.poll() is None, self.log.read_text()[-4000:]
        return int(json.loads((self.scratch / "agent.json").read_text())["port"])

    def status(self) -> dict[str, Any]:
        """The status document."""
        document: dict[str, Any] = json.loads(fetch(self.port(), "/status")[1])
        return document


@contextmanager
def training(
    home: Path, *, steps: int, checkpoint_steps: int = 100_000, recovery: Recovery = "auto"
) -> Iterator[TrainingRun]:
    """Start a training, and kill it at the end of the `with` block."""
    run = TrainingRun(home, steps=steps, checkpoint_steps=checkpoint_steps, recovery=recovery)
    try:
        yield run
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.agent.pid, signal.SIGKILL)
        run.agent.wait()
