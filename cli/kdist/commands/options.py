"""What the commands that talk to a cluster have in common: their options, the connection, and which job is meant. No command."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from kdist import console
from kdist.errors import UsageError

if TYPE_CHECKING:
    from kdist.cluster import Cluster

Command = TypeVar("Command", bound=Callable[..., Any])

PATIENCE = 60.0  # seconds that a request goes on trying while the API server is away
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_FILE_SUFFIXES = (".yaml", ".yml", ".json")


def seconds(value: str) -> float:
    """A duration as kubectl writes it (`90s`, `5m`, `1h30m`), or a number of seconds; in seconds. For click's `type=`."""
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    if not re.fullmatch(r"(\d+[smhd])+", value):
        raise click.BadParameter(f"`{value}` is no duration; write 90s, 5m or 1h30m")
    return float(sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)([smhd])", value)))


def cluster_options(command: Command) -> Command:
    """`-n/--namespace`, `--context` and `--timeout`; they arrive as `namespace`, `context`, `timeout` and go on to `connect`."""
    decorators = (
        click.option("-n", "--namespace", metavar="NAME", help="Namespace; without it the job file's, else the kubeconfig's."),
        click.option("--context", metavar="NAME", help="Context of the kubeconfig; without it the current one."),
        click.option("--timeout", type=seconds, metavar="DURATION", help="How long to try or wait, e.g. 90s or 5m."),
    )
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


def output_option(*formats: str, default: str = "table") -> Callable[[Command], Command]:
    """`-o/--output` with these formats and the default; arrives as `output`. `jsonpath` stands for `jsonpath=TEMPLATE`."""
    kinds = [default, *(each for each in formats if each != default)]

    def check(_: click.Context, __: click.Parameter, value: str) -> str:
        if value in kinds or (value.startswith("jsonpath=") and "jsonpath" in kinds):
            return value
        raise click.BadParameter(f"`{value}` is none of {', '.join(kinds)}")

    shown = "|".join(f"{each}=…" if each == "jsonpath" else each for each in kinds)
    return click.option("-o", "--output", default=default, metavar=shown, callback=check, help="Format of what is printed.")


def job_argument(command: Command) -> Command:
    """The job that is meant: NAME, or a job file as argument or with `-f`; arrives as `job` and `file` for `find_job`."""
    command = click.option("-f", "--filename", "file", metavar="FILE", help="Take name and namespace from a job file.")(command)
    return click.argument("job", required=False, metavar="NAME|FILE")(command)


class Found(NamedTuple):
    """A job's name, and the namespace in its file (None if there is no file or it names none)."""

    name: str
    namespace: str | None = None


def find_job(argument: str | None, file: str | None = None) -> Found:
    """Which job is meant by NAME, a path that ends in .yaml, or `-f FILE` (`-` is stdin).

    Raises `UsageError` if none or two are given, `InvalidJobError` for a file with problems.
    """
    if (argument is None) == (file is None):
        raise UsageError("name one job: NAME, or a job file", hint="`kdist get` lists the jobs of a namespace")
    path = file if argument is None else argument
    if path is None:  # cannot be: one of them is given
        raise UsageError("name one job")
    if file is None and not path.endswith(_FILE_SUFFIXES):
        return Found(path.removeprefix("job/").removeprefix("trainingjob/"))
    from kdist import load

    metadata = load.load_file(path).metadata
    return Found(metadata.name, metadata.namespace)


def connect(
    *, namespace: str | None = None, context: str | None = None, timeout: float | None = None, job: str | None = None
) -> Cluster:
    """A connection that tells of outages on stderr. `job` is the job file's namespace, which `namespace` (`-n`) overrules."""
    from kdist import cluster

    if namespace and job and namespace != job:
        console.message(f"namespace {namespace} (-n) is used, not {job} of the job file")
    chosen = namespace or job
    return cluster.connect(context, chosen, patience=PATIENCE if timeout is None else timeout, tell=console.message)


def files_of(paths: Sequence[str]) -> list[str]:
    """Job files below the given files and folders, in order; `-` stays. Raises `UsageError` for a folder without any."""
    from pathlib import Path

    found: list[str] = []
    for path in paths:
        if path == "-" or not Path(path).is_dir():
            found.append(path)
            continue
        inside = sorted(str(each) for each in Path(path).iterdir() if each.suffix in _FILE_SUFFIXES and each.is_file())
        if not inside:
            raise UsageError(f"there is no job file in the folder `{path}`")
        found += inside
    return found
