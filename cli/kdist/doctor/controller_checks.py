"""Checks of kdist's own controller: whether the cluster serves TrainingJobs, whether `kdist apply`
sends them, and whether a controller acts on them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kdist import rbac
from kdist.cluster import list_resources
from kdist.doctor.finding import Finding, missing, note, ok
from kdist.manifest import TRAINING_JOB
from kdist.rbac import Right
from kdist.status import CONTROLLER_FIX, read_resource

if TYPE_CHECKING:
    from kdist.cluster import Cluster


def check_training_jobs(cluster: Cluster) -> Iterator[Finding]:
    """How `kdist apply` sends a job, and whether the controller answers for the TrainingJobs that
    there are.
    """
    title = "TrainingJobs"
    if not cluster.serves(*TRAINING_JOB):
        yield ok(title, "not served: `kdist apply` sends the objects of a job themselves")
        return
    wanted = [Right(verb, *TRAINING_JOB) for verb in ("get", "create", "patch")]
    lacking = [str(each) for each in rbac.find_missing(cluster, wanted)]
    if lacking:
        yield note(
            title,
            f"served, but not allowed: {', '.join(lacking)}; `kdist apply` sends the objects of a "
            "job themselves",
            rbac.advise(lacking, cluster.namespace),
        )
    else:
        yield ok(title, "`kdist apply` sends one, and kdist's controller creates the objects")
    now = time.time()
    states = {
        str(each["metadata"]["name"]): read_resource(each) for each in list_resources(cluster)
    }
    silent = [name for name, state in states.items() if state.explain(now)[1] == "NoController"]
    if silent:
        yield missing(
            "controller of TrainingJobs",
            f"no controller acts on {', '.join(silent)}",
            CONTROLLER_FIX,
        )
    elif any(state.seen for state in states.values()):
        yield ok("controller of TrainingJobs", f"has acted on {len(states)} in this namespace")
