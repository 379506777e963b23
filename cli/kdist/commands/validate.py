"""`kdist validate`: every problem of job files at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kdist import console
from kdist.commands import options
from kdist.errors import Code, InvalidJobError, Problem


@click.command
@click.argument(
    "files",
    nargs=-1,
    required=True,
    metavar="FILE...",
    shell_complete=options.complete_file,
)
@options.set_option
@options.output_option(
    "text",
    "json",
    "github",
    text="Output format; github prints annotations for a pull request.",
)
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="List every file that the job would send to a cluster, and what is left out.",
)
@click.pass_context
def command(
    context: click.Context,
    files: tuple[str, ...],
    *,
    sets: tuple[str, ...],
    output: str,
    verbose: bool,
) -> None:
    r"""Check job files and show every problem at once.

    \b
    Examples:
      kdist validate job.yaml
      kdist validate jobs/*.yaml -o github
      kdist validate job.yaml --set spec.nodes=4
      kdist validate job.yaml -v                  with the files of spec.code

    FILE may be `-` for stdin. Exits with 0 if all files are valid, else with 2.
    """
    from kdist.job_file import load_files

    def check_pod(job: Any) -> Any:
        from kdist.render import find_pod_problems  # with Jinja, which few files need

        return find_pod_problems(job)

    reports: list[dict[str, Any]] = []
    failed = False
    for file in files:
        problems: tuple[Problem, ...] = ()
        looks: list[Problem] = []
        warned: list[str] = []
        next_command = ""
        try:
            jobs = load_files(
                file, overrides=sets, use="either", warnings=looks, check_pod=check_pod
            )
        except InvalidJobError as error:
            failed, problems, next_command = True, error.problems, error.next_command
            if output == "text":
                console.error(error)
        else:
            for job in jobs:
                surprises = [f"{file}: {each}" for each in _list_warnings(job, file)]
                warned += surprises
                if output == "text":
                    console.result(f"{file}: valid, {_summary(job)}")
                    for each in surprises:
                        console.warning(each)
                    if verbose and (text := _list_sent(job, file)):
                        console.result(text)
            advice = [each.advice for each in looks]
            warned += advice
            for each in advice if output == "text" else ():
                console.warning(each)
        if output == "github":
            for problem in problems:
                console.result(_annotation(problem))
        reports.append(
            {
                "file": file,
                "valid": not problems,
                "problems": [problem.to_document() for problem in problems],
                "warnings": warned,
                "nextCommand": next_command,
            }
        )
    if output == "json":
        console.emit({"files": reports}, kind="Validation", output="json")
    if failed:
        context.exit(Code.USAGE)


def _list_sent(job: Any, file: str) -> str:
    """Every file of the code folder that is sent, and what is left out; empty without a folder."""
    from kdist.job_file.folder import find_code

    folder = find_code(job, _base_of(file))
    return "" if folder is None else folder.describe(all_names=True)


def _base_of(file: str) -> Path:
    return Path.cwd() if file == "-" else Path(file).absolute().parent


def _list_warnings(job: Any, file: str) -> list[str]:
    """What is valid, and may surprise: a URL that moves, data that is not on this machine."""
    from kdist.job_file import resolve_path
    from kdist.spec import list_warnings

    base = _base_of(file)
    absent = [
        f"spec.data[{index}].path: there is no {resolve_path(base, data.path)}; `kdist run` needs "
        "it, a cluster does not"
        for index, data in enumerate(job.spec.data)
        if data.path is not None and not resolve_path(base, data.path).exists()
    ]
    script = job.spec.script and job.spec.code is None and job.spec.script.path
    if script and not script.startswith("/") and not resolve_path(base, script).exists():
        absent.append(
            f"spec.script.path: there is no {resolve_path(base, script)}; `kdist run` needs it, an "
            "image may have its own"
        )
    return [*list_warnings(job.spec), *absent]


def _summary(job: Any) -> str:
    """A summary of what a valid job would run."""
    nodes, procs = job.with_replicas().spec.nodes, job.spec.procs_per_node
    count = str(nodes.max) if nodes.min == nodes.max else f"{nodes.min} to {nodes.max}"
    what = (
        f"trains {job.spec.train.workload}"
        if job.spec.train
        else f"runs {job.spec.script.path or job.spec.script.module}"
    )
    ranks = (
        "" if procs == 1 else ", a rank per GPU" if procs == "auto" else f" with {procs} ranks each"
    )
    return f"{job.metadata.name} {what} on {count} {'node' if count == '1' else 'nodes'}{ranks}"


def _annotation(problem: Problem) -> str:
    """A workflow command of GitHub Actions."""
    text = f"{problem.sentence}. {problem.hint}" if problem.hint else problem.sentence
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    file = problem.source.replace("%", "%25").replace(",", "%2C").replace(":", "%3A")
    position = f",line={problem.line},col={problem.column}" if problem.line else ""
    return f"::error file={file}{position}::{escaped}"
