"""What each tracker has of a run, and how it is given more."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kdist_trainer.formats.untrusted_text import parse_json
from kdist_trainer.script.tracker_identity import TAG, find_mlflow
from kdist_trainer.tracker.committed import SIZE, Point

_METRICS: Final = 1000
_PARAMS: Final = 100
"""What MLflow takes in one request."""
_REFUSED: Final = re.compile(r"[^\w./ :-]")
"""What MLflow refuses in a name."""


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
        last, codes = 0, list[int]()
        for file in folder.glob(f"offline-run-*-{name}/run-{name}.wandb"):
            command = [sys.executable, "-P", "-m", "wandb", "leet", "inspect", "--json", str(file)]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as reader:
                for line in reader.stdout or ():
                    if b'"type":"history"' in line:
                        last = max(last, int(parse_json(line)["history"]["step"]["num"]))
            codes.append(reader.returncode)
        if codes and 0 not in codes:
            raise RuntimeError(f"W&B's reader fails with {codes[0]}: {shlex.join(command)}")
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
        self._client, self._end = mlflow.MlflowClient(), mlflow.end_run
        if "MLFLOW_RUN_ID" in os.environ:
            begun = mlflow.start_run()
        else:
            experiment = str(mlflow.tracking.fluent._get_experiment_id())
            if (found := find_mlflow(self._client, experiment, identity)) is not None:
                begun = mlflow.start_run(run_id=found.info.run_id)
            else:
                begun = mlflow.start_run(run_name=job, tags={TAG: identity})
        run, known = begun.info, begun.data.params
        self._id = run.run_id
        history = self._client.get_metric_history(self._id, SIZE)
        self.last_step = max((each.step for each in history), default=0)
        params = [
            mlflow.entities.Param(_name(name), str(value)) for name, value in _flatten(config)
        ]
        params = [each for each in params if each.key not in known]
        for first in range(0, len(params), _PARAMS):
            self._client.log_batch(self._id, params=params[first : first + _PARAMS])
        server = mlflow.get_tracking_uri().rstrip("/")
        address = f"{server}/#/experiments/{run.experiment_id}/runs/{self._id}"
        self.url = address if server.startswith("http") else ""

    def send(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(_name(name), value, now, step)
            for step, values in points
            # the last of a step says that the step was sent
            for name, value in sorted(values.items(), key=lambda item: item[0] == SIZE)
        ]
        for first in range(0, len(metrics), _METRICS):
            batch = metrics[first : first + _METRICS]
            self._client.log_batch(self._id, metrics=batch)
            self.last_step = batch[-1].step

    def finish(self, metrics: Mapping[str, float], *, done: bool) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._id, _name(name), value, step=self.last_step)
        self._end("FINISHED" if done else "KILLED")


TRACKERS: Final[Mapping[str, type[Wandb | Mlflow]]] = {"wandb": Wandb, "mlflow": Mlflow}
"""By their names in job.yaml."""


def _name(name: str) -> str:
    """The name of a metric or a param as MLflow takes it."""
    return _REFUSED.sub("_", name)


def _flatten(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, value in config.items():
        inner = isinstance(value, Mapping)
        found += _flatten(value, f"{prefix}{name}.") if inner else [(f"{prefix}{name}", value)]
    return found
