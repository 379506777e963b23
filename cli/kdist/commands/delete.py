"""`kdist delete`: delete jobs from a cluster, and runs on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import Code, JobNotFoundError, NotFoundError, UsageError

if TYPE_CHECKING:
    from kdist.cluster import Cluster
    from kdist.local.job import LocalJob


@click.command()
@click.argument("jobs", nargs=-1, metavar="[NAME|FILE]...", shell_complete=options.complete_job)
@click.option(
    "-f",
    "--filename",
    "more",
    multiple=True,
    metavar="FILE",
    help="Delete the job of this file; may be repeated.",
)
@click.option(
    "-l", "--selector", default="", metavar="LABELS", help="Delete the jobs with these labels."
)
@click.option("--all", "everything", is_flag=True, help="Delete all jobs of the namespace.")
@click.option("--local", is_flag=True, help="Delete runs on this machine.")
@options.cluster_options
@click.option(
    "--purge", is_flag=True, help="Delete the checkpoints' volume claim too, if kdist made it."
)
@click.option(
    "--wait/--no-wait",
    default=True,
    help="Wait for the pods to save and end (the default), or not.",
)
@click.option(
    "--grace-period",
    type=int,
    metavar="SECONDS",
    help="Grace period for the pods, instead of the job's.",
)
@click.option("--ignore-not-found", is_flag=True, help="Do not fail if a job does not exist.")
@click.option(
    "--dry-run",
    type=click.Choice(["none", "client", "server"]),
    default="none",
    help="Show what would be deleted, without deleting it.",
)
@options.output_option("table", "name")
def command(
    jobs: tuple[str, ...],
    *,
    more: tuple[str, ...],
    selector: str,
    everything: bool,
    local: bool,
    ignore_not_found: bool,
    **flags: Any,
) -> int:
    r"""Delete jobs from a cluster; their checkpoints stay.

    The pods save first. A later `kdist apply` of the same file resumes from the last checkpoint,
    unless --purge has deleted the claim that kdist created for it. Claims that kdist did not create
    are never deleted. A run on this machine saves first, too; then its folder in .kdist goes,
    except for the checkpoints.

    \b
    Examples:
      kdist delete digits
      kdist delete -f job.yaml --purge
      kdist delete --all -n experiments --no-wait
      kdist delete --all --local --dry-run=client
    """
    from kdist.jobs import deletion

    named = [*((job, None) for job in jobs), *((None, file) for file in more)]
    if sum((bool(named), bool(selector), everything)) != 1:
        raise UsageError("name jobs, or use -l LABELS or --all", next_command="kdist delete --help")
    cluster_options = {key: flags.pop(key) for key in ("namespace", "context")}
    timeout = flags.pop("timeout")
    if local and not named:
        return _delete_all_runs(selector, timeout=timeout, **flags)
    if not named:
        cluster = targets.connect(**cluster_options)
        names = deletion.list_names(cluster, selector)
        if not names:
            console.message(f"there are no such jobs in namespace {cluster.namespace}")
        for name in names:
            _delete(cluster, name, timeout=timeout, **flags)
        return Code.OK
    missing: list[tuple[str, str]] = []
    absent: list[str] = []
    for argument, file, job_namespace in _each_job(named):
        here = _find_run(argument, file, local=local, purge=flags["purge"], **cluster_options)
        if here is not None:
            _delete_run(here, timeout=timeout, **flags)
            continue
        found = targets.find_job(argument, file)
        if local:
            absent.append(found.name)
            continue
        cluster = targets.connect(**cluster_options, job=found.namespace or job_namespace)
        if not _delete(cluster, found.name, timeout=timeout, **flags):
            missing.append((found.name, cluster.namespace))
    if absent and not ignore_not_found:
        raise NotFoundError(f"there is no run {' nor '.join(absent)} on this machine")
    if missing and not ignore_not_found:
        raise JobNotFoundError(*missing)
    return Code.OK


def _each_job(
    named: Iterable[tuple[str | None, str | None]],
) -> Iterator[tuple[str | None, str | None, str | None]]:
    """NAME or FILE as given; for a file with several jobs the name and namespace of each."""
    for argument, file in named:
        jobs = targets.find_jobs(argument, file)
        if len(jobs) == 1 and file != "-":  # stdin can be read only once
            yield argument, file, None
        else:
            yield from ((each.name, None, each.namespace) for each in jobs)


def _find_run(
    job: str | None, file: str | None, *, local: bool, purge: bool, **cluster_options: Any
) -> LocalJob | None:
    """The run on this machine to delete, or with `purge` the checkpoints that one left."""
    from kdist.cluster import kubeconfig
    from kdist.local import deletion

    try:
        found = targets.find_local(job, file, local=local, changes=True, **cluster_options)
    except NotFoundError:
        if not local:
            raise
        found = None
    only_local = local or not (targets.asks_cluster(**cluster_options) or kubeconfig.is_there())
    if found is None and purge and only_local:
        return deletion.find_remains(targets.find_job(job, file).name)
    return found


def _delete_all_runs(selector: str, **flags: Any) -> int:
    """Delete all runs on this machine. Raises `UsageError` for a selector of labels."""
    from kdist.local.job import list_jobs

    if selector:
        raise UsageError("runs on this machine have no labels: -l cannot be combined with --local")
    for run in list_jobs():
        _delete_run(run, **flags)
    return Code.OK


def _delete_run(
    run: LocalJob,
    *,
    purge: bool,
    wait: bool,
    grace_period: int | None,
    dry_run: str,
    output: str,
    timeout: float | None,
) -> None:
    """Delete a run on this machine."""
    from kdist.local import deletion

    plan = deletion.plan_deletion(run, purge=purge)
    if run.active and (not wait or grace_period is not None):
        raise UsageError(
            f"{run.name} is running, and its folder can only be deleted after it has saved and "
            "ended: --no-wait and --grace-period are for jobs on a cluster",
            next_command=run.kdist("suspend"),
        )
    note = f" ({dry_run} dry run)" if dry_run != "none" else ""
    if dry_run == "none":
        plan.run(timeout=timeout, notify=console.message)
    console.result(f"job/{run.name}" if output == "name" else f"run {run.root} deleted{note}")
    if plan.kept is not None:
        more = "it is not in the run folder, and kdist did not choose it"
        if plan.is_purgeable:
            more = f"`{run.kdist('delete', '--purge', '--local')}` deletes it"
        console.message(f"{plan.kept} stays, with the checkpoints; {more}")


def _delete(
    cluster: Cluster,
    name: str,
    *,
    purge: bool,
    wait: bool,
    grace_period: int | None,
    dry_run: str,
    output: str,
    timeout: float | None,
) -> bool:
    """Delete one job's objects; False if there is none."""
    from kdist.cluster import describe_owner
    from kdist.jobs import deletion

    plan = deletion.plan_deletion(cluster, name, purge=purge)
    for each in plan.foreign:
        console.warning(
            f"{each.title} stays: it is not of job {name}: {describe_owner(each.document)}"
        )
    if not plan.owns_pods:
        wait, grace_period = False, None
    if not plan.objects:
        return False
    pods = plan.pods_to_wait_for() if wait and dry_run == "none" else []
    seconds = deletion.default_timeout(pods, grace_period) if timeout is None else timeout
    if pods:
        console.message(
            f"waiting up to {seconds:.0f} s for {len(pods)} pods of {name} to save and end "
            "(Ctrl-C stops waiting)"
        )
    note = f" ({dry_run} dry run)" if dry_run != "none" else ""
    if dry_run == "client":
        deleted = iter(plan.objects)
    else:
        limit = seconds if wait else None
        deleted = plan.run(grace=grace_period, timeout=limit, dry_run=dry_run == "server")
    for each in deleted:
        console.result(each.title if output == "name" else f"{each.title} deleted{note}")
    for each in plan.kept:
        console.message(
            f"{each.title} stays, with the checkpoints; `kdist delete {name} --purge` deletes it"
        )
    return True
