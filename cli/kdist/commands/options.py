"""What the commands that talk to a cluster have in common: their options, the connection, and which
job is meant. No command.
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

PATIENCE = 60.0  # seconds that a request goes on trying while the API server is away
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_FILE_SUFFIXES = (".yaml", ".yml", ".json")


def seconds(value: str) -> float:
    """A duration as kubectl writes it (`90s`, `5m`, `1h30m`), or a number of seconds; in seconds.
    For click's `type=`.
    """
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    if not re.fullmatch(r"(\d+[smhd])+", value):
        raise click.BadParameter(f"`{value}` is no duration; write 90s, 5m or 1h30m")
    return float(
        sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)([smhd])", value))
    )


# where what `cluster_options` keeps to itself stands among the values of an invocation
_LOGIN = "kdist.login"


def cluster_options(command: Command) -> Command:
    """Which cluster, and as whom: `namespace`, `context` and `timeout` arrive and go on to
    `connect`.

    `--kubeconfig`, `--as`, `--as-group` and `--request-timeout` do not: `connect` and `find_run`
    know of them by themselves.
    """
    decorators = (
        click.option(
            "-n",
            "--namespace",
            metavar="NAME",
            help="Namespace; without it the job file's, else the kubeconfig's.",
        ),
        click.option(
            "--context",
            metavar="NAME",
            help="Context of the kubeconfig; without it the current one.",
        ),
        _login(
            "--kubeconfig",
            metavar="FILE",
            help="Kubeconfig, instead of $KUBECONFIG or ~/.kube/config.",
        ),
        _login(
            "--as",
            metavar="USER",
            help="Act as this user, or system:serviceaccount:NAMESPACE:NAME.",
        ),
        _login(
            "--as-group",
            metavar="GROUP",
            multiple=True,
            help="Act as a member of this group too; may be repeated.",
        ),
        click.option(
            "--timeout",
            type=seconds,
            metavar="DURATION",
            help="How long to try or wait, e.g. 90s or 5m.",
        ),
        _login(
            "--request-timeout",
            type=seconds,
            metavar="DURATION",
            help="How long one request may take; 0 for ever.",
        ),
    )
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


def _login(name: str, **how: Any) -> Callable[[Command], Command]:
    """An option that is kept where `_logged_in` finds it, and that no command needs to take."""

    def keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value is not None and value != ():
            context.meta.setdefault(_LOGIN, {})[parameter.name] = value

    return click.option(
        name, f"login_{name.strip('-').replace('-', '_')}", expose_value=False, callback=keep, **how
    )


def _logged_in() -> dict[str, Any]:
    """What was asked for with `--kubeconfig`, `--as`, `--as-group` and `--request-timeout`, as
    `cluster.connect` takes it.
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
    """`-o/--output` with these formats and the default; arrives as `output`. `jsonpath` stands for
    `jsonpath=TEMPLATE`.
    """
    kinds = [default, *(each for each in formats if each != default)]

    def check(_: click.Context, __: click.Parameter, value: str) -> str:
        if value in kinds or (value.startswith("jsonpath=") and "jsonpath" in kinds):
            return value
        raise click.BadParameter(f"`{value}` is none of {', '.join(kinds)}")

    shown = "|".join(f"{each}=…" if each == "jsonpath" else each for each in kinds)
    return click.option(
        "-o",
        "--output",
        default=default,
        metavar=shown,
        callback=check,
        help="Format of what is printed.",
    )


def job_argument(command: Command) -> Command:
    """The job that is meant: NAME, or a job file as argument or with `-f`; arrives as `job` and
    `file` for `find_job`.
    """
    command = click.option(
        "-f", "--filename", "file", metavar="FILE", help="Take name and namespace from a job file."
    )(command)
    return click.argument("job", required=False, metavar="NAME|FILE")(command)


def name_command(verb: str, name: str, namespace: str | None) -> str:
    """A command of ours about a job that was named with, or without, a namespace."""
    return f"kdist {verb} {name}" + (f" -n {namespace}" if namespace else "")


def asks_cluster(namespace: str | None, context: str | None) -> bool:
    """Whether an option chooses a cluster, a place in it or an identity, and so means no run of
    this machine.
    """
    return bool(namespace or context or _logged_in())


class JobRef(NamedTuple):
    """A job's name, and the namespace in its file (None if there is no file or it names none)."""

    name: str
    namespace: str | None = None


def find_job(argument: str | None, file: str | None = None) -> JobRef:
    """Which job is meant by NAME, a path that ends in .yaml, or `-f FILE` (`-` is stdin).

    Raises `UsageError` if none or two are given, `InvalidJobError` for a file with problems.
    """
    if (argument is None) == (file is None):
        raise UsageError(
            "name one job: NAME, or a job file", hint="`kdist get` lists the jobs of a namespace"
        )
    path = file if argument is None else argument
    if path is None:  # cannot be: one of them is given
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
    """A connection that tells of outages on stderr.

    `job` is the job file's namespace, which `namespace` (`-n`) overrules. A command that `stays`
    with a job rides outages out for `timeout` seconds in all, without a timeout for as long as they
    last.
    """
    from kdist import cluster

    if namespace and job and namespace != job:
        console.message(f"namespace {namespace} (-n) is used, not {job} of the job file")
    chosen = namespace or job
    patience = PATIENCE if timeout is None else timeout
    until = cluster.deadline(timeout) if stays else None
    return cluster.connect(
        context, chosen, patience=patience, until=until, tell=console.message, **_logged_in()
    )


def files_argument(command: Command) -> Command:
    """Job files, folders of them and `-`, as arguments or with `-f`; they arrive as `files` and
    `more` for `read_jobs`.
    """
    command = click.option(
        "-f",
        "--filename",
        "more",
        multiple=True,
        metavar="FILE",
        help="A job file too; may be repeated.",
    )(command)
    return click.argument("files", nargs=-1, metavar="[FILE|DIRECTORY|-]...")(command)


def backend_option(command: Command) -> Command:
    """`--backend`; arrives as `backend` for `read_jobs`, or for `choose_backend`."""
    told = "Workload kind, instead of the job's: job, statefulset, jobset, pytorchjob, trainjob."
    return click.option("--backend", metavar="KIND", help=told)(command)


def choose_backend(backend: str | None) -> list[str]:
    """What `--backend` changes in a job file, as `--set` would."""
    return [f"spec.backend={backend}"] if backend else []


def dry_run_option(command: Command) -> Command:
    """`--dry-run`; arrives as `dry_run`: none, client or server."""
    choice = click.Choice(["none", "client", "server"])
    return click.option(
        "--dry-run",
        type=choice,
        default="none",
        help="Change nothing: `client` only says it, `server` has it checked.",
    )(command)


def wait_option(command: Command) -> Command:
    """`--wait/--no-wait`; arrives as `wait`."""
    return click.option(
        "--wait/--no-wait", default=True, help="Wait until it has come about, or only ask for it."
    )(command)


def find_target(
    job: str | None,
    file: str | None,
    *,
    namespace: str | None,
    context: str | None,
    timeout: float | None = None,
) -> ClusterJob:
    """The job in the cluster that is meant. Raises `NotFoundError`, and what `find_job` and
    `connect` raise.
    """
    from kdist.jobs.job import find

    found = find_job(job, file)
    cluster = connect(namespace=namespace, context=context, timeout=timeout, job=found.namespace)
    return find(cluster, found.name)


def find_run(
    job: str | None,
    file: str | None = None,
    *,
    local: bool = False,
    namespace: str | None = None,
    context: str | None = None,
    at_work: bool = False,
) -> Path | None:
    """Folder of the run on this machine that is meant; None where the cluster is.

    A run of `kdist run` by that name comes first, and is said, unless -n, --context or another
    option that chooses a cluster or an identity asks for the cluster; with `at_work` only one that
    is. Raises `NotFoundError` where there is none, and the machine's is asked for or no cluster is
    known.
    """
    from kdist.cluster import kubeconfig
    from kdist.local import agents, run_dir

    name = job if job is not None and not job.endswith(_FILE_SUFFIXES) else find_job(job, file).name
    remote = asks_cluster(namespace, context)
    root = None if remote and not local else agents.find_run(name)
    if root is not None and at_work and not agents.is_at_work(root):
        if local or "/" in name:
            raise NotFoundError(
                f"no `kdist run` is at work in {root}",
                hint="`kdist report` tells of a run that is over",
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
                f"there is no run {name} {'at work ' if at_work else ''}on this machine, and "
                "no kubeconfig that names a cluster"
            ),
            hint=(
                f"runs of this machine are looked for in {run_dir.home()}; a job in a cluster "
                "needs KUBECONFIG"
            ),
        )
    if root is not None and "/" not in name and not local:
        console.message(f"{name} of this machine, in {root}; -n NAMESPACE asks the cluster")
    return root


def read_jobs(
    paths: Sequence[str], overrides: Sequence[str] = (), *, backend: str | None = None
) -> list[tuple[TrainingJob, Path]]:
    """Every job of these files and folders, with the folder that its relative paths start from.

    Raises `UsageError` if there is none or one is described twice, `InvalidJobError` with the
    problems of all files.
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
