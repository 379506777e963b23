"""The identity of a run in trackers of experiments: a script that is started again continues its
curve in W&B and MLflow, and no line of it is changed.

W&B takes the id of a run from the environment. MLflow's server makes its own ids, so the run is
found by a tag when the script begins it: only then are its experiment and its server known.
"""

from __future__ import annotations

import os
import re
import sys
from functools import wraps
from typing import Any, Final

from kdist_trainer import log

TAG: Final = "kdist.run-id"
_REFUSED = re.compile(r"[^\w.~-]")
"""What W&B refuses in an id, or quotes in an address."""


def identify(run_id: str, rank: int) -> str:
    """The id of a rank's run in a tracker. Rank 0's is the job's: others are only used by scripts
    in which each rank begins a run of its own.
    """
    return _REFUSED.sub("-", run_id if rank == 0 else f"{run_id}-{rank}")


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
        # by these the script names a run itself
        if was_first and not (args or named.get("run_id") or "MLFLOW_RUN_ID" in os.environ):
            named["tags"] = {TAG: identity, **(named.get("tags") or {})}
            try:
                experiment = str(named.get("experiment_id") or fluent._get_experiment_id())
                tagged = f"tags.`{TAG}` = '{identity}'"
                for run in fluent.MlflowClient().search_runs([experiment], tagged, max_results=1):
                    named["run_id"] = run.info.run_id
            except Exception as error:  # noqa: BLE001 - it may begin a curve, and must not end a script
                what = f"MLflow begins a new curve: {type(error).__name__}: {error}"
                log.warn("tracker-unnamed", message=what)
        return begin(*args, **named)

    mlflow.start_run = fluent.start_run = start_run
