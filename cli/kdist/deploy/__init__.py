"""Applies jobs to a cluster and deletes them.

Read `job` first: it plans a job, sends it as a TrainingJob or as its objects, prunes, and compares.
`plan` chooses workload kind, rendezvous and run, and renders the objects. `apply` sends them by
server-side apply, after a dry run and the checks of `admission`. `delete` removes a job, or the
objects that a new version no longer has, and sets the owner references by which objects are deleted
with their workload. `live_workload` has what was chosen for a job whose ConfigMap is gone.
`resource` is the job as a TrainingJob, where kdist's controller creates the objects. `code` decides
where a code folder goes, `code_upload` sends it, to a claim through a `helper_pod` that runs
`receive_code`; `package_lock` locks what pods install. Rendering itself is in `kdist.render`, and
everything about a running job in `kdist.job.cluster`.
"""

from kdist.deploy.apply import (
    Difference,
    create_key,
    find_difference,
    find_result,
    forget_end,
    keep_runtime,
    request_start,
    send,
)
from kdist.deploy.delete import drop_owner, find_objects, remove
from kdist.deploy.job import compare, describe_plan, plan_job, prune_plan, send_plan
from kdist.deploy.plan import ApplyResult, Plan, describe_suspended, make_plan
from kdist.deploy.resource import ResourcePlan
