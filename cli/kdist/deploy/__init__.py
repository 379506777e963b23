"""Applies jobs to a cluster and deletes them.

Read `plan` first: it chooses workload kind, rendezvous and run, and renders the objects. `apply`
sends them by server-side apply, after a dry run and the checks of `admission`, and computes diffs.
`delete` removes a job, or the objects that a new version no longer has; `dependents` sets the owner
references, by which objects are deleted with their workload. Rendering itself is in `kdist.render`,
and everything about a running job in `kdist.jobs`.
"""

from kdist.deploy.apply import (
    ApplyResult,
    Difference,
    compare,
    find_result,
    forget_end,
    keep_runtime,
    send,
)
from kdist.deploy.delete import find_objects, prune, remove
from kdist.deploy.dependents import drop_owner
from kdist.deploy.plan import Plan, make_plan, read_code

__all__ = [
    "ApplyResult",
    "Difference",
    "Plan",
    "compare",
    "drop_owner",
    "find_objects",
    "find_result",
    "forget_end",
    "keep_runtime",
    "make_plan",
    "prune",
    "read_code",
    "remove",
    "send",
]
