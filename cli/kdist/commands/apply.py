"""`kdist apply`: apply jobs to a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import Code, KdistError, UsageError

if TYPE_CHECKING:
    from kdist.deploy import ApplyResult
    from kdist.job.job import Job
    from kdist.spec import TrainingJob

_SAYS: dict[str, Any] = {"notify": console.message, "warn": console.warning}


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
    needs are pruned, but never a volume claim. The training continues when this command ends. With
    --wait and --follow it is an error if the job has already finished with other code or settings.

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
    from kdist.job.find import in_cluster

    sent: list[ApplyResult] = []
    answers: list[Callable[..., None]] = []
    pruned = 0
    applied_jobs: list[Job] = []
    old_ends: list[tuple[Job, str]] = []
    note = " (server dry run)" if dry_run == "server" else ""
    how: Any = {"dry_run": dry_run == "server", "force": flags["force_conflicts"]}
    for job, base in jobs:
        cluster_options = {name: flags[name] for name in ("namespace", "context", "timeout")}
        stays = flags["wait"] or flags["follow"]
        cluster = targets.connect(**cluster_options, job=job.metadata.namespace, stays=stays)
        applied = in_cluster(cluster, job.metadata.name, dialog=targets.DIALOG)
        applied_jobs.append(applied)
        chosen = {name: flags[name] for name in ("direct", "take_over")}
        plan = deploy.plan_job(cluster, job, base=base, **chosen)
        if stays and (end := applied.find_old_end(plan)):
            old_ends.append((applied, end))
        for each in deploy.send_plan(cluster, plan, base=base, **_SAYS, **how):
            sent.append(each)
            if output == "table":
                console.result(f"{each.manifest.title} {each.applied.verb}{note}")
        for manifest in deploy.prune_plan(cluster, plan, dry_run=how["dry_run"]):
            pruned += 1
            if output == "table":
                console.result(f"{manifest.title} pruned{note}")
        if dry_run == "none" and isinstance(plan, deploy.ResourcePlan):
            answers.append(partial(applied.await_answer, plan, sent[-1].applied.document))
        if output == "name":
            console.result(f"job/{job.metadata.name}")
    if output == "yaml":
        console.documents([each.applied.document for each in sent], output=output)
    began = time.monotonic()
    for answer in answers:
        answer(since=began)
    if old_ends:
        before, end = old_ends[0]
        raise KdistError(
            f"{before.name} is applied, but has already {end}, which was not a run of what is "
            "applied now: there is nothing to wait for",
            hint="restart it, or delete it and apply it again",
            next_command=f"kdist restart {before.name} -n {before.namespace}",
        )
    if flags["follow"]:
        return _follow(click.get_current_context(), applied_jobs[0], timeout=flags["timeout"])
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


def _follow(context: click.Context, applied: Job, *, timeout: float | None) -> int:
    """Continue as `kdist logs -f`; returns its exit code."""
    group = context.find_root().command
    logs = group.get_command(context, "logs") if isinstance(group, click.Group) else None
    if logs is None:  # unreachable: `logs` is a command of the same program
        raise UsageError("there is no command `logs`")
    cluster_options = {"namespace": applied.namespace, "context": context.params["context"]}
    code: int = context.invoke(
        logs, job=applied.name, follow=True, timeout=timeout, **cluster_options
    )
    return code


def _wait(applied_jobs: Iterable[Job], timeout: float | None) -> None:
    """Return when all jobs have succeeded. Raises `KdistError` with the exit code of the first that
    did not.
    """
    from kdist.job.goals import describe_status

    began = time.monotonic()
    for applied in applied_jobs:
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - began))
        done = applied.wait("done", timeout=left)
        if done is not None:
            console.message(describe_status(done))


def _show(jobs: Iterable[tuple[TrainingJob, Path]], *, output: str) -> int:
    """Print what would be applied, without contacting a cluster."""
    from kdist import deploy

    documents = []
    for job, base in jobs:
        plan = deploy.make_plan(None, job, base=base)
        deploy.describe_plan(plan, **_SAYS)
        for manifest in plan.manifests:
            documents.append(manifest.document)
            if output == "table":
                console.result(f"{manifest.title} created (dry run)")
        if output == "name":
            console.result(f"job/{job.metadata.name}")
    if output in ("json", "yaml"):
        console.documents(documents, output=output)
    return Code.OK
