"""The job, run or cluster that an invocation names: by NAME, a job file, `-f FILE`, and the options
of `options.cluster_options`. Not a command itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from kdist import console
from kdist.commands.confirmation import approve
from kdist.commands.options import LOGIN, NOT_HERE
from kdist.errors import InvalidJobError, KdistError, NotFoundError, Problem, UsageError

if TYPE_CHECKING:
    from kdist.cluster import Cluster
    from kdist.job.cluster.job import ClusterJob
    from kdist.job.local.job import LocalJob
    from kdist.spec import TrainingJob

RETRY_SECONDS = 60.0  # for how long a request is retried while the API server is unreachable
_LOOKUP_SECONDS = 3.0  # for the question whether a cluster has a job of a local run's name
_FILE_SUFFIXES = (".yaml", ".yml", ".json")
_READ = "kdist.read"  # key of the job files that were read in click's `Context.meta`


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
    return bool(namespace or context or _login_options().keys() - {"request_timeout"})


def request_timeout(default: float) -> float:
    """Seconds that a response may be silent: the value of `--request-timeout`, else `default`."""
    return float(_login_options().get("request_timeout", default))


def note_no_run() -> None:
    """Let the error that the cluster has no such job say that there is no such run either."""
    from kdist.job.local import run_dir

    context = click.get_current_context(silent=True)
    if context is not None:
        context.meta[NOT_HERE] = f"there is no run of that name in {run_dir.home()} either"


def missing_run(*names: str, local: bool = True) -> NotFoundError:
    """The error that no run on this machine has these names; unless `local`, no cluster is
    configured that could have them.
    """
    from kdist.job.local import run_dir

    what = f"there is no run {', nor '.join(names)} on this machine"
    if local:
        return NotFoundError(what, next_command="kdist get --local")
    hint = f"runs are in {run_dir.home()}; a job on a cluster needs a kubeconfig ($KUBECONFIG)"
    what = f"{what}, and no kubeconfig names a cluster"
    return NotFoundError(what, hint=hint, next_command="kdist get")


class Instead(NamedTuple):
    """What to do with a local run instead of a command that knows only jobs on a cluster."""

    hint: str
    command: str


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
    path = str(file if argument is None else argument)
    if file is None and not path.endswith(_FILE_SUFFIXES):
        return JobRef(path.removeprefix("job/").removeprefix("trainingjob/"))
    context = click.get_current_context(silent=True)
    read: dict[str, JobRef] = {} if context is None else context.meta.setdefault(_READ, {})
    if path not in read:  # stdin can be read only once
        from kdist import load

        metadata = load.load_file(path).metadata
        read[path] = JobRef(metadata.name, metadata.namespace)
    return read[path]


def find_jobs(argument: str | None, file: str | None) -> list[JobRef]:
    """The jobs that NAME or a job file refers to, all of them if the file has several."""
    path = file if file is not None else argument
    if path is None or (file is None and not path.endswith(_FILE_SUFFIXES)):
        return [find_job(argument, file)]
    from kdist import load

    return [JobRef(each.metadata.name, each.metadata.namespace) for each in load.load_files(path)]


def connect(
    *,
    namespace: str | None = None,
    context: str | None = None,
    timeout: float | None = None,
    job: str | None = None,
    stays: bool = False,
    request_timeout: float | None = None,
) -> Cluster:
    """Connect to a cluster; outages are reported on stderr.

    Args:
        namespace: from `-n`; overrides `job`.
        context: of the kubeconfig; None for the current one.
        timeout: seconds for which requests are retried while the API server is unreachable.
        job: the job file's namespace.
        stays: the command watches a job: `timeout` then limits its retries in total, and without
            one it retries without limit.
        request_timeout: seconds that a response may be silent, unless `--request-timeout` says it.
    """
    from kdist import cluster

    login = _login_options()
    if request_timeout is not None:
        login.setdefault("request_timeout", request_timeout)
    if namespace and job and namespace != job:
        console.message(f"using namespace {namespace} (-n), not {job} of the job file")
    return cluster.connect(
        context,
        namespace or job,
        retry_seconds=RETRY_SECONDS if timeout is None else timeout,
        until=cluster.deadline(timeout) if stays else None,
        notify=console.message,
        **login,
    )


def choose_backend(backend: str | None) -> list[str]:
    """`--backend` as overrides of a job file, in the form of `--set`."""
    from kdist.load.overrides import OptionOverride

    return [OptionOverride(f"spec.backend={backend}", f"--backend {backend}")] if backend else []


def find_target(
    job: str | None,
    file: str | None,
    *,
    namespace: str | None,
    context: str | None,
    timeout: float | None = None,
) -> ClusterJob:
    """The job on the cluster that the arguments refer to, also where a local run has its name.
    Raises what `find_job`, `connect` and `ClusterJob.find` raise.
    """
    from kdist.job.cluster.job import ClusterJob

    found = find_job(job, file)
    cluster = connect(namespace=namespace, context=context, timeout=timeout, job=found.namespace)
    return ClusterJob.find(cluster, found.name, approve=approve, warn=console.warning)


def find_cluster_job(
    job: str | None,
    file: str | None,
    *,
    namespace: str | None,
    context: str | None,
    instead: Callable[[LocalJob], Instead],
    changes: bool = False,
    timeout: float | None = None,
) -> ClusterJob:
    """What `find_target` returns, for a command that knows only jobs on a cluster.

    Args:
        job: NAME or a job file.
        file: a job file, from `-f`.
        namespace: from `-n`.
        context: from `--context`.
        instead: what has the same effect on a local run.
        changes: as for `find_local`.
        timeout: as for `connect`.

    Raises:
        UsageError: the arguments refer to a local run.
    """
    run = find_local(job, file, namespace=namespace, context=context, changes=changes)
    if run is not None:
        hint, command = instead(run)
        verb = click.get_current_context().info_name
        raise UsageError(
            f"{run.name} is a run on this machine, and `kdist {verb}` is for jobs on a cluster",
            hint=hint,
            next_command=command,
        )
    return find_target(job, file, namespace=namespace, context=context, timeout=timeout)


def find_run(
    job: str | None,
    file: str | None = None,
    *,
    local: bool = False,
    namespace: str | None = None,
    context: str | None = None,
    active: bool = False,
) -> Path | None:
    """Folder of the local run that the arguments refer to, chosen as by `find_local` with the same
    arguments; None for a job on a cluster. With `active` its `kdist run` has to be running.

    Raises:
        NotFoundError: as for `find_local`; or the run is not active.
    """
    run = find_local(job, file, namespace=namespace, context=context, local=local)
    if run is not None and active and not run.active:
        raise NotFoundError(
            f"no `kdist run` is running in {run.root}", next_command=run.kdist("report")
        )
    return None if run is None else run.root


def find_local(
    job: str | None,
    file: str | None = None,
    *,
    namespace: str | None,
    context: str | None,
    local: bool = False,
    changes: bool = False,
) -> LocalJob | None:
    """The local run that the arguments refer to; None for a job on a cluster.

    An active run comes before a job of the same name on the configured cluster, and a finished one
    after it; a message says how to choose the other one.

    Args:
        job: NAME, a run folder, or a job file.
        file: a job file, from `-f`.
        namespace: from `-n`.
        context: from `--context`.
        local: the job must be a local run.
        changes: the command changes the job, so it must be certain which one is meant: a run that
            is done counts as a finished one, and any other must be chosen.

    Raises:
        NotFoundError: there is no such local run, and one is required or no cluster is configured.
        UsageError: `changes`, and the cluster has a job of the same name, or does not answer.
    """
    from kdist.cluster import kubeconfig
    from kdist.job.local.job import find_job as find_local_job

    is_folder = job is not None and "/" in job.removeprefix("job/").removeprefix("trainingjob/")
    is_folder = is_folder and not str(job).endswith(_FILE_SUFFIXES)
    if asks_cluster(namespace, context) and not local:
        return None
    named = JobRef(str(job)) if is_folder else find_job(job, file)
    found = find_local_job(named.name)
    only_local = local or is_folder
    has_cluster = not only_local and kubeconfig.exists()
    if found is None and not has_cluster:
        raise missing_run(named.name, local=only_local)
    if found is None:
        note_no_run()
    if found is None or not has_cluster:
        return found
    if found.active and not changes:
        console.message(f"{named.name} is a run on this machine; -n NAMESPACE chooses the cluster")
        return found
    return found if _prefers_run(found, _look_up(named), changes=changes) else None


def _prefers_run(run: LocalJob, problem: KdistError | None, *, changes: bool) -> bool:
    """Whether a run that is not active, or is to be changed, is meant and not a job of its name.
    `problem` is what `_look_up` found. Raises `UsageError` if `changes`, and it is not certain.
    """
    if isinstance(problem, NotFoundError):
        return True
    options = {each.name for each in click.get_current_context().command.params}
    local = "--local chooses the run" if "local" in options else ""
    there = "-n NAMESPACE chooses the cluster"
    both = problem is None
    what = f"{run.name} is a run on this machine"
    if changes and not (both and run.is_done):
        more = (
            " and a job on the cluster"
            if both
            else f", and the cluster cannot be queried: {problem}"
        )
        raise UsageError(what + more, hint=", ".join(filter(None, (local, there))))
    if both:
        what = f"{what} and a job on the cluster: the job is used"
        console.message("; ".join(filter(None, (what, local))))
    else:
        console.warning(f"{what} ({there}); the cluster cannot be queried: {problem}")
    return not both


def _look_up(named: JobRef) -> KdistError | None:
    """None if the configured cluster has this job, else what it answers instead."""
    from kdist import cluster
    from kdist.deploy.plan import find_config_map

    absent = NotFoundError(f"there is no job {named.name}")
    timeout = request_timeout(_LOOKUP_SECONDS)
    try:
        found = cluster.connect(None, named.namespace, retry_seconds=0.0, request_timeout=timeout)
        return absent if find_config_map(found, named.name) is None else None
    except cluster.ForeignError:
        return absent
    except KdistError as error:
        return error


def read_jobs(
    paths: Sequence[str], overrides: Sequence[str] = (), *, backend: str | None = None
) -> list[tuple[TrainingJob, Path]]:
    """Load every job of these files and folders, with a warning for what looks like a credential.

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
            found = load.load_files(file, overrides=overrides, use="cluster", warnings=looks)
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
    found = [each for each in Path(path).iterdir() if each.suffix in _FILE_SUFFIXES]
    inside = sorted(str(each) for each in found if each.is_file())
    if not inside:
        raise UsageError(
            f"there is no job file in the folder `{path}`",
            hint="a job file ends in .yaml, .yml or .json",
        )
    return inside
