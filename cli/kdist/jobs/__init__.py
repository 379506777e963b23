"""Jobs on a cluster, once they are there: read, watch, change and end them.

Each verb has a module of its name (`scale`, `suspend`, `restart`, `wait`, `logs`, `profile`, …).
All of them start from a `job.Job` read back from the cluster or from a `snapshot`: everything about
one job at one moment. Read `snapshot` first.

This package prints nothing: it returns values and sentences, and reports what takes long to a
function that it is given. Commands parse and print; sending a new job is `kdist.deploy`; what a
status means is `kdist.status`.
"""

from kdist.jobs.agents import Agents
from kdist.jobs.events import Events
from kdist.jobs.snapshot import fetch_snapshot, finalize, list_snapshots
from kdist.jobs.wait import GOALS, describe_status, exit_code, wait_for

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
]
