"""A job on this machine: the same agents and the same `train.json` as in a cluster, as local
processes.

`run_job` is the entry point. `run_dir` keeps what outlives an invocation, `fetching` fetches data
and weights by URL, `launch` prepares the agents' commands, `supervisor` starts and restarts them,
`agents` requests their status, `progress` collects the state of the run, and `runner` is the loop
that joins them. `job` is a run as other commands see it, `status` its status, `detach` starts one
in the background. This package prints nothing: it is given a `Display`.
"""

from __future__ import annotations

from kdist.job.local.detach import LauncherLink, launch_detached
from kdist.job.local.launch import check_torch, describe_missing_gpus, install_command
from kdist.job.local.runner import Display, RunEnded, run_job
from kdist.job.local.status import list_runs

__all__ = [
    "Display",
    "LauncherLink",
    "RunEnded",
    "check_torch",
    "describe_missing_gpus",
    "install_command",
    "launch_detached",
    "list_runs",
    "run_job",
]
