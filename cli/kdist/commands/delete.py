"""`kdist delete`: delete jobs from a cluster, and runs on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import Code, JobNotFoundError, KdistError, NotFoundError, UsageError
from kdist.job.find import missing_run, refer_all
from kdist.job.job import DeleteOptions

if TYPE_CHECKING:
    from kdist.job.job import Deletion, Job


@click.command()
@click.argument("jobs", nargs=-1, metavar="[NAME|FILE]...", shell_complete=options.complete_job)
@options.filename_option("Delete the job of this file; may be repeated.", several=True)
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
    refs = [job for argument, file in named for job in refer_all(argument, file)]
    found = [] if named else targets.find_all(selector, local=local, **where)
    plans = [job.plan_deletion(chosen) for job in found]
    outcomes = [{"job": each.name, "outcome": "not-tried"} for each in refs or found]
    how: Any = {"local": local, "changes": True, "remains": chosen.purge, **where}
    missing: list[tuple[str, str]] = []
    absent: dict[str, NotFoundError] = {}
    error: KdistError | None = None
    for index, each in enumerate(outcomes):
        job: Job | None = None
        each["outcome"] = "deleted"
        try:
            job = found[index] if found else targets.find(refs[index], **how)
            plan = plans[index] if plans else job.plan_deletion(chosen)
            _delete(job, plan, output, done, chosen.dry_run)
        except KdistError as problem:
            each["outcome"] = "not-found"
            if job is None and isinstance(problem, NotFoundError):
                absent[each["job"]] = problem
            elif job is not None and isinstance(problem, JobNotFoundError):
                missing.append((job.name, job.namespace))
            else:
                each["outcome"], error = "failed", problem
                break
    if not ignore_not_found and error is None and (absent or missing):
        error = JobNotFoundError(*missing)
        if absent:
            error = missing_run(*absent) if len(absent) > 1 else next(iter(absent.values()))
    # of a single job that is as it was, the error says all
    if output == "json" and (error is None or done["deleted"] or len(outcomes) > 1):
        failure = None if error is None else error.to_document()
        document = {**done, "outcomes": outcomes, "error": failure, "dryRun": chosen.dry_run}
        console.emit(document, kind="Deletion", output=output)
    if error is not None:
        raise error
    return Code.OK


def _delete(
    job: Job, plan: Deletion, output: str, done: dict[str, list[str]], dry_run: str
) -> None:
    """Delete a job, and add what was deleted and kept to `done`."""
    note = f" ({dry_run} dry run)" if dry_run != "none" else ""
    for title in plan.steps:
        done["deleted"].append(title)
        if output == "table":
            console.result(f"{title} deleted{note}")
    done["jobs"].append(job.name)
    done["kept"] += plan.kept
    if output == "name":
        console.result(f"job/{job.name}")
    for sentence in plan.kept:
        console.message(sentence)
