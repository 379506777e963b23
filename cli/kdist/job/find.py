"""Finds the job that is meant by a name, a run folder or a job file: on this machine, or in a
cluster; and lists all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from kdist.errors import JobNotFoundError, KdistError, NotFoundError, UsageError
from kdist.job.job import SILENT, Dialog, Job

if TYPE_CHECKING:
    from kdist.cluster import Cluster
    from kdist.job.cluster.job import ClusterJob
    from kdist.job.local.job import LocalJob
    from kdist.status import JobStatus

    Found: TypeAlias = LocalJob | ClusterJob

_LOOKUP_SECONDS = 3.0  # for the question whether a cluster has a job of a local run's name
_PATIENCE_SECONDS = 3.0  # for a cluster that does not answer, if there are runs to list
NO_CLUSTER = ", and no kubeconfig names a cluster"
FILE_SUFFIXES = (".yaml", ".yml", ".json")
"""Ends of the names of job files."""


@dataclass(frozen=True)
class Place:
    """Where to look for jobs: in a namespace of a cluster, or, if nothing but a time-out is chosen,
    on this machine and where the kubeconfig points to.

    Attributes:
        namespace: None for the job file's, else the kubeconfig's.
        context: of the kubeconfig; None for the current one.
        kubeconfig: the file; None for `$KUBECONFIG` or `~/.kube/config`.
        user: whom to act as; empty for oneself.
        groups: of `user`.
        request_timeout: seconds that a response may be silent; None for a default.
    """

    namespace: str | None = None
    context: str | None = None
    kubeconfig: str | None = None
    user: str = ""
    groups: tuple[str, ...] = ()
    request_timeout: float | None = None

    @property
    def is_chosen(self) -> bool:
        """Whether a cluster, a namespace or an identity is chosen, so not a local run."""
        return bool(self.namespace or self.context or self.kubeconfig or self.user or self.groups)

    def has_cluster(self) -> bool:
        """Whether a cluster is chosen or configured."""
        from kdist.cluster import kubeconfig

        return self.is_chosen or kubeconfig.exists()

    def connect(
        self,
        *,
        job: str | None = None,
        timeout: float | None = None,
        stays: bool = False,
        patience: float | None = None,
        dialog: Dialog = SILENT,
    ) -> Cluster:
        """Connect to the cluster; nothing is sent yet. Raises `KdistError` if there is no
        kubeconfig, or it cannot be used (UNREACHABLE).

        Args:
            job: the job file's namespace.
            timeout: seconds for which requests are retried while the API server is unreachable;
                None for `cluster.transport.RETRY_SECONDS`.
            stays: the connection serves to watch a job: `timeout` then limits its retries in total,
                and without one it retries without limit.
            patience: seconds that the server has to respond, if the command can do without it:
                without `timeout` nothing is retried then, and with it that takes its place.
            dialog: is told of outages.
        """
        from kdist import cluster

        retry_seconds = None if patience is None else 0.0
        options: dict[str, Any] = {}
        if patience is not None:
            options["request_timeout"] = timeout or patience
        if self.request_timeout is not None:
            options["request_timeout"] = self.request_timeout
        if self.user or self.groups:
            options["impersonation"] = cluster.Impersonation(self.user, self.groups)
        if self.namespace and job and self.namespace != job:
            dialog.notify(f"using namespace {self.namespace} (-n), not {job} of the job file")
        return cluster.connect(
            self.context,
            self.namespace or job,
            file=self.kubeconfig,
            retry_seconds=retry_seconds if timeout is None else timeout,
            until=cluster.deadline(timeout) if stays else None,
            notify=dialog.notify,
            **options,
        )


class JobRef(NamedTuple):
    """A job's name, or a run folder, and the namespace in its file (None if there is no file or it
    names none).
    """

    name: str
    namespace: str | None = None


def refer(argument: str | None, file: str | None = None) -> JobRef:
    """The job that NAME, a run folder, a path that ends in .yaml, or `-f FILE` (`-` is stdin)
    refers to. Raises `UsageError` if none or two are given, `InvalidJobError` for a file with
    problems.
    """
    if (argument is None) == (file is None):
        raise UsageError(
            "name one job: NAME, or a job file", hint="`kdist get` lists the jobs of a namespace"
        )
    path = str(file if argument is None else argument)
    if file is None and not path.endswith(FILE_SUFFIXES):
        name = path.removeprefix("job/").removeprefix("trainingjob/")
        return JobRef(path if "/" in name else name)  # a run folder as it was typed
    from kdist.job_file import load_file

    metadata = load_file(path).metadata
    return JobRef(metadata.name, metadata.namespace)


def refer_all(argument: str | None, file: str | None) -> list[JobRef]:
    """The jobs that NAME or a job file refers to, all of them if the file has several."""
    path = file if file is not None else argument
    if path is None or (file is None and not path.endswith(FILE_SUFFIXES)):
        return [refer(argument, file)]
    from kdist.job_file import load_files

    return [JobRef(each.metadata.name, each.metadata.namespace) for each in load_files(path)]


def find(
    meant: JobRef,
    place: Place = Place(),
    *,
    local: bool | None = False,
    changes: bool = False,
    active: bool = False,
    remains: bool = False,
    timeout: float | None = None,
    stays: bool = False,
    dialog: Dialog = SILENT,
) -> Found:
    """Find a job. That a cluster has no such job shows when it is used.

    An active run on this machine comes before a job of the same name on the configured cluster, and
    a finished one after it; a message says how to choose the other one.

    Args:
        meant: the job.
        place: where to look.
        local: it must be a run on this machine; None if there is no way to say so.
        changes: it is to be changed, so it must be certain which one is meant: a run that is done
            counts as a finished one, and any other must be chosen.
        active: if it is a run on this machine, its `kdist run` has to be running.
        remains: the checkpoints that a deleted run has left count as that run.
        timeout: as for `Place.connect`.
        stays: as for `Place.connect`.
        dialog: for the search, and for all that is done with the job.

    Raises:
        NotFoundError: there is no such run on this machine, and it must be one or no cluster is
            configured; or the run is not active.
        UsageError: `changes`, and the cluster has a job of the same name, or does not answer.
    """
    from kdist.cluster import kubeconfig

    run: LocalJob | None = None
    if local or not place.is_chosen:
        from kdist.job.local.job import find_job

        only_local = bool(local) or "/" in meant.name
        has_cluster = not only_local and kubeconfig.exists()
        run = find_job(meant.name, remains=remains and not has_cluster, dialog=dialog)
        if run is None and not has_cluster:
            raise missing_run(meant.name, local=only_local)
        if run is None:
            dialog.note_absence(describe_absence())
        elif has_cluster and run.active and not changes:
            dialog.notify(f"{run.here}; -n NAMESPACE chooses the cluster")
        elif has_cluster and not _prefers_run(run, _look_up(meant, place), local, changes=changes):
            run = None
    if run is not None and active and not run.active:
        raise NotFoundError(
            f"no `kdist run` is running in {run.root}", next_command=run.kdist("report")
        )
    if run is not None:
        return run
    cluster = place.connect(job=meant.namespace, timeout=timeout, stays=stays, dialog=dialog)
    return in_cluster(cluster, meant.name, dialog=dialog)


def in_cluster(cluster: Cluster, name: str, *, dialog: Dialog) -> ClusterJob:
    """The job of this name in the connection's namespace; whether it exists shows when it is
    used.
    """
    from kdist.job.cluster.job import ClusterJob

    return ClusterJob(cluster, name, dialog)


def find_all(place: Place, *, local: bool, selector: str, dialog: Dialog) -> Sequence[Job]:
    """All jobs of a namespace that have the labels `selector`, or all runs on this machine; a
    message says if there are none. Raises `UsageError` for labels of runs.
    """
    if local:
        from kdist.job.local.job import list_jobs

        if selector:
            raise UsageError(
                "runs on this machine have no labels: -l cannot be combined with --local"
            )
        runs = list_jobs(dialog=dialog)
        if not runs:
            dialog.notify("there are no runs on this machine")
        return runs
    from kdist.job.cluster.deletion import list_names

    cluster = place.connect(dialog=dialog)
    names = list_names(cluster, selector)
    if not names:
        dialog.notify(f"there are no such jobs in namespace {cluster.namespace}")
    return [in_cluster(cluster, name, dialog=dialog) for name in names]


def missing_run(*names: str, local: bool = True) -> NotFoundError:
    """The error that no run on this machine has these names; unless `local`, no cluster is
    configured that could have them.
    """
    from kdist.job.local import run_dir

    what = f"there is no run {', nor '.join(names)} on this machine"
    if local:
        return NotFoundError(what, next_command="kdist get --local")
    hint = f"runs are in {run_dir.home()}; a job on a cluster needs a kubeconfig ($KUBECONFIG)"
    return NotFoundError(what + NO_CLUSTER, hint=hint, next_command="kdist get")


def describe_absence() -> str:
    """What the error that the cluster has no such job says besides."""
    from kdist.job.local import run_dir

    return f"there is no run of that name in {run_dir.home()} either"


def _prefers_run(
    run: LocalJob, problem: KdistError | None, local: bool | None, *, changes: bool
) -> bool:
    """Whether a run that is not active, or is to be changed, is meant and not a job of its name.
    `problem` is what `_look_up` found. Raises `UsageError` if `changes`, and it is not certain.
    """
    if isinstance(problem, NotFoundError):
        return True
    here = "" if local is None else "--local chooses the run"
    there = "-n NAMESPACE chooses the cluster"
    both = problem is None
    what = run.here
    if changes and not (both and run.is_done):
        more = (
            " and a job on the cluster"
            if both
            else f", and the cluster cannot be queried: {problem}"
        )
        raise UsageError(what + more, hint=", ".join(filter(None, (here, there))))
    if both:
        what = f"{what} and a job on the cluster: the job is used"
        run.dialog.warn("; ".join(filter(None, (what, here))))
    else:
        run.dialog.warn(f"{what} ({there}); the cluster cannot be queried: {problem}")
    return not both


def _look_up(meant: JobRef, place: Place) -> KdistError | None:
    """None if the configured cluster has this job, else what it answers instead."""
    from kdist.cluster import ForeignError
    from kdist.deploy.plan import find_config_map

    absent = NotFoundError(f"there is no job {meant.name}")
    try:
        found = place.connect(job=meant.namespace, patience=_LOOKUP_SECONDS)
        return absent if find_config_map(found, meant.name) is None else None
    except ForeignError:
        return absent
    except KdistError as error:
        return error


class Listed(NamedTuple):
    """A job of the list and its labels; a run on this machine has none."""

    status: JobStatus
    labels: Mapping[str, str]


class Listing:
    """The jobs of a cluster, the runs on this machine, or both. Runs do not wait long for a cluster
    that is only configured. Raises `KdistError` if there is no kubeconfig, or it cannot be used
    (UNREACHABLE).

    Args:
        names: of the jobs; empty for all.
        place: where to look.
        local: only the runs on this machine.
        all_namespaces: the jobs of all namespaces.
        selector: labels; only jobs that have them.
        timeout: seconds for which requests are retried while the API server is unreachable.
        stays: the list is read repeatedly.
        dialog: receives messages and warnings.

    Attributes:
        cluster: None for none.
        here: whether runs on this machine are in the list.
    """

    def __init__(
        self,
        names: Sequence[str],
        place: Place,
        *,
        local: bool,
        all_namespaces: bool,
        selector: str,
        timeout: float | None,
        stays: bool,
        dialog: Dialog,
    ) -> None:
        self.cluster: Cluster | None = None
        self.here = local or not (place.is_chosen or all_namespaces or selector)
        self._names = [name.removeprefix("job/").removeprefix("trainingjob/") for name in names]
        self._scope: Any = {"all_namespaces": all_namespaces, "selector": selector, "known": {}}
        self._failure: KdistError | None = None
        self._optional = False
        self._only_here = local
        self._dialog = dialog
        self._warns = False
        if local or (self.here and not place.has_cluster()):
            return
        if self.here:
            from kdist.job.local.job import list_jobs

            runs = [run.name for run in list_jobs()]
            self._optional = any(not names or run in self._names for run in runs)
        patience = _PATIENCE_SECONDS if self._optional else None
        try:
            self.cluster = place.connect(
                timeout=timeout, stays=stays, patience=patience, dialog=dialog
            )
        except KdistError as error:
            if not self._optional:
                raise
            self._leave_out(error)

    def read(self, *, strict: bool = True) -> list[Listed]:
        """The named jobs, or all if there are no names. Raises `JobNotFoundError` for a name
        without a job if `strict` is set.
        """
        every = self._read_cluster()
        if self.here:
            from kdist.job.local import list_runs

            every += [Listed(status, {}) for status in list_runs()]
        known = {each.status.name for each in every}
        missing = [name for name in self._names if name not in known]
        if missing and strict:
            if self._failure is not None:
                raise self._failure
            if self.cluster is None:
                raise missing_run(*missing, local=self._only_here)
            if self.here:
                self._dialog.note_absence(describe_absence())
            raise JobNotFoundError(*((name, self.cluster.namespace) for name in missing))
        if self._warns and self._failure is not None:
            message = self._failure.message
            self._dialog.warn(f"only the runs on this machine are shown: {message}")
            self._warns = False
        found = [each for each in every if not self._names or each.status.name in self._names]
        # those of this machine, which have no namespace, come last
        return sorted(
            found, key=lambda one: (not one.status.namespace, one.status.namespace, one.status.name)
        )

    def _read_cluster(self) -> list[Listed]:
        if self.cluster is None:
            return []
        from kdist.job.cluster import list_snapshots
        from kdist.status import documents

        try:
            snapshots = list_snapshots(self.cluster, **self._scope)
        except KdistError as error:
            if not self._optional:
                raise
            self._leave_out(error)
            return []
        self._optional = False  # from now on, outages are retried
        return [
            Listed(
                each.status,
                documents.mapping(each.config_map or each.workload, "metadata", "labels"),
            )
            for each in snapshots
        ]

    def _leave_out(self, error: KdistError) -> None:
        """Continue without the cluster."""
        self.cluster, self._failure = None, error
        self._warns = True
