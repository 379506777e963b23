"""The job, the cluster or the job files that an invocation names, by its arguments and the options
of `options.cluster_options`. Not a command itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands.confirmation import approve, confirm
from kdist.commands.options import NOT_HERE, find_place
from kdist.errors import InvalidJobError, Problem, UsageError
from kdist.job import find as finder
from kdist.job.job import Change, Changed, Dialog, Job

if TYPE_CHECKING:
    from kdist.cluster import Cluster
    from kdist.job.find import Found, JobRef
    from kdist.spec import TrainingJob


def _note_absence(sentence: str) -> None:
    """Let the error that the cluster has no such job say where else kdist looked."""
    click.get_current_context().meta[NOT_HERE] = sentence


DIALOG = Dialog(console.message, console.warning, approve, confirm, _note_absence)
"""Prints what an operation says, and asks on the terminal."""


def find(
    job: JobRef | str | None,
    file: str | None = None,
    *,
    namespace: str | None = None,
    context: str | None = None,
    local: bool = False,
    **how: Any,
) -> Found:
    """The job that the arguments refer to: NAME, a run folder or a job file, or what they refer to,
    and the values of `-f`, `-n`, `--context` and `--local`. Takes the arguments of
    `kdist.job.find.find` too, and raises as that and `refer` do.
    """
    invocation = click.get_current_context()
    offers_local = any(each.name == "local" for each in invocation.command.params)
    meant = job if isinstance(job, finder.JobRef) else finder.refer(job, file)
    place = find_place(invocation, namespace, context)
    here = local if offers_local else None
    return finder.find(meant, place, local=here, dialog=DIALOG, **how)


def find_all(
    selector: str, *, local: bool, namespace: str | None, context: str | None
) -> Sequence[Job]:
    """All jobs that `kdist.job.find.find_all` finds."""
    place = find_place(click.get_current_context(), namespace, context)
    return finder.find_all(place, local=local, selector=selector, dialog=DIALOG)


def connect(*, namespace: str | None = None, context: str | None = None, **how: Any) -> Cluster:
    """Connect to a cluster, as `Place.connect` does with these arguments; outages are reported on
    stderr.
    """
    place = find_place(click.get_current_context(silent=True), namespace, context)
    return place.connect(dialog=DIALOG, **how)


def change(
    verb: str,
    run: Callable[[Job, Change], str],
    *,
    wait: bool,
    timeout: float | None,
    dry_run: str,
    output: str,
    **how: Any,
) -> None:
    """Change the job that `find` finds, and print what that has come to: the sentence that `run`
    returns, or a document with it. Takes the arguments of `find` too.
    """
    found = find(**how, changes=True)
    said = run(found, Change(wait, timeout, dry_run))
    if output == "table":
        console.result(console.name_place(said))
        return
    where = {"job": found.name, "namespace": found.namespace, "verb": verb}
    told = {"message": said, "nextCommand": "", "savedStep": None}
    told |= said.document if isinstance(said, Changed) else {}
    document = {**where, **told, "dryRun": dry_run}
    console.emit(document, kind="Change", output=output)


def choose_backend(backend: str | None) -> list[str]:
    """`--backend` as overrides of a job file, in the form of `--set`."""
    from kdist.job_file.overrides import OptionOverride

    return [OptionOverride(f"spec.backend={backend}", f"--backend {backend}")] if backend else []


def read_jobs(
    paths: Sequence[str], overrides: Sequence[str] = (), *, backend: str | None = None
) -> list[tuple[TrainingJob, Path]]:
    """Load every job of these files and folders, each with the folder that its relative paths are
    resolved against, and a warning for what looks like a credential.

    Args:
        paths: job files, folders of them, or `-` for stdin.
        overrides: `PATH=VALUE` settings for every job.
        backend: workload kind for every job.

    Raises:
        UsageError: there is no job, or two files describe the same one.
        InvalidJobError: with the problems of all files.
    """
    from kdist.job_file import load_files

    if not paths:
        raise UsageError(
            "name a job file, a folder of them, or `-` for stdin", hint="`kdist init` writes one"
        )
    jobs: list[tuple[TrainingJob, Path]] = []
    problems: list[Problem] = []
    looks: list[Problem] = []
    overrides = [*overrides, *choose_backend(backend)]
    for file in (file for path in paths for file in _files_of(path)):
        try:
            base = Path.cwd() if file == "-" else Path(file).absolute().parent
            found = load_files(file, overrides=overrides, use="cluster", warnings=looks)
            jobs += [(job, base) for job in found]
        except InvalidJobError as error:
            problems += error.problems
    if problems:
        raise InvalidJobError(
            " ".join(paths), problems, next_command=f"kdist validate {' '.join(paths)}"
        )
    for each in looks:
        console.warning(each.advice)
    names = [(job.metadata.namespace, job.metadata.name) for job, _ in jobs]
    twice = sorted({name for namespace, name in names if names.count((namespace, name)) > 1})
    if twice:
        raise UsageError(
            f"{', '.join(twice)}: two of these files describe the same job",
            hint="leave one out, or give it another metadata.name",
        )
    return jobs


def _files_of(path: str) -> list[str]:
    if path == "-" or not Path(path).is_dir():
        return [path]
    found = [each for each in Path(path).iterdir() if each.suffix in finder.FILE_SUFFIXES]
    inside = sorted(str(each) for each in found if each.is_file())
    if not inside:
        raise UsageError(
            f"there is no job file in the folder `{path}`",
            hint="a job file ends in .yaml, .yml or .json",
        )
    return inside
