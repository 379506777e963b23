"""Applies jobs to a cluster and deletes them.

Read `plan` first: it chooses workload kind, rendezvous and run, and renders the objects. `apply`
sends them by server-side apply, after a dry run and the checks of `admission`, and computes diffs.
`delete` removes a job, or the objects that a new version no longer has, and sets the owner
references by which objects are deleted with their workload. `resource` sends a job as a TrainingJob
instead, where kdist's controller creates the objects. Rendering itself is in `kdist.render`, and
everything about a running job in `kdist.job.cluster`.
"""

from kdist.deploy.apply import (
    ApplyResult,
    Difference,
    compare,
    create_key,
    find_difference,
    find_result,
    forget_end,
    keep_runtime,
    request_start,
    send,
)
from kdist.deploy.delete import drop_owner, find_objects, prune, remove
from kdist.deploy.plan import Plan, describe_suspended, make_plan, record_commit
from kdist.deploy.resource import (
    ResourcePlan,
    compare_resource,
    plan_resource,
    prune_code,
    send_resource,
    uses_resource,
)

__all__ = [
    "ApplyResult",
    "Difference",
    "Plan",
    "ResourcePlan",
    "compare",
    "compare_resource",
    "create_key",
    "describe_suspended",
    "drop_owner",
    "find_difference",
    "find_objects",
    "find_result",
    "forget_end",
    "keep_runtime",
    "make_plan",
    "plan_resource",
    "prune",
    "prune_code",
    "record_commit",
    "remove",
    "request_start",
    "send",
    "send_resource",
    "uses_resource",
]
