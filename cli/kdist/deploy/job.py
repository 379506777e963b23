"""A job on its way to a cluster: as a TrainingJob where kdist's controller is to create the job's
objects, else as these objects. `plan_job` decides which, and the others take the plan of either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kdist.deploy.apply import Difference, find_difference, send
from kdist.deploy.code_upload import describe_sent
from kdist.deploy.delete import find_leftovers, prune
from kdist.deploy.plan import ApplyResult, Plan, make_plan, objects_of
from kdist.deploy.resource import (
    ResourcePlan,
    plan_resource,
    prune_code,
    send_resource,
    uses_resource,
)
from kdist.errors import KdistError, UsageError
from kdist.job_file.commit import find_commit
from kdist.manifest import CODE_SENT, COMMIT, TRAINING_JOB, Manifest

if TYPE_CHECKING:
    from kdist.cluster import Cluster
    from kdist.cluster.client import Verb
    from kdist.spec import TrainingJob


def plan_job(
    cluster: Cluster, job: TrainingJob, *, base: Path, direct: bool = False, take_over: bool = False
) -> Plan | ResourcePlan:
    """Plan a job whose relative paths start from `base`; nothing is sent yet. `direct` asks for its
    objects themselves in any case, `take_over` for checkpoints that another run has locked, which a
    TrainingJob cannot. Raises `KdistError` if it cannot be applied so.
    """
    name = job.metadata.name
    if not uses_resource(cluster, name, direct=direct):
        return make_plan(cluster, job, base=base, take_over=take_over)
    if take_over:
        raise UsageError(
            f"--take-over cannot be used: {name} is applied as a TrainingJob",
            hint="set the annotation kdist.dev/run to the run that locked the checkpoints, or "
            "use --direct to apply the job's objects without a TrainingJob",
        )
    return plan_resource(cluster, job, base=base)


def send_plan(
    cluster: Cluster,
    plan: Plan | ResourcePlan,
    *,
    base: Path,
    notify: Callable[[str], None],
    warn: Callable[[str], None],
    dry_run: bool = False,
    force: bool = False,
) -> Iterator[ApplyResult]:
    """Send what is planned, and note on the job's object the git commit of `base`. Yields each
    object with its result as soon as it is applied; `notify` and `warn` receive what is to be known
    meanwhile, warnings of the server once each. With `dry_run` the server only checks; `force`
    takes over fields of other field managers. Raises `KdistError` with all that was rejected.
    """
    describe_plan(plan, notify=notify, warn=warn)
    name, what = plan.job.metadata.name, "TrainingJob"
    if isinstance(plan, Plan):
        place = plan.placement
        what = f"backend {place.backend}, rendezvous {place.rendezvous}, run {place.run_id}"
    notify(f"context {cluster.context}, namespace {cluster.namespace}: {name} as {what}")
    verbs: set[Verb] = set()
    said: set[str] = set()
    for each in _send(cluster, plan, dry_run=dry_run, force=force, notify=notify):
        yield each
        for text in each.applied.warnings:
            if text not in said:
                warn(text)
        said.update(each.applied.warnings)
        verbs.add(each.applied.verb)
    if dry_run:
        return
    if verbs - {"unchanged"}:
        kind = TRAINING_JOB if isinstance(plan, ResourcePlan) else ("v1", "ConfigMap")
        sent, what = "", "its git commit"
        try:
            if plan.folder is not None and (sent := describe_sent(cluster, plan.job)):
                what += " and where its code is"
        except KdistError as error:
            notify(f"the job is applied, but where its code is could not be recorded: {error}")
        notes = {COMMIT: find_commit(base) or None, CODE_SENT: sent or None}
        try:
            objects_of(cluster, name).change(*kind, name, {"metadata": {"annotations": notes}})
        except KdistError as error:
            notify(f"the job is applied, but {what} could not be recorded: {error}")
    if isinstance(plan, Plan) and plan.exists and not plan.restarts and "configured" in verbs:
        notify(
            f"nodes change at once; other changes reach the pods of {name} with "
            f"`kdist restart {name} -n {cluster.namespace}`"
        )


def describe_plan(
    plan: Plan | ResourcePlan, *, notify: Callable[[str], None], warn: Callable[[str], None]
) -> None:
    """Say what a plan warns of, and which files it sends."""
    for text in plan.warnings:
        warn(text)
    if isinstance(plan, Plan) and plan.finished and not plan.restarts:
        job = plan.job.metadata
        warn(
            f"job {job.name} has already {plan.finished}: the applied changes take effect with "
            f"`kdist restart {job.name} -n {job.namespace}`, which continues from its last "
            "checkpoint"
        )
    if plan.folder is not None:
        notify(plan.folder.describe())


def _send(
    cluster: Cluster,
    plan: Plan | ResourcePlan,
    *,
    dry_run: bool,
    force: bool,
    notify: Callable[[str], None] = lambda _: None,
) -> Iterator[ApplyResult]:
    if isinstance(plan, Plan):
        return send(cluster, plan, notify=notify, dry_run=dry_run, force=force)
    return send_resource(cluster, plan, notify=notify, dry_run=dry_run, force=force)


def prune_plan(
    cluster: Cluster, plan: Plan | ResourcePlan, *, dry_run: bool = False
) -> Iterator[Manifest]:
    """Delete the objects that the job no longer needs; yields each afterwards."""
    if isinstance(plan, Plan):
        return prune(cluster, plan, dry_run=dry_run)
    return prune_code(cluster, plan, dry_run=dry_run)


def compare(
    cluster: Cluster, plan: Plan | ResourcePlan, *, force: bool = False
) -> Iterator[Difference]:
    """Each object that an apply would create, change or delete; of a TrainingJob, itself and its
    code. Raises `KdistError` with everything that the server would reject.
    """
    from kdist.cluster import normalize

    for each in _send(cluster, plan, dry_run=True, force=force):
        yield from find_difference(each)
    for manifest in find_leftovers(cluster, plan) if isinstance(plan, Plan) else ():
        yield Difference(manifest, normalize(manifest.document), None)
