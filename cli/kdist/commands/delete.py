"""`kdist delete`: take jobs off a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import options
from kdist.errors import Code, NotFoundError, UsageError

if TYPE_CHECKING:
    from kdist.cluster import Cluster

# Seconds beyond a pod's own grace that a node may take to take it away.
_MARGIN = 60.0


@click.command()
@click.argument("jobs", nargs=-1, metavar="[NAME|FILE]...")
@click.option(
    "-f",
    "--filename",
    "more",
    multiple=True,
    metavar="FILE",
    help="Take the job of this file off; may be repeated.",
)
@click.option(
    "-l", "--selector", default="", metavar="LABELS", help="Take off the jobs with these labels."
)
@click.option("--all", "everything", is_flag=True, help="Take off all jobs of the namespace.")
@options.cluster_options
@click.option(
    "--purge", is_flag=True, help="Delete the checkpoints' volume claim too, if kdist made it."
)
@click.option(
    "--wait/--no-wait", default=True, help="Wait for the pods to save and go (the default), or not."
)
@click.option(
    "--grace-period",
    type=int,
    metavar="SECONDS",
    help="Give the pods these seconds to end, not the job's own.",
)
@click.option("--ignore-not-found", is_flag=True, help="A job that is not there is no error.")
@click.option(
    "--dry-run",
    type=click.Choice(["none", "client", "server"]),
    default="none",
    help="Show what would go.",
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
    r"""Take jobs off a cluster; their checkpoints stay.

    The pods save first. A later `kdist apply` of the same file goes on from the last checkpoint,
    unless --purge has deleted the claim that kdist made for it; claims that were there before are
    never touched.

    \b
    Examples:
      kdist delete digits
      kdist delete -f job.yaml --purge
      kdist delete --all -n experiments --no-wait
    """
    named = [*((job, None) for job in jobs), *((None, file) for file in more)]
    if sum((bool(named), bool(selector), everything)) != 1:
        raise UsageError(
            "name jobs, or give -l LABELS, or --all", next_command="kdist delete --help"
        )
    where = {key: flags.pop(key) for key in ("namespace", "context")}
    timeout = flags.pop("timeout")
    if not named:
        cluster = options.connect(**where)
        names = _select(cluster, selector)
        if not names:
            console.message(f"there are no such jobs in namespace {cluster.namespace}")
        for name in names:
            _delete(cluster, name, timeout=timeout, **flags)
        return Code.OK
    missing = []
    for argument, file in named:
        found = options.find_job(argument, file)
        cluster = options.connect(**where, job=found.namespace)
        if not _delete(cluster, found.name, timeout=timeout, **flags):
            missing.append(f"{found.name} in namespace {cluster.namespace}")
    if missing and not ignore_not_found:
        raise NotFoundError(
            f"there is no job {', nor '.join(missing)}", next_command="kdist get -A"
        )
    return Code.OK


def _select(cluster: Cluster, selector: str) -> list[str]:
    """Names of the jobs with these labels."""
    wanted = ",".join(part for part in ("app.kubernetes.io/managed-by=kdist", selector) if part)
    found = cluster.list("v1", "ConfigMap", selector=wanted, metadata_only=True)
    labels = [each["metadata"].get("labels") or {} for each in found]
    return list(dict.fromkeys(each["kdist.dev/job"] for each in labels if "kdist.dev/job" in each))


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
    from kdist.deploy import delete, dependents

    objects, foreign = delete.find_objects(cluster, name)
    for each in foreign:
        console.warning(
            f"{each.title} stays: it is not of job {name}: {describe_owner(each.document)}"
        )
    if delete.split(foreign)[0]:  # then the pods are somebody else's too
        wait, grace_period = False, None
    kept = [] if purge else [each for each in objects if each.kind == dependents.CLAIM]
    going = [each for each in objects if each not in kept]
    if not going:
        return False
    pods = _find_unended_pods(cluster, name) if wait and dry_run == "none" else []
    seconds = _patience(pods, grace_period) if timeout is None else timeout
    if pods:
        console.message(
            f"waiting up to {seconds:.0f} s for {len(pods)} pods of {name} to save and go "
            "(Ctrl-C leaves them to it)"
        )
    note = f" ({dry_run} dry run)" if dry_run != "none" else ""
    if dry_run == "client":
        gone = iter(going)
    else:
        limit = seconds if wait else None
        gone = delete.remove(
            cluster, name, going, grace=grace_period, dry_run=dry_run == "server", wait=limit
        )
    for each in gone:
        console.result(each.title if output == "name" else f"{each.title} deleted{note}")
    for each in kept:
        console.message(
            f"{each.title} stays, with the checkpoints; `kdist delete {name} --purge` deletes it"
        )
    return True


def _find_unended_pods(cluster: Cluster, name: str) -> list[dict[str, Any]]:
    from kdist.deploy import delete

    return [
        pod
        for pod in delete.find_pods(cluster, name)
        if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
    ]


def _patience(pods: list[dict[str, Any]], grace: int | None) -> float:
    """Seconds that the pods may take: the longest grace of them, and a margin."""
    own = [(pod.get("spec") or {}).get("terminationGracePeriodSeconds") or 30 for pod in pods]
    return (max(own, default=30) if grace is None else grace) + _MARGIN
