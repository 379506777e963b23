"""A job that was started, on this machine or in a cluster, and what can be done with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, overload

from kdist import slices
from kdist.api import DIALOG, Timeout, read_timeout
from kdist.api.words import in_python
from kdist.errors import KdistError, NotFoundError, UsageError
from kdist.events import Entry, format_line
from kdist.job.find import Listing, Place, find, in_cluster, refer
from kdist.job.goals import GOALS
from kdist.job.job import Change, DeleteOptions, Job, LogSelection
from kdist.job.local.job import LocalJob
from kdist.status import JobStatus

if TYPE_CHECKING:
    from kdist.diagnose import Diagnosis
    from kdist.job.find import Found

Stage = Literal["done", "running", "first-step", "checkpoint", "suspended"]
Goal = Literal[Stage, "deleted"]
Row = dict[str, Any]


@in_python
@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that a job can continue from; `time` is in unix seconds."""

    name: str
    step: int
    nbytes: int | None
    time: float | None
    _job: Callable[[], Job] = field(repr=False)

    def state_dict(self, *, averages: bool = False) -> dict[str, Any]:
        """The weights by their full names, as torch's tensors on the CPU, or with `averages` the
        moving averages of them (`train.emaDecay`). They are verified, and come as safetensors,
        which holds nothing that could be executed.

        Raises:
            KdistError: they cannot be read, or torch is not installed.
        """
        words = ["--step", str(self.step), *(["--ema"] if averages else [])]
        with TemporaryDirectory(prefix="kdist-") as folder:
            file = Path(folder) / "weights.safetensors"
            self._job().export_weights(file, *words)
            from safetensors.torch import load_file  # only who asks for weights needs torch

            return dict(load_file(file))


@in_python
@dataclass(frozen=True, repr=False)
class JobHandle:
    """A job that was started. Every method reads the job again, and threads may share a handle. In
    a cluster it stays with the server, the namespace and the user that it was made with, whatever
    the kubeconfig says later. On this machine it stays with the one run, also when that is archived
    because another of its name has started from scratch; NOT_FOUND once it is deleted.

    A `timeout` is a number of seconds, or a text such as `5m`. Methods raise `KdistError`:
    NOT_FOUND as its `code` if the job does not exist any more, TIMEOUT if something has not
    happened in time, and as the command of the same name. `restart` and `scale` are for a cluster;
    their error says what to do instead. In a cluster `metrics`, `report` and `checkpoints` read
    what is next to the job's checkpoints, so it needs some: `checkpoints={"size": "10Gi"}`.
    """

    _found: Found

    def __repr__(self) -> str:
        place = f"in namespace {self.namespace}" if self.namespace else "on this machine"
        return f"<JobHandle {self.name} {place}>"

    @property
    def name(self) -> str:
        """Name of the job."""
        return self._found.name

    @property
    def namespace(self) -> str:
        """Its namespace; empty on this machine."""
        return self._found.namespace

    def _job(self, *, stays: bool = False, timeout: float | None = None) -> Job:
        """The job, with nothing remembered. With `stays`, outages of the API server are waited for,
        until the time-out if there is one.
        """
        if isinstance(self._found, LocalJob):
            return self._found.follow()
        cluster = self._found.cluster
        return in_cluster(cluster.staying(timeout) if stays else cluster, self.name, dialog=DIALOG)

    def status(self) -> JobStatus:
        """What the job is doing: phase, ranks, step, loss, checkpoint."""
        return self._job().snapshot().status

    def why(self) -> Diagnosis:
        """The cause of the job's trouble, with its evidence and a fix."""
        return self._job().why()[1]

    @overload
    def wait(self, goal: Stage = "done", *, timeout: Timeout = None) -> JobStatus: ...
    @overload
    def wait(self, goal: Goal, *, timeout: Timeout = None) -> JobStatus | None: ...
    def wait(self, goal: Goal = "done", *, timeout: Timeout = None) -> JobStatus | None:
        """Wait until the job is done, or has reached another goal: `running`, `first-step`,
        `checkpoint`, `suspended` or `deleted`. Returns the status in which it got there; None if it
        was deleted. A job that has succeeded has passed `running`, `first-step` and `checkpoint`,
        also if it never reported a step or had no checkpoint.

        Raises:
            KdistError: it has ended otherwise; its `code` is JOB_FAILED or JOB_CANCELLED.
        """
        if goal not in GOALS:
            raise UsageError(f"there is no goal `{goal}`", hint=f"the goals: {', '.join(GOALS)}")
        limit, found = read_timeout(timeout), self._found  # which may be deleted already
        if isinstance(found, LocalJob):
            try:
                return found.follow().wait(goal, timeout=limit)
            except NotFoundError:
                if goal == "deleted":
                    return None
                raise
        return self._job(stays=True, timeout=limit).wait(goal, timeout=limit)

    def logs(
        self,
        rank: int | None = None,
        *,
        follow: bool = False,
        tail: int | None = None,
        timeout: Timeout = None,
    ) -> Iterator[str]:
        """Iterate over the lines of the job's logs: of all ranks or of one, all lines or the last
        ones of each node, and with `follow` those to come, through restarts until the job ends:
        within the `timeout`, or else the error is TIMEOUT.
        """
        for name, number in {"rank": rank, "tail": tail}.items():
            if number is not None and not (isinstance(number, int) and number >= 0):
                raise UsageError(f"{name}: {number!r:.80} is no number from 0")
        limit = read_timeout(timeout)
        chosen = LogSelection(follow, None if rank is None else str(rank), tail=tail, timeout=limit)
        job = self._job(stays=follow, timeout=limit)
        if rank is not None:
            now = job.snapshot().status
            if 0 < now.world_size <= rank and now.nodes.min == now.nodes.max:
                what = f"there is no rank {rank}: {self.name} has {now.world_size} ranks, from 0"
                raise UsageError(what)
        has_lines = False
        for line in job.logs(chosen):
            if isinstance(line, JobStatus):  # in which the job has ended
                continue
            if isinstance(line, Entry):
                source, event, plain = line.node, line.event, f"{line.prefix} {line.body}"
            else:
                source, plain = line.source, f"[{line.source}] {line.printed}"
                event = line.event and {"time": line.stamp, **line.event}
            has_lines = True
            yield format_line(Entry(source, event, "")) if event else plain
        if rank is not None and not (follow or has_lines):
            DIALOG.warn(chosen.describe_absence(self.name))

    def events(self) -> list[Row]:
        """Its events, oldest first: Kubernetes', or of a run on this machine the trainer's."""
        return [dict(each) for page in self._job().events(set(), follow=False) for each in page]

    def metrics(self) -> list[Row]:
        """A row for each step of a managed training, for `pandas.DataFrame`: step, generation,
        loss, seconds and the like; of very many steps, successive ones are one row. What a script
        reports is in `status` while it runs.
        """
        steps = self._job().checkpoints("ledger").get("steps") or []
        # losses are written with every bit
        return [{**each, "loss": float.fromhex(each.get("loss") or "nan")} for each in steps]

    def report(self) -> Row:
        """Where the time of the run went, as `kdist report -o json` prints it."""
        report: Row = slices.load("report", "command").read_report(self._job())
        return report

    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints that the job could continue from, the newest one at the end."""
        found = [
            Checkpoint(
                str(one["name"]), int(one["step"]), one.get("bytes"), one.get("time"), self._job
            )
            for one in self._job().checkpoints("list").get("checkpoints") or []
            if one.get("state") in ("complete", "verified")
        ]
        return sorted(found, key=lambda each: each.step)

    def suspend(self, *, timeout: Timeout = None) -> None:
        """Save the job's state and stop it; `resume` continues it."""
        self._job().suspend(Change(timeout=read_timeout(timeout)))

    def resume(self, *, timeout: Timeout = None) -> None:
        """Start the job again where it was suspended."""
        self._job().resume(Change(timeout=read_timeout(timeout)))

    def restart(self, *, fresh: bool = False, timeout: Timeout = None) -> None:
        """Restart all ranks from the last checkpoint; with `fresh`, archive the checkpoints and
        start from scratch.
        """
        self._job().restart(Change(timeout=read_timeout(timeout)), fresh=fresh, confirmed=True)

    def scale(self, nodes: int | str, *, timeout: Timeout = None) -> None:
        """Change the number of nodes while the job runs, to a number or `MIN:MAX`."""
        self._job().scale(str(nodes), Change(timeout=read_timeout(timeout)))

    def delete(self, *, purge: bool = False, timeout: Timeout = None) -> None:
        """Have the job save and end, and delete it; its checkpoints stay, except with `purge`."""
        chosen = DeleteOptions(purge, timeout=read_timeout(timeout))
        for title in self._job().plan_deletion(chosen).steps:
            DIALOG.notify(f"{title} deleted")

    def _repr_html_(self) -> str:
        """A card with the job's status, as notebooks show it; it does not change by itself."""
        from kdist.views.status_table import status_rows

        try:
            rows = [*status_rows(self.status())]
        except KdistError as error:
            rows = [("error", error.message), ("hint", error.hint)]
        left = "style='text-align:left'"
        cells = "".join(
            f"<tr><th {left}>{escape(name)}</th><td {left}>{escape(value)}</td></tr>"
            for name, value in rows
            if value
        )
        return f"<table><caption>{escape(self.name)}</caption>{cells}</table>"


@in_python
def get(
    job: str | JobStatus,
    *,
    local: bool = False,
    timeout: Timeout = None,
    namespace: str | None = None,
    context: str | None = None,
    kubeconfig: str | None = None,
) -> JobHandle:
    """The job of a name, a job file or a run folder: a run on this machine, or else a job of the
    cluster.

    Args:
        job: the name, the path, or a status of `list_jobs`.
        local: it must be a run on this machine.
        timeout: how long an API server that does not answer is tried again: seconds, or `5m`.
        namespace: None for that of the job file, or else of the kubeconfig's context.
        context: of the kubeconfig; None for the current one.
        kubeconfig: the file; None for `$KUBECONFIG` or `~/.kube/config`.

    Raises:
        NotFoundError: there is no such job.
    """
    if isinstance(job, JobStatus):
        local, namespace = local or job.location == "local", namespace or job.namespace or None
        job = job.name
    if not isinstance(job, str):
        raise UsageError(f"{job!r:.80} is no job", hint="write its name, or the path of its file")
    place, limit = Place(namespace, context, kubeconfig), read_timeout(timeout)
    found = find(refer(job), place, local=local, timeout=limit, dialog=DIALOG)
    if isinstance(found, LocalJob):
        return JobHandle(found.pin())
    found.snapshot()  # which fails if the cluster has no such job
    return JobHandle(found)


@in_python
def list_jobs(
    *,
    local: bool = False,
    all_namespaces: bool = False,
    selector: str = "",
    timeout: Timeout = None,
    namespace: str | None = None,
    context: str | None = None,
    kubeconfig: str | None = None,
) -> list[JobStatus]:
    """The status of each run on this machine and each job of the cluster, as `kdist get` lists
    them; `get` takes each.

    Args:
        local: only the runs on this machine.
        all_namespaces: only the cluster's jobs, of all namespaces.
        selector: only the cluster's jobs that have these labels.
        timeout: as for `get`.
        namespace: as for `get`.
        context: as for `get`.
        kubeconfig: as for `get`.
    """
    scope: Any = {"local": local, "all_namespaces": all_namespaces, "selector": selector}
    place, limit = Place(namespace, context, kubeconfig), read_timeout(timeout)
    listing = Listing((), place, timeout=limit, stays=False, dialog=DIALOG, **scope)
    return [each.status for each in listing.read()]
