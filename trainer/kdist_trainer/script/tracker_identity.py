"""The identity of a run in trackers of experiments: a script that is started again continues its
curve in W&B and MLflow, and no line of it is changed.

W&B takes the id of a run from who begins it. MLflow's server makes its own ids, so the run is found
by a tag when the script begins it: only then are its experiment and its server known. No variable
names the run, since the script's children and its further runs would take it for theirs.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import wraps
from typing import Any, Final

from kdist_trainer import log
from kdist_trainer.formats.userinfo import hide_userinfo

TAG: Final = "kdist.run-id"
_REFUSED = re.compile(r"[^\w.~-]")
"""What W&B refuses in an id, or quotes in an address."""
_BEFORE_ID: Final = 3
"""Arguments of `wandb.init` before the id."""


def identify(run_id: str, rank: int) -> str:
    """The id of a rank's run in a tracker. Rank 0's is the job's: others are only used by scripts
    in which each rank begins a run of its own.
    """
    return _REFUSED.sub("-", run_id if rank == 0 else f"{run_id}-{rank}")


def continue_wandb(identity: str) -> None:
    """Have the first run that this process begins be the one with this id."""
    wandb: Any = sys.modules["wandb"]
    begin = getattr(wandb, "init", None)
    if begin is None:  # a folder of W&B's files
        return
    process, is_first = os.getpid(), True

    @wraps(begin)
    def init(*args: Any, **named: Any) -> Any:
        nonlocal is_first
        was_first, is_first = is_first and os.getpid() == process, False
        if was_first and not _names_run(args, named):
            run = begin(*args, **{**named, "id": identity, "resume": "allow"})
            if getattr(run, "resumed", False):
                _allow_changes(run.config)
            return run
        return begin(*args, **named)

    wandb.init = init


def _allow_changes(config: Any) -> None:
    """Have the config of a run take other values than it has from the former start."""
    update = config.update

    @wraps(update)
    def change(values: Any, allow_val_change: bool | None = None) -> None:
        update(values, allow_val_change=allow_val_change is not False)

    object.__setattr__(config, "update", change)  # its own makes it a value of the run


def _names_run(args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether these arguments of `wandb.init`, or the environment, say which run it is."""
    settings = named.get("settings") or {}
    told = {**(settings if isinstance(settings, Mapping) else vars(settings))}
    told |= {name: value for name, value in named.items() if value is not None}
    names = ("id", "run_id", "fork_from", "resume_from")
    is_named = len(args) > _BEFORE_ID or any(told.get(name) for name in names)
    is_named |= told.get("resume") not in (None, "allow")
    return is_named or bool({"WANDB_RUN_ID", "WANDB_RESUME"} & os.environ.keys())


def find_mlflow(client: Any, experiment: str, identity: str) -> Any:
    """The run with the tag in this experiment; None if there is none. Raises what MLflow does."""
    tagged = f"tags.`{TAG}` = '{identity}'"
    return next(iter(client.search_runs([experiment], tagged, max_results=1)), None)


def continue_mlflow(identity: str) -> None:
    """Have the first run that this process begins be the one with the tag, if there is one."""
    mlflow: Any = sys.modules["mlflow"]
    fluent: Any = sys.modules.get("mlflow.tracking.fluent")
    if fluent is None:  # MLflow's tracing alone
        return
    begin, is_first = fluent.start_run, True

    @wraps(begin)
    def start_run(*args: Any, **named: Any) -> Any:
        nonlocal is_first
        was_first, is_first = is_first, False
        # with any of these the script names the run itself
        if was_first and not (args or named.get("run_id") or "MLFLOW_RUN_ID" in os.environ):
            named["tags"] = {TAG: identity, **(named.get("tags") or {})}
            try:
                experiment = str(named.get("experiment_id") or fluent._get_experiment_id())
                run = find_mlflow(fluent.MlflowClient(), experiment, identity)
                if run is not None:
                    _keep_params(fluent.MlflowClient, run)
                    return begin(**{**named, "run_id": run.info.run_id})
            except Exception as error:  # noqa: BLE001 - it may begin a curve, and must not end a script
                why = hide_userinfo(f"{type(error).__name__}: {error}")
                what = "MLflow starts a new run, since the earlier one cannot be continued"
                log.warn("tracker-unnamed", message=f"{what}: {why}")
        return begin(*args, **named)

    mlflow.start_run = fluent.start_run = start_run


def _keep_params(client: Any, run: Any) -> None:
    """Have the params that a run has stay: MLflow refuses other values, which ends a script."""
    identity, known = run.info.run_id, dict(run.data.params)
    log_param, log_batch, is_told = client.log_param, client.log_batch, False

    def is_kept(key: str, value: Any) -> bool:
        nonlocal is_told
        former = known.get(key)
        text = str(value)
        is_same = text == former or (len(former or "") >= 500 and text.startswith(str(former)))
        if former is not None and not is_told and not is_same:  # MLflow truncates long values
            is_told = True
            what = f"MLflow keeps the earlier values of the run's params, such as {key}: {former}"
            log.warn("tracker-params-kept", message=hide_userinfo(what))
        return former is not None

    @wraps(log_param)
    def log_new_param(
        self: Any, run_id: str, key: str, value: Any, *rest: Any, **named: Any
    ) -> Any:
        is_own = run_id == identity and is_kept(key, value)
        return value if is_own else log_param(self, run_id, key, value, *rest, **named)

    @wraps(log_batch)
    def log_new_batch(
        self: Any, run_id: str, metrics: Any = (), params: Any = (), *rest: Any, **named: Any
    ) -> Any:
        if run_id == identity:
            params = [each for each in params if not is_kept(each.key, each.value)]
        return log_batch(self, run_id, metrics, params, *rest, **named)

    client.log_param, client.log_batch = log_new_param, log_new_batch
