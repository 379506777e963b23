"""`kdist apply`: apply jobs to a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import Code, KdistError, UsageError
from kdist.manifest import TRAINING_JOB

if TYPE_CHECKING:
    from kdist.cluster import Cluster
    from kdist.deploy import ApplyResult, Plan, ResourcePlan
    from kdist.spec import TrainingJob


@click.command()
@options.files_argument
@options.cluster_options
@options.set_option
@options.backend_option
@options.dry_run_option
@click.option(
    "--wait",
    is_flag=True,
    help=f"Wait until the job has ended; exit code {Code.JOB_FAILED} if it failed, "
    f"{Code.TIMEOUT} after --timeout.",
)
@click.option(
    "--follow", is_flag=True, help="Wait like --wait, and show the logs of all ranks meanwhile."
)
@click.option(
    "--force-conflicts", is_flag=True, help="Take over fields that another field manager has set."
)
@click.option(
    "--take-over",
    is_flag=True,
    help="Take over checkpoints locked by another run.",
)
@click.option(
    "--direct",
    is_flag=True,
    help="Apply the job's objects themselves, not a TrainingJob for kdist's controller.",
)
@click.option(
    "--error-unchanged", is_flag=True, help=f"Exit with {Code.UNCHANGED} if nothing changed."
)
@options.output_option("table", "name", "json", "yaml")
def command(
    files: tuple[str, ...], *, more: tuple[str, ...], output: str, dry_run: str, **flags: Any
) -> int:
    r"""Apply jobs to a cluster.

    Where the cluster serves TrainingJobs and you may create one, a TrainingJob is sent, and kdist's
    controller creates the job's objects; elsewhere, and with --direct, the objects are sent
    themselves. --dry-run=client prints the objects in both cases, and contacts no cluster. All is
    sent by server-side apply, so applying a job again is idempotent. Objects that the job no longer
    needs are pruned, but never a volume claim. The training continues when this command ends.

    \b
    Examples:
      kdist apply job.yaml
      kdist apply job.yaml --set spec.nodes.max=4 --follow
      kdist apply job.yaml --dry-run=server -o yaml
      kdist render job.yaml --claims with | kubectl apply --server-side -f -

    \b
    Exit codes:
      0 applied   2 invalid file   3 unchanged (with --error-unchanged)
      5 API server unreachable   7 permission denied
      with --wait and --follow: 6 timeout   10 the job failed   11 the job was stopped
    """
    jobs = targets.read_jobs([*files, *more], flags.pop("sets"), backend=flags.pop("backend"))
    if dry_run != "none" and (flags["wait"] or flags["follow"]):
        raise UsageError("--wait and --follow cannot be used with --dry-run")
    if flags["follow"] and len(jobs) > 1:
        raise UsageError("--follow takes a single job", hint="--wait takes several")
    if flags["follow"] and output == "json":
        raise UsageError("--follow shows logs, and cannot be used with -o json", hint="use --wait")
    if dry_run == "client":
        return _show(jobs, output=output)
    from kdist import deploy

    sent: list[ApplyResult] = []
    changed: list[tuple[Cluster, ResourcePlan, dict[str, Any]]] = []
    pruned = 0
    applied_jobs: list[tuple[Cluster, str]] = []
    for job, base in jobs:
        cluster_options = {name: flags[name] for name in ("namespace", "context", "timeout")}
        stays = flags["wait"] or flags["follow"]
        cluster = targets.connect(**cluster_options, job=job.metadata.namespace, stays=stays)
        applied_jobs.append((cluster, job.metadata.name))
        plan, just_sent = _send(
            cluster, job, base, output=output, dry_run=dry_run == "server", **flags
        )
        sent += just_sent
        pruned += _prune(cluster, plan, output=output, dry_run=dry_run == "server")
        if dry_run == "none" and isinstance(plan, deploy.ResourcePlan):
            changed.append((cluster, plan, just_sent[-1].applied.document))
        if output == "name":
            console.result(f"job/{job.metadata.name}")
    if output == "yaml":
        console.documents([each.applied.document for each in sent], output=output)
    _await_answers(changed)
    if flags["follow"]:
        return _follow(click.get_current_context(), *applied_jobs[0], timeout=flags["timeout"])
    if flags["wait"]:
        _wait(applied_jobs, flags["timeout"])
    if output == "json":  # unless an error takes its place
        console.documents([each.applied.document for each in sent], output=output)
    if (
        flags["error_unchanged"]
        and not pruned
        and all(each.applied.verb == "unchanged" for each in sent)
    ):
        return Code.UNCHANGED
    return Code.OK


def _send(
    cluster: Cluster,
    job: TrainingJob,
    base: Path,
    *,
    output: str,
    dry_run: bool,
    force_conflicts: bool,
    take_over: bool,
    direct: bool,
    **_: Any,
) -> tuple[Plan | ResourcePlan, list[ApplyResult]]:
    from kdist import deploy

    plan: Plan | ResourcePlan
    if deploy.uses_resource(cluster, job.metadata.name, direct=direct):
        if take_over:
            raise UsageError(
                f"--take-over cannot be used: {job.metadata.name} is applied as a TrainingJob",
                hint="set the annotation kdist.dev/run to the run that locked the checkpoints, or "
                "use --direct to apply the job's objects without a TrainingJob",
            )
        what = "TrainingJob"
        plan = deploy.plan_resource(cluster, job, base=base)
        results = deploy.send_resource(cluster, plan, dry_run=dry_run, force=force_conflicts)
    else:
        plan = deploy.make_plan(cluster, job, base=base, take_over=take_over)
        results = deploy.send(cluster, plan, dry_run=dry_run, force=force_conflicts)
        place = plan.placement
        what = f"backend {place.backend}, rendezvous {place.rendezvous}, run {place.run_id}"
    for text in plan.warnings:
        console.warning(text)
    if plan.folder is not None:
        console.message(plan.folder.describe())
    note = " (server dry run)" if dry_run else ""
    where = f"context {cluster.context}, namespace {cluster.namespace}"
    console.message(f"{where}: {job.metadata.name} as {what}")
    sent = list(_tell(results, note if output == "table" else None))
    configured = any(each.applied.verb == "configured" for each in sent)
    if not dry_run and any(each.applied.verb != "unchanged" for each in sent):
        kind = TRAINING_JOB if isinstance(plan, deploy.ResourcePlan) else ("v1", "ConfigMap")
        try:
            deploy.record_commit(cluster, job.metadata.name, kind, base)
        except KdistError as error:  # the job is applied
            console.message(f"the job is applied, but its git commit is not recorded: {error}")
    if isinstance(plan, deploy.Plan) and plan.exists and configured and not dry_run:
        name = job.metadata.name
        console.message(
            f"nodes change at once; other changes reach the pods of {name} with "
            f"`kdist restart {name} -n {cluster.namespace}`"
        )
    return plan, sent


def _tell(results: Iterable[ApplyResult], note: str | None) -> Iterator[ApplyResult]:
    """Print each result with this note, unless it is None, and each warning once."""
    shown: set[str] = set()
    for each in results:
        if note is not None:
            console.result(f"{each.manifest.title} {each.applied.verb}{note}")
        for text in each.applied.warnings:
            if text not in shown:
                console.warning(text)
        shown.update(each.applied.warnings)
        yield each


def _await_answers(
    changed: Iterable[tuple[Cluster, ResourcePlan, dict[str, Any]]],
) -> None:
    """Wait until the controller has acted on the TrainingJobs, and say what it leaves for later.
    They are applied in any case: if it does not act within seconds, a warning says so.

    Raises:
        KdistError: it does not accept one.
    """
    import time

    from kdist import deploy
    from kdist.job.find import in_cluster

    began = time.monotonic()
    for cluster, plan, document in changed:
        job = in_cluster(cluster, plan.job.metadata.name, dialog=targets.DIALOG)
        try:
            state = job.wait_for_answer(document, since=began)
        except KdistError as error:
            if error.code is not Code.TIMEOUT:
                raise
            console.warning(f"{error.message}; {error.hint}")
            console.message(f"Next: {error.next_command}")
            continue
        name, place = plan.job.metadata.name, f"-n {cluster.namespace}"
        if state.outdated:
            console.message(f"{name}: {state.outdated}: `kdist restart {name} {place}`")
        if state.suspended and not plan.job.spec.suspend:
            console.warning(deploy.describe_suspended(name, cluster.namespace))


def _prune(cluster: Cluster, plan: Plan | ResourcePlan, *, output: str, dry_run: bool) -> int:
    """Delete the objects that the job no longer needs; returns how many."""
    from kdist import deploy

    count = 0
    pruned = (
        deploy.prune(cluster, plan, dry_run=dry_run)
        if isinstance(plan, deploy.Plan)
        else deploy.prune_code(cluster, plan, dry_run=dry_run)
    )
    for each in pruned:
        count += 1
        if output == "table":
            console.result(f"{each.title} pruned{' (server dry run)' if dry_run else ''}")
    return count


def _follow(context: click.Context, cluster: Cluster, name: str, *, timeout: float | None) -> int:
    """Continue as `kdist logs -f`; returns its exit code."""
    group = context.find_root().command
    logs = group.get_command(context, "logs") if isinstance(group, click.Group) else None
    if logs is None:  # unreachable: `logs` is a command of the same program
        raise UsageError("there is no command `logs`")
    cluster_options = {"namespace": cluster.namespace, "context": context.params["context"]}
    code: int = context.invoke(logs, job=name, follow=True, timeout=timeout, **cluster_options)
    return code


def _wait(applied_jobs: Iterable[tuple[Cluster, str]], timeout: float | None) -> None:
    """Return when all jobs have succeeded. Raises `KdistError` with the exit code of the first that
    did not.
    """
    import time

    from kdist.job.find import in_cluster
    from kdist.job.goals import describe_status

    began = time.monotonic()
    for cluster, name in applied_jobs:
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - began))
        done = in_cluster(cluster, name, dialog=targets.DIALOG).wait("done", timeout=left)
        if done is not None:
            console.message(describe_status(done))


def _show(jobs: Iterable[tuple[TrainingJob, Path]], *, output: str) -> int:
    """Print what would be applied, without contacting a cluster."""
    from kdist import deploy

    documents = []
    for job, base in jobs:
        plan = deploy.make_plan(None, job, base=base)
        for text in plan.warnings:
            console.warning(text)
        if plan.folder is not None:
            console.message(plan.folder.describe())
        for manifest in plan.manifests:
            documents.append(manifest.document)
            if output == "table":
                console.result(f"{manifest.title} created (dry run)")
        if output == "name":
            console.result(f"job/{job.metadata.name}")
    if output in ("json", "yaml"):
        console.documents(documents, output=output)
    return Code.OK
