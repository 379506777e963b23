"""What each tracker has of a run, and how it is given more."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kdist_trainer.formats.untrusted_text import parse_json
from kdist_trainer.script.tracker_identity import continue_mlflow
from kdist_trainer.tracker.committed import LOSS, Point

_BATCH: Final = 100
"""Points of a request to MLflow, which takes 1000 metrics in one transaction."""


class Wandb:
    """A run of Weights & Biases. Offline, what its earlier processes have written is in folders of
    their own, which have its id.
    """

    def __init__(self, job: str, identity: str, config: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", job),
            name=os.environ.get("WANDB_NAME", job),
            id=os.environ.get("WANDB_RUN_ID", identity),
            resume="allow",
            reinit="finish_previous",
            config={**config},
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, x_disable_stats=True
            ),
        )
        is_offline = self._run.offline
        self.url = "" if is_offline else self._run.url or ""
        self.last_step = self._find_last() if is_offline else self._run.step - 1

    def _find_last(self) -> int:
        """The last step in the files of the run, by W&B's own reader, which ends where the process
        that wrote a file was killed.
        """
        folder, name = Path(self._run.dir).parent.parent, self._run.id
        last = 0
        for file in sorted(folder.glob(f"offline-run-*-{name}/run-{name}.wandb"), reverse=True):
            command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as reader:
                for line in reader.stdout or ():
                    if b'"type":"history"' in line:
                        last = int(parse_json(line)["history"]["step"]["num"])
            if last:
                break
        return last

    def send(self, points: Sequence[Point]) -> None:
        for step, values in points:
            self._run.log(values, step=step)

    def finish(self, metrics: Mapping[str, float], *, done: bool) -> None:
        self._run.summary.update(dict(metrics))
        self._run.finish(exit_code=0 if done else 1)


class Mlflow:
    """A run of MLflow's server, found by its tag."""

    def __init__(self, job: str, identity: str, config: Mapping[str, Any]) -> None:
        import mlflow

        mlflow.end_run()  # of a former try
        if not {"MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"} & os.environ.keys():
            mlflow.set_experiment(job)
        continue_mlflow(identity)
        run = mlflow.start_run(run_name=job).info
        self._client, self._id, self._end = mlflow.MlflowClient(), run.run_id, mlflow.end_run
        history = self._client.get_metric_history(self._id, LOSS)
        self.last_step = max((each.step for each in history), default=0)
        if not history:
            mlflow.log_params(dict(_flatten(config)))
        server = mlflow.get_tracking_uri().rstrip("/")
        address = f"{server}/#/experiments/{run.experiment_id}/runs/{self._id}"
        self.url = address if server.startswith("http") else ""

    def send(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        for first in range(0, len(points), _BATCH):
            metrics = [
                Metric(name, value, now, step)
                for step, values in points[first : first + _BATCH]
                for name, value in values.items()
            ]
            self._client.log_batch(self._id, metrics=metrics)
            self.last_step = metrics[-1].step

    def finish(self, metrics: Mapping[str, float], *, done: bool) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._id, name, value, step=self.last_step)
        self._end("FINISHED" if done else "KILLED")


def _flatten(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, value in config.items():
        inner = isinstance(value, Mapping)
        found += _flatten(value, f"{prefix}{name}.") if inner else [(f"{prefix}{name}", value)]
    return found
