"""Shared by the commands: their options, the connection to a cluster, and the job or run that an
invocation names. Not a command itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from kdist import console
from kdist.errors import InvalidJobError, NotFoundError, Problem, UsageError

if TYPE_CHECKING:
    from kdist.cluster import Cluster
    from kdist.jobs.job import ClusterJob
    from kdist.spec import TrainingJob

Command = TypeVar("Command", bound=Callable[..., Any])

RETRY_SECONDS = 60.0  # for how long a request is retried while the API server is unreachable
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_FILE_SUFFIXES = (".yaml", ".yml", ".json")


def seconds(value: str) -> float:
    """Parse a duration as kubectl writes it (`90s`, `5m`, `1h30m`), or a number of seconds; returns
    seconds. For click's `type=`.
    """
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    if not re.fullmatch(r"(\d+[smhd])+", value):
        raise click.BadParameter(f"`{value}` is not a duration; write 90s, 5m or 1h30m")
    return float(
        sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)([smhd])", value))
    )


# key of the login options in click's `Context.meta`
_LOGIN = "kdist.login"


def cluster_options(command: Command) -> Command:
    """Add the options that choose a cluster and an identity.

    The command receives `namespace`, `context` and `timeout`, and passes them to `connect`. It does
    not receive `--kubeconfig`, `--as`, `--as-group` and `--request-timeout`: `connect` and
    `find_run` read them from click's context.
    """
    decorators = (
        click.option(
            "-n",
            "--namespace",
            metavar="NAME",
            help="Namespace (default: the job file's, else the kubeconfig's).",
        ),
        click.option(
            "--context",
            metavar="NAME",
            help="Context of the kubeconfig (default: current).",
        ),
        _login("--kubeconfig", metavar="FILE", help="Instead of $KUBECONFIG or ~/.kube/config."),
        _login(
            "--as",
            metavar="USER",
            help="Act as this user, or system:serviceaccount:NAMESPACE:NAME.",
        ),
        _login(
            "--as-group",
            metavar="GROUP",
            multiple=True,
            help="Also act as a member of this group; may be repeated.",
        ),
        click.option(
            "--timeout", type=seconds, metavar="DURATION", help="How long to wait, e.g. 90s or 5m."
        ),
        _login(
            "--request-timeout",
            type=seconds,
            metavar="DURATION",
            help="Timeout of a single request; 0 for none.",
        ),
    )
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


def _login(name: str, **how: Any) -> Callable[[Command], Command]:
    """An option that is stored for `_login_options` and not passed to the command."""

    def keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value is not None and value != ():
            context.meta.setdefault(_LOGIN, {})[parameter.name] = value

    return click.option(
        name, f"login_{name.strip('-').replace('-', '_')}", expose_value=False, callback=keep, **how
    )


def _login_options() -> dict[str, Any]:
    """The values of `--kubeconfig`, `--as`, `--as-group` and `--request-timeout`, as arguments of
    `cluster.connect`.
    """
    context = click.get_current_context(silent=True)
    given: dict[str, Any] = {} if context is None else context.meta.get(_LOGIN, {})
    names = {"login_kubeconfig": "file", "login_request_timeout": "request_timeout"}
    found = {name: given[key] for key, name in names.items() if key in given}
    if "login_as" in given or "login_as_group" in given:
        from kdist.cluster import Impersonation

        found["impersonation"] = Impersonation(
            given.get("login_as", ""), given.get("login_as_group", ())
        )
    return found


def output_option(*formats: str, default: str = "table") -> Callable[[Command], Command]:
    """Add `-o/--output` with these formats; the command receives `output`. `jsonpath` stands for
    `jsonpath=TEMPLATE`.
    """
    kinds = [default, *(each for each in formats if each != default)]

    def check(_: click.Context, __: click.Parameter, value: str) -> str:
        if value in kinds or (value.startswith("jsonpath=") and "jsonpath" in kinds):
            return value
        raise click.BadParameter(f"`{value}` is not one of {', '.join(kinds)}")

    shown = "|".join(f"{each}=…" if each == "jsonpath" else each for each in kinds)
    return click.option(
        "-o",
        "--output",
        default=default,
        metavar=shown,
        callback=check,
        help="Output format.",
    )


def job_argument(command: Command) -> Command:
    """Add the job: NAME, or a job file as argument or with `-f`. The command receives `job` and
    `file`, and passes them to `find_job`.
    """
    command = click.option(
        "-f", "--filename", "file", metavar="FILE", help="Take name and namespace from a job file."
    )(command)
    return click.argument("job", required=False, metavar="NAME|FILE")(command)


def asks_cluster(namespace: str | None, context: str | None) -> bool:
    """Whether an option chooses a cluster, a namespace or an identity, so not a local run."""
    return bool(namespace or context or _login_options())


class JobRef(NamedTuple):
    """A job's name, and the namespace in its file (None if there is no file or it names none)."""

    name: str
    namespace: str | None = None


def find_job(argument: str | None, file: str | None = None) -> JobRef:
    """The job that NAME, a path that ends in .yaml, or `-f FILE` (`-` is stdin) refers to.

    Raises `UsageError` if none or two are given, `InvalidJobError` for a file with problems.
    """
    if (argument is None) == (file is None):
        raise UsageError(
            "name one job: NAME, or a job file", hint="`kdist get` lists the jobs of a namespace"
        )
    path = file if argument is None else argument
    if path is None:  # unreachable: one of them is given
        raise UsageError("name one job")
    if file is None and not path.endswith(_FILE_SUFFIXES):
        return JobRef(path.removeprefix("job/").removeprefix("trainingjob/"))
    from kdist import load

    metadata = load.load_file(path).metadata
    return JobRef(metadata.name, metadata.namespace)


def connect(
    *,
    namespace: str | None = None,
    context: str | None = None,
    timeout: float | None = None,
    job: str | None = None,
    stays: bool = False,
) -> Cluster:
    """Connect to a cluster; outages are reported on stderr.

    Args:
        namespace: from `-n`; overrides `job`.
        context: of the kubeconfig; None for the current one.
        timeout: seconds for which requests are retried while the API server is unreachable.
        job: the job file's namespace.
        stays: the command watches a job: `timeout` then limits its retries in total, and without
            one it retries without limit.
    """
    from kdist import cluster

    if namespace and job and namespace != job:
        console.message(f"using namespace {namespace} (-n), not {job} of the job file")
    return cluster.connect(
        context,
        namespace or job,
        retry_seconds=RETRY_SECONDS if timeout is None else timeout,
        until=cluster.deadline(timeout) if stays else None,
        notify=console.message,
        **_login_options(),
    )


def files_argument(command: Command) -> Command:
    """Add job files, folders of them and `-`, as arguments or with `-f`. The command receives
    `files` and `more`, and passes them to `read_jobs`.
    """
    command = click.option(
        "-f",
        "--filename",
        "more",
        multiple=True,
        metavar="FILE",
        help="Another job file; may be repeated.",
    )(command)
    return click.argument("files", nargs=-1, metavar="[FILE|DIRECTORY|-]...")(command)


def backend_option(command: Command) -> Command:
    """Add `--backend`; the command passes `backend` to `read_jobs` or `choose_backend`."""
    text = "Workload kind, instead of the job's: job, statefulset, jobset, pytorchjob, trainjob."
    return click.option("--backend", metavar="KIND", help=text)(command)


def choose_backend(backend: str | None) -> list[str]:
    """`--backend` as overrides of a job file, in the form of `--set`."""
    return [f"spec.backend={backend}"] if backend else []


def dry_run_option(command: Command) -> Command:
    """Add `--dry-run`; the command receives `dry_run`: none, client or server."""
    choice = click.Choice(["none", "client", "server"])
    return click.option(
        "--dry-run",
        type=choice,
        default="none",
        help="Change nothing: `client` only prints the change, `server` has the server check it.",
    )(command)


def wait_option(command: Command) -> Command:
    """Add `--wait/--no-wait`; the command receives `wait`."""
    return click.option(
        "--wait/--no-wait", default=True, show_default=True, help="Wait for completion."
    )(command)


def find_target(
    job: str | None,
    file: str | None,
    *,
    namespace: str | None,
    context: str | None,
    timeout: float | None = None,
) -> ClusterJob:
    """The job on the cluster that the arguments refer to. Raises `NotFoundError`, and what
    `find_job` and `connect` raise.
    """
    from kdist.jobs.job import ClusterJob

    found = find_job(job, file)
    cluster = connect(namespace=namespace, context=context, timeout=timeout, job=found.namespace)
    return ClusterJob.find(cluster, found.name)


def find_run(
    job: str | None,
    file: str | None = None,
    *,
    local: bool = False,
    namespace: str | None = None,
    context: str | None = None,
    active: bool = False,
) -> Path | None:
    """Folder of the local run that the arguments refer to; None for a job on a cluster.

    A local run takes precedence over a job on a cluster, and a message says so, unless -n,
    --context or another option chooses a cluster or an identity.

    Args:
        job: NAME, a run folder, or a job file.
        file: a job file, from `-f`.
        local: the job must be a local run.
        namespace: from `-n`.
        context: from `--context`.
        active: accept only a run whose `kdist run` is running.

    Returns:
        The run's folder, or None.

    Raises:
        NotFoundError: there is no such local run, and either a local run is required or no cluster
            is configured.
    """
    from kdist.cluster import kubeconfig
    from kdist.local import agents, run_dir

    name = job if job is not None and not job.endswith(_FILE_SUFFIXES) else find_job(job, file).name
    remote = asks_cluster(namespace, context)
    root = None if remote and not local else agents.find_run(name)
    if root is not None and active and not agents.is_active(root):
        if local or "/" in name:
            raise NotFoundError(
                f"no `kdist run` is running in {root}",
                hint="`kdist report` shows a finished run",
            )
        root = None
    if root is None and (local or "/" in name):
        raise NotFoundError(
            f"there is no run in {name}"
            if "/" in name
            else f"there is no run {name} on this machine"
        )
    if root is None and not remote and not kubeconfig.is_there():
        raise NotFoundError(
            (
                f"there is no {'active ' if active else ''}run {name} on this machine, and "
                "no kubeconfig names a cluster"
            ),
            hint=(
                f"local runs are in {run_dir.home()}; a job on a cluster needs a kubeconfig "
                "($KUBECONFIG)"
            ),
        )
    if root is not None and "/" not in name and not local:
        console.message(f"using the local run {name} in {root}; -n NAMESPACE selects a cluster")
    return root


def read_jobs(
    paths: Sequence[str], overrides: Sequence[str] = (), *, backend: str | None = None
) -> list[tuple[TrainingJob, Path]]:
    """Load every job of these files and folders.

    Args:
        paths: job files, folders of them, or `-` for stdin.
        overrides: `PATH=VALUE` settings for every job.
        backend: workload kind for every job.

    Returns:
        Each job, with the folder that its relative paths are resolved against.

    Raises:
        UsageError: there is no job, or two files describe the same one.
        InvalidJobError: with the problems of all files.
    """
    from kdist import load

    if not paths:
        raise UsageError("name a job file, a folder of them, or `-` for stdin")
    jobs: list[tuple[TrainingJob, Path]] = []
    problems: list[Problem] = []
    overrides = [*overrides, *choose_backend(backend)]
    for file in (file for path in paths for file in _files_of(path)):
        try:
            jobs.append(
                (
                    load.load_file(file, overrides=overrides),
                    Path.cwd() if file == "-" else Path(file).absolute().parent,
                )
            )
        except InvalidJobError as error:
            problems += error.problems
    if problems:
        raise InvalidJobError(
            " ".join(paths), problems, next_command=f"kdist validate {' '.join(paths)}"
        )
    names = [(job.metadata.namespace, job.metadata.name) for job, _ in jobs]
    twice = sorted({name for namespace, name in names if names.count((namespace, name)) > 1})
    if twice:
        raise UsageError(f"{', '.join(twice)}: two of these files describe the same job")
    return jobs


def _files_of(path: str) -> list[str]:
    if path == "-" or not Path(path).is_dir():
        return [path]
    inside = sorted(
        str(each)
        for each in Path(path).iterdir()
        if each.suffix in _FILE_SUFFIXES and each.is_file()
    )
    if not inside:
        raise UsageError(f"there is no job file in the folder `{path}`")
    return inside
