"""A training whose agent is forked from a process that has imported torch: for tests of what ranks
do, of which there are hundreds. It is observed and damaged as one under `kdist run` is, which takes
no part in it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import kdist.render
from kdist.spec import TrainingJob
from kdist_trainer.processes.liveness import ParentDeathPipe
from tests.trainer.agent.forks import fork_agent
from tests.trainer.agent.lab import descendants

from .training_run import TrainingRun, kill


class ForkedRun(TrainingRun):
    """One agent over a folder that is laid out as that of `kdist run`; all its processes have the
    modules `imports`, which their code would import otherwise.
    """

    def __init__(self, home: Path, job: dict[str, Any], *, imports: Sequence[str] = ()) -> None:
        super().__init__(home, job)
        self._imports = imports
        spec = TrainingJob.model_validate(job)
        self._log: Path = self.folder / "node-0" / "log"
        self._log.parent.mkdir(parents=True)
        config = self.folder / "train.json"
        config.write_text(kdist.render.read_train_json(kdist.render.render(spec)))
        self._pipe = ParentDeathPipe.create(self.folder / "parent-pipe")
        self._starts = 0
        self._arguments: list[object] = [
            "--config",
            config,
            "--run-id",
            "run-1",
            "--node",
            "node-0",
        ]
        self._arguments += ["--scratch", self._log.parent, "--port", "0", "--address", "127.0.0.1"]
        self._arguments += ["--parent-pipe", self._pipe.path, "--checkpoints", self.checkpoints]
        if spec.spec.code is not None and spec.spec.code.path is not None:
            self._arguments += ["--code", spec.spec.code.path]

    def start(self) -> Self:
        self._starts += 1
        store = f"file:{self.folder / f'rendezvous-{self._starts}'}"
        arguments = [str(one) for one in (*self._arguments, "--rendezvous", store)]
        with self._log.open("ab") as log:
            self.kdist = fork_agent(
                arguments, environment=os.environ, log=log.fileno(), imports=self._imports
            )
        return self

    def __exit__(self, *_: object) -> None:
        if not self.has_ended():
            for pid in (self.process.pid, *descendants(self.process.pid)):
                kill(pid)
            self.process.wait()
        self._pipe.close()

    def stop(self) -> int:
        """Have it save and end, as `kdist run` does at Ctrl-C; returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def output(self) -> str:
        return self._log.read_text(errors="replace")
