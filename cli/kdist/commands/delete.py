"""`kdist delete`: delete jobs from a cluster, and runs on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import Code, JobNotFoundError, NotFoundError, UsageError

if TYPE_CHECKING:
    from kdist.cluster import Cluster
    from kdist.job.cluster.deletion import Deletion
    from kdist.job.local.job import LocalJob
    from kdist.status.documents import Document


class _DeleteOptions(NamedTuple):
    """The options that apply to every deletion."""

    purge: bool
    orphans: bool
    wait: bool
    grace_period: int | None
    dry_run: str
    output: str
    timeout: float | None

    @property
    def note(self) -> str:
        return f" ({self.dry_run} dry run)" if self.dry_run != "none" else ""


@click.command()
@click.argument("jobs", nargs=-1, metavar="[NAME|FILE]...", shell_complete=options.complete_job)
@click.option(
    "-f",
    "--filename",
    "more",
    multiple=True,
    metavar="FILE",
    shell_complete=options.complete_file,
    help="Delete the job of this file; may be repeated.",
)
@click.option(
    "-l", "--selector", default="", metavar="LABELS", help="Delete the jobs with these labels."
)
@click.option("--all", "everything", is_flag=True, help="Delete all jobs of the namespace.")
@click.option("--local", is_flag=True, help="Delete runs on this machine.")
@options.cluster_options
@click.option(
    "--purge",
    is_flag=True,
    help="Delete the checkpoints too: the volume claim if kdist created it, or those of the run.",
)
@click.option(
    "--orphans",
    is_flag=True,
    help="Delete too the pods that the job's label names and nothing owns, as `kubectl delete "
    "--cascade=orphan` of its workload leaves them.",
)
@click.option(
    "--wait/--no-wait",
    default=True,
    help="Wait for the pods to save and end (the default), or not.",
)
@click.option(
    "--grace-period",
    type=click.IntRange(min=0),
    metavar="SECONDS",
    help="Grace period for the pods, instead of the job's.",
)
@click.option("--ignore-not-found", is_flag=True, help="Do not fail if a job does not exist.")
@options.dry_run_option
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
    r"""Delete jobs; their checkpoints stay.

    The pods save first. A later `kdist apply` of the same file resumes from the last checkpoint,
    unless --purge has deleted the claim that kdist created for it. Claims that kdist did not
    create, and checkpoints in a bucket, are never deleted. A run on this machine saves first, too;
    then its folder in .kdist is deleted, except for the checkpoints.

    \b
    Examples:
      kdist delete digits
      kdist delete -f job.yaml --purge
      kdist delete --all -n experiments --no-wait
      kdist delete --all --local --dry-run=client
    """
    from kdist.job.cluster import deletion

    named = [*((job, None) for job in jobs), *((None, file) for file in more)]
    if sum((bool(named), bool(selector), everything)) != 1:
        raise UsageError("name jobs, or use -l LABELS or --all", next_command="kdist delete --help")
    cluster_options = {key: flags.pop(key) for key in ("namespace", "context")}
    chosen = _DeleteOptions(**flags)
    if local and not named:
        return _delete_all_runs(selector, chosen)
    if not named:
        cluster = targets.connect(**cluster_options)
        names = deletion.list_names(cluster, selector)
        if not names:
            console.message(f"there are no such jobs in namespace {cluster.namespace}")
        for name in names:
            _delete(cluster, name, chosen)
        return Code.OK
    missing: list[tuple[str, str]] = []
    absent: dict[str, NotFoundError] = {}
    for argument, file, job_namespace in _each_job(named):
        try:
            here = _find_run(argument, file, local=local, purge=chosen.purge, **cluster_options)
        except NotFoundError as error:
            absent[targets.find_job(argument, file).name] = error
            continue
        if here is not None:
            _delete_run(here, chosen)
            continue
        found = targets.find_job(argument, file)
        cluster = targets.connect(**cluster_options, job=found.namespace or job_namespace)
        if not _delete(cluster, found.name, chosen):
            missing.append((found.name, cluster.namespace))
    if absent and not ignore_not_found:
        raise targets.missing_run(*absent) if len(absent) > 1 else next(iter(absent.values()))
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
    """The run on this machine to delete, or with `purge` the checkpoints that one left; None for a
    job on a cluster. Raises as `targets.find_local` does.
    """
    from kdist.job.local import deletion

    try:
        return targets.find_local(job, file, local=local, changes=True, **cluster_options)
    except NotFoundError:
        remains = deletion.find_remains(targets.find_job(job, file).name) if purge else None
        if remains is None:
            raise
        return remains


def _delete_all_runs(selector: str, chosen: _DeleteOptions) -> int:
    """Delete all runs on this machine. Raises `UsageError` for a selector of labels."""
    from kdist.job.local.job import list_jobs

    if selector:
        raise UsageError("runs on this machine have no labels: -l cannot be combined with --local")
    runs = list_jobs()
    if not runs:
        console.message("there are no runs on this machine")
    for run in runs:
        _check_run(run, chosen)
    for run in runs:
        _delete_run(run, chosen)
    return Code.OK


def _check_run(run: LocalJob, chosen: _DeleteOptions) -> None:
    """Raise `UsageError` for options that do not apply to an active run."""
    if run.active and (not chosen.wait or chosen.grace_period is not None):
        raise UsageError(
            f"{run.name} is running, and its folder can only be deleted after it has saved and "
            "ended: --no-wait and --grace-period are for jobs on a cluster",
            next_command=run.kdist("suspend"),
        )


def _delete_run(run: LocalJob, chosen: _DeleteOptions) -> None:
    """Delete a run on this machine."""
    from kdist.job.local import deletion

    _check_run(run, chosen)
    plan = deletion.plan_deletion(run, purge=chosen.purge)
    if chosen.dry_run == "none":
        plan.run(timeout=chosen.timeout, notify=console.message)
    if chosen.output == "name":
        console.result(f"job/{run.name}")
    else:
        console.result(f"run {run.root} deleted{chosen.note}")
    if plan.kept is not None:
        more = "it is outside the run folder, so kdist never deletes it"
        if plan.is_purgeable:
            more = f"`{run.kdist('delete', '--purge', '--local')}` deletes it"
        console.message(f"{plan.kept} stays, with the checkpoints; {more}")


def _delete(cluster: Cluster, name: str, chosen: _DeleteOptions) -> bool:
    """Delete one job's objects; False if there is none."""
    from kdist.cluster import describe_owner
    from kdist.job.cluster import deletion

    plan = deletion.plan_deletion(cluster, name, purge=chosen.purge)
    for each in plan.foreign:
        console.warning(
            f"{each.title} stays: it does not belong to job {name}: {describe_owner(each.document)}"
        )
    strays = plan.list_strays()
    if strays and not chosen.orphans:
        _warn_of_strays(cluster, name, strays)
        strays = []
    if not plan.objects and not strays:
        return False
    wait = chosen.wait and plan.owns_pods
    grace_period = chosen.grace_period if plan.owns_pods else None
    pods = plan.pods_to_wait_for() if wait and chosen.dry_run == "none" else []
    seconds = (
        deletion.default_timeout([*pods, *strays], grace_period)
        if chosen.timeout is None
        else chosen.timeout
    )
    if waited := [*pods, *(strays if chosen.wait and chosen.dry_run == "none" else [])]:
        console.message(
            f"waiting up to {seconds:.0f} s for {len(waited)} pods of {name} to save and end "
            "(Ctrl-C stops waiting)"
        )
    _delete_strays(plan, strays, chosen, seconds)
    if chosen.dry_run == "client":
        deleted = iter(plan.objects)
    else:
        limit = seconds if wait else None
        deleted = plan.run(grace=grace_period, timeout=limit, dry_run=chosen.dry_run == "server")
    for each in deleted:
        if chosen.output == "table":
            console.result(f"{each.title} deleted{chosen.note}")
    if chosen.output == "name":
        console.result(f"job/{name}")
    for each in plan.kept:
        console.message(
            f"{each.title} stays, with the checkpoints; `kdist delete {name} --purge` deletes it"
        )
    if plan.bucket:
        console.message(f"{plan.bucket} is kept: kdist never deletes checkpoints in a bucket")
    return True


def _warn_of_strays(cluster: Cluster, name: str, strays: Sequence[Document]) -> None:
    """Tell which pods stay because nothing proves that they are the job's."""
    names = ", ".join(each["metadata"]["name"] for each in strays)
    console.warning(
        f"{names}: no workload owns these pods, though their label names {name}: they stay; "
        f"`kdist delete {name} --orphans -n {cluster.namespace}` deletes them"
    )


def _delete_strays(
    plan: Deletion, strays: Sequence[Document], chosen: _DeleteOptions, seconds: float
) -> None:
    """Delete the pods that nothing owns, before the objects that they need to save."""
    if not strays:
        return
    if chosen.dry_run == "client":
        deleted = iter([each["metadata"]["name"] for each in strays])
    else:
        deleted = plan.remove_strays(
            strays,
            grace=chosen.grace_period,
            timeout=seconds if chosen.wait else None,
            dry_run=chosen.dry_run == "server",
        )
    for each in deleted:
        if chosen.output == "table":
            console.result(f"pod/{each} deleted{chosen.note}")
