"""The job, run or cluster that an invocation names: by NAME, a job file, `-f FILE`, and the options
of `options.cluster_options`. Not a command itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from kdist import console
from kdist.commands.options import LOGIN
from kdist.errors import InvalidJobError, NotFoundError, Problem, UsageError

if TYPE_CHECKING:
    from kdist.cluster import Cluster
    from kdist.jobs.job import ClusterJob
    from kdist.spec import TrainingJob

RETRY_SECONDS = 60.0  # for how long a request is retried while the API server is unreachable
_FILE_SUFFIXES = (".yaml", ".yml", ".json")


def _login_options() -> dict[str, Any]:
    """The values of `--kubeconfig`, `--as`, `--as-group` and `--request-timeout`, as arguments of
    `cluster.connect`.
    """
    context = click.get_current_context(silent=True)
    given: dict[str, Any] = {} if context is None else context.meta.get(LOGIN, {})
    names = {"login_kubeconfig": "file", "login_request_timeout": "request_timeout"}
    found = {name: given[key] for key, name in names.items() if key in given}
    if "login_as" in given or "login_as_group" in given:
        from kdist.cluster import Impersonation

        found["impersonation"] = Impersonation(
            given.get("login_as", ""), given.get("login_as_group", ())
        )
    return found


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


def choose_backend(backend: str | None) -> list[str]:
    """`--backend` as overrides of a job file, in the form of `--set`."""
    return [f"spec.backend={backend}"] if backend else []


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
