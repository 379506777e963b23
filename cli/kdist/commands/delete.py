"""`kdist delete`: delete jobs from a cluster, and runs on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import Code, JobNotFoundError, NotFoundError, UsageError
from kdist.job.find import missing_run, refer_all
from kdist.job.job import DeleteOptions

if TYPE_CHECKING:
    from kdist.job.job import Job


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
@options.output_option("table", "name", "json")
def command(
    jobs: tuple[str, ...],
    *,
    more: tuple[str, ...],
    selector: str,
    everything: bool,
    local: bool,
    ignore_not_found: bool,
    output: str,
    namespace: str | None,
    context: str | None,
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
    named = [*((job, None) for job in jobs), *((None, file) for file in more)]
    if sum((bool(named), bool(selector), everything)) != 1:
        raise UsageError("name jobs, or use -l LABELS or --all", next_command="kdist delete --help")
    where = {"namespace": namespace, "context": context}
    chosen = DeleteOptions(**flags)
    done: dict[str, list[str]] = {"jobs": [], "deleted": [], "kept": []}
    if not named:
        _delete(targets.find_all(selector, local=local, **where), chosen, output, done)
    missing: list[tuple[str, str]] = []
    absent: dict[str, NotFoundError] = {}
    for each in (job for argument, file in named for job in refer_all(argument, file)):
        try:
            job = targets.find(each, local=local, changes=True, remains=chosen.purge, **where)
        except NotFoundError as error:
            absent[each.name] = error
        else:
            missing += _delete([job], chosen, output, done)
    if absent and not ignore_not_found:
        raise missing_run(*absent) if len(absent) > 1 else next(iter(absent.values()))
    if missing and not ignore_not_found:
        raise JobNotFoundError(*missing)
    if output == "json":
        console.emit({**done, "dryRun": chosen.dry_run}, kind="Deletion", output=output)
    return Code.OK


def _delete(
    jobs: Sequence[Job], chosen: DeleteOptions, output: str, done: dict[str, list[str]]
) -> list[tuple[str, str]]:
    """Delete jobs, and add what was deleted and kept to `done`; returns name and namespace of those
    that do not exist.
    """
    missing: list[tuple[str, str]] = []
    note = f" ({chosen.dry_run} dry run)" if chosen.dry_run != "none" else ""
    for job, plan in [(job, job.plan_deletion(chosen)) for job in jobs]:
        try:
            for title in plan.steps:
                done["deleted"].append(title)
                if output == "table":
                    console.result(f"{title} deleted{note}")
        except JobNotFoundError:
            missing.append((job.name, job.namespace))
            continue
        done["jobs"].append(job.name)
        done["kept"] += plan.kept
        if output == "name":
            console.result(f"job/{job.name}")
        for sentence in plan.kept:
            console.message(sentence)
    return missing
