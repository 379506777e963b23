"""`kdist delete`: delete jobs from a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import Code, JobNotFoundError, UsageError

if TYPE_CHECKING:
    from kdist.cluster import Cluster


@click.command()
@click.argument("jobs", nargs=-1, metavar="[NAME|FILE]...")
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
    ignore_not_found: bool,
    **flags: Any,
) -> int:
    r"""Delete jobs from a cluster; their checkpoints stay.

    The pods save first. A later `kdist apply` of the same file resumes from the last checkpoint,
    unless --purge has deleted the claim that kdist created for it. Claims that kdist did not create
    are never deleted.

    \b
    Examples:
      kdist delete digits
      kdist delete -f job.yaml --purge
      kdist delete --all -n experiments --no-wait
    """
    from kdist.jobs import deletion

    named = [*((job, None) for job in jobs), *((None, file) for file in more)]
    if sum((bool(named), bool(selector), everything)) != 1:
        raise UsageError("name jobs, or use -l LABELS or --all", next_command="kdist delete --help")
    cluster_options = {key: flags.pop(key) for key in ("namespace", "context")}
    timeout = flags.pop("timeout")
    if not named:
        cluster = targets.connect(**cluster_options)
        names = deletion.list_names(cluster, selector)
        if not names:
            console.message(f"there are no such jobs in namespace {cluster.namespace}")
        for name in names:
            _delete(cluster, name, timeout=timeout, **flags)
        return Code.OK
    missing = []
    for argument, file in named:
        found = targets.find_job(argument, file)
        cluster = targets.connect(**cluster_options, job=found.namespace)
        if not _delete(cluster, found.name, timeout=timeout, **flags):
            missing.append((found.name, cluster.namespace))
    if missing and not ignore_not_found:
        raise JobNotFoundError(*missing)
    return Code.OK


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
