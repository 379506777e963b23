"""A job on this machine: the same agents and the same `train.json` as in a cluster, as local
processes.

`run_job` is the entry point. `run_dir` keeps what outlives an invocation, `fetching` fetches data
and weights by URL, `interpreter` says which Python runs the agents, `launch` prepares their
commands, `supervisor` starts and restarts them, `agents` requests their status, `progress` collects
the state of the run, `runner` is the loop that joins them, and says what signals do, and
`end_report` says how it ended. `job` is a run as other commands see it, `status` its status. This
package prints nothing: it is given a `Display`.
"""

from __future__ import annotations

from kdist.job.local.end_report import RunEnded
from kdist.job.local.interpreter import choose_interpreter
from kdist.job.local.launch import (
    LauncherLink,
    check_torch,
    describe_missing_gpus,
    install_command,
    launch_detached,
)
from kdist.job.local.runner import Display, run_job
from kdist.job.local.status import list_runs
