"""Operations on jobs in a cluster: read, watch, change and delete them.

Each operation has a module of its name (`scale`, `suspend`, `restart`, `wait`, `logs`, …). All
start from a `job.ClusterJob`, which `ClusterJob.find` reads from the cluster, or from a
snapshot: everything about one job at one moment. Read `snapshot` first.

This package prints nothing: it returns values and messages, and reports progress to the `notify`
function that it is given. Commands parse and print; sending a new job is `kdist.deploy`; what a
status means is `kdist.status`.
"""

from kdist.job.cluster.agents import Agents
from kdist.job.cluster.snapshot import Events, fetch_snapshot, finalize, list_snapshots, watch_job
from kdist.job.cluster.wait import GOALS, describe_status, exit_code, wait_for

__all__ = [
    "GOALS",
    "Agents",
    "Events",
    "describe_status",
    "exit_code",
    "fetch_snapshot",
    "finalize",
    "list_snapshots",
    "wait_for",
    "watch_job",
]
