"""`kdist get`: the jobs of a cluster, and the runs on this machine."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import Code, JobNotFoundError, KdistError, UsageError
from kdist.terminal import columns
from kdist_trainer.formats.json_text import encode_json

if TYPE_CHECKING:
    from kdist.cluster import Cluster
    from kdist.status import JobStatus

_POLL_SECONDS = 2.0
_PATIENCE_SECONDS = 3.0  # for a cluster that does not answer, if there are runs to show
_COLUMNS = {  # column -> where its value is in `-o json`
    "NAMESPACE": ".namespace",
    "NAME": ".name",
    "PHASE": ".phase",
    "NODES": ".nodes.ready",
    "STEP": ".step",
    "LOSS": ".loss",
    "RESTARTS": ".restarts",
    "BACKEND": ".backend",
    "RANKS": ".worldSize",
    "SAMPLES/S": ".throughput",
    "SAVED": ".lastCheckpointStep",
    "QUEUE": ".queue",
    "RUN": ".runId",
    "AGE": ".age",
}
_KUBECTL_PATHS = {  # what jobs are sorted by with kubectl -> the same here
    ".metadata.creationTimestamp": ".created",
    ".metadata.name": ".name",
    ".metadata.namespace": ".namespace",
}


class Listed(NamedTuple):
    """A job of the list and its labels; a run on this machine has none."""

    status: JobStatus
    labels: Mapping[str, str]


def _find_sort_path(_: click.Context, __: click.Parameter, value: str) -> str:
    """The path of `--sort-by`, which is a column or a path of fields. Raises `UsageError`."""
    if not value:
        return ""
    if value.upper() in _COLUMNS:
        return _COLUMNS[value.upper()]
    if "." not in value and "[" not in value:
        raise UsageError(
            f"--sort-by: there is no column `{value}`",
            hint=f"the columns are {', '.join(_COLUMNS)}; a path as in -o json works too: .created",
        )
    bare = value.removeprefix("{").removesuffix("}").removeprefix("$").removeprefix(".")
    if not re.fullmatch(r"[\w-]+(\.[\w-]+)*", bare):
        raise UsageError(
            f"--sort-by cannot read `{value}`", hint="a path is fields and dots, as in .nodes.ready"
        )
    return _KUBECTL_PATHS.get(f".{bare}", f".{bare}")


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=options.complete_name)
@click.option("-A", "--all-namespaces", is_flag=True, help="The jobs of all namespaces.")
@click.option("-l", "--selector", default="", metavar="LABELS", help="Only jobs with these labels.")
@click.option("-w", "--watch", is_flag=True, help="Keep watching, and show each job that changes.")
@click.option("--local", is_flag=True, help="Only the runs on this machine.")
@click.option(
    "--sort-by",
    default="",
    metavar="COLUMN|PATH",
    callback=_find_sort_path,
    help="Sort by a column, or by a path as in -o json.",
)
@click.option("--show-labels", is_flag=True, help="Add a column with the labels of each job.")
@click.option("--no-headers", is_flag=True, help="Leave out the header of the table.")
@options.output_option("table", "wide", "name", "json", "yaml")
@options.cluster_options
def command(
    names: tuple[str, ...],
    *,
    all_namespaces: bool,
    selector: str,
    watch: bool,
    local: bool,
    output: str,
    **flags: Any,
) -> int:
    r"""List the jobs of a cluster and the runs on this machine.

    One row per job, whatever its workload kind; step and loss are reported by its agents. The runs
    are left out if an option chooses a cluster, a namespace or labels.

    \b
    Examples:
      kdist get
      kdist get -A -w
      kdist get --local --no-headers
      kdist get --sort-by age
      kdist get digits -o json | jq .step
      kdist get -l team=vision -o json | jq '.items[].phase'
    """
    cluster_options = {name: flags[name] for name in ("namespace", "context", "timeout")}
    if all_namespaces and (names or cluster_options["namespace"]):
        raise UsageError(
            "-A lists the jobs of all namespaces and cannot be combined with names or -n"
        )
    chosen = targets.asks_cluster(cluster_options["namespace"], cluster_options["context"])
    here = local or not (chosen or all_namespaces or selector)
    if local and (chosen or all_namespaces or selector):
        raise UsageError("--local lists runs on this machine, which have no namespace or labels")
    source = Source(names, here=here, all_namespaces=all_namespaces, selector=selector)
    if not local:
        source.connect(watch=watch, **cluster_options)
    found = _sort(source.read(), flags["sort_by"])
    if not found and output in ("table", "wide") and not watch:
        return _report_none(source.cluster, here=here, local=local, every=all_namespaces)
    both = len({each.status.location for each in found}) > 1
    shown = Rows(
        output,
        all_namespaces=all_namespaces or both,
        header=not flags["no_headers"],
        labels=flags["show_labels"],
    )
    shown.show(found, whole=not names or len(names) > 1 or len(found) > 1)
    while watch:
        time.sleep(_POLL_SECONDS)
        shown.show_changes(source.read(strict=False))
    return Code.OK


class Source:
    """Where the jobs come from: a cluster, this machine, or both.

    Args:
        names: of the jobs; empty for all.
        here: the runs on this machine too.
        **scope: arguments of `list_snapshots`.

    Attributes:
        cluster: None for none.
    """

    def __init__(self, names: Sequence[str], *, here: bool, **scope: Any) -> None:
        self.cluster: Cluster | None = None
        self._names = [name.removeprefix("job/").removeprefix("trainingjob/") for name in names]
        self._here = here
        self._scope = {**scope, "known": {}}
        self._failure: KdistError | None = None
        self._optional = False
        self._only_here = True
        self._warns = False

    def connect(self, *, watch: bool, **cluster_options: Any) -> None:
        """Connect to the cluster, if one is configured or chosen. Runs on this machine do not wait
        long for it.
        """
        from kdist.cluster import kubeconfig

        self._only_here = False
        if not self._here:
            self.cluster = targets.connect(**cluster_options, stays=watch)
            return
        from kdist import cluster
        from kdist.job.local.job import list_jobs

        if not kubeconfig.exists():
            return
        self._optional = any(not self._names or run.name in self._names for run in list_jobs())
        if not self._optional:
            self.cluster = targets.connect(**cluster_options, stays=watch)
            return
        timeout = cluster_options["timeout"]
        try:
            self.cluster = cluster.connect(
                retry_seconds=timeout or 0.0,
                request_timeout=targets.request_timeout(timeout or _PATIENCE_SECONDS),
                until=cluster.deadline(timeout) if watch else None,
                notify=console.message,
            )
        except KdistError as error:
            self._leave_out(error)

    def read(self, *, strict: bool = True) -> list[Listed]:
        """The named jobs, or all if there are no names.

        Args:
            strict: fail for a name without a job.

        Raises:
            JobNotFoundError: a named job does not exist, and `strict` is set.
        """
        every = self._read_cluster()
        if self._here:
            from kdist.job.local import list_runs

            every += [Listed(status, {}) for status in list_runs()]
        known = {each.status.name for each in every}
        missing = [name for name in self._names if name not in known]
        if missing and strict:
            if self._failure is not None:
                raise self._failure
            if self.cluster is None:
                raise targets.missing_run(*missing, local=self._only_here)
            if self._here:
                targets.note_no_run()
            raise JobNotFoundError(*((name, self.cluster.namespace) for name in missing))
        if self._warns and self._failure is not None:
            console.warning(f"only the runs on this machine are shown: {self._failure.message}")
            self._warns = False
        return [each for each in every if not self._names or each.status.name in self._names]

    def _read_cluster(self) -> list[Listed]:
        if self.cluster is None:
            return []
        from kdist.job import cluster as jobs
        from kdist.status import documents

        try:
            snapshots = jobs.list_snapshots(self.cluster, **self._scope)
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


def _sort(found: list[Listed], path: str) -> list[Listed]:
    """Sort by the value at this path, numbers before text; jobs without it come last."""
    if not path:
        return found

    from kdist.status import documents

    def key(each: Listed) -> tuple[int, float, str]:
        at = documents.at(each.status.to_document(), *path[1:].split("."))
        text = at if isinstance(at, str) else encode_json(at)
        if text in ("", "null"):
            return 2, 0.0, ""
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        return (0, value, "") if math.isfinite(value) else (1, 0.0, text)

    return sorted(found, key=key)


def _report_none(cluster: Cluster | None, *, here: bool, local: bool, every: bool) -> int:
    """Say that there are no jobs, and how to get one."""
    if cluster is not None:
        place = "" if every else f" in namespace {cluster.namespace}"
        console.message(f"there are no jobs{place}{', nor on this machine' if here else ''}")
        return Code.OK
    reason = "" if local else ", and no kubeconfig names a cluster"
    console.message(f"there are no jobs on this machine{reason}")
    console.message("Next: kdist init")
    return Code.OK


class Rows:
    """Prints jobs in one format, and remembers what it printed, to print only changes later."""

    def __init__(self, output: str, *, all_namespaces: bool, header: bool, labels: bool) -> None:
        self._output = output
        self._all = all_namespaces
        self._labels = labels
        self._table = columns.Table(self._header(), with_header=header)
        self._shown: dict[tuple[str, str, str], tuple[str, ...]] = {}

    def show(self, found: list[Listed], *, whole: bool) -> None:
        """Print all jobs: as a list, or as a single document if `whole` is false."""
        self._remember(found)
        if self._output in ("table", "wide", "name"):
            self._show_each(found)
        else:
            items = [each.status.to_document() for each in found]
            kind = "JobList" if whole else ""
            console.emit({"items": items} if whole else items[0], kind=kind, output=self._output)

    def show_changes(self, found: list[Listed]) -> None:
        """Print the jobs that are new or have changed."""
        self._show_each(each for each in found if self._shown.get(_key(each)) != self._facts(each))
        self._remember(found)

    def _show_each(self, found: Iterable[Listed]) -> None:
        if self._output in ("table", "wide"):
            rows = [self._row(each) for each in found]
            console.add_rows(self._table, rows, fit=self._output == "table")
            return
        for each in found:
            document = each.status.to_document()
            console.emit(document, output=self._output, name=f"job/{each.status.name}")

    def _remember(self, found: list[Listed]) -> None:
        self._shown = {_key(each): self._facts(each) for each in found}

    def _facts(self, each: Listed) -> tuple[str, ...]:
        row = self._row(each)
        age = self._header().index("AGE")
        return (*row[:age], *row[age + 1 :])  # the age always changes

    def _header(self) -> tuple[str, ...]:
        wide = (
            ("BACKEND", "RANKS", "SAMPLES/S", "SAVED", "QUEUE", "RUN")
            if self._output == "wide"
            else ()
        )
        return (
            *(("NAMESPACE",) if self._all else ()),
            "NAME",
            "PHASE",
            "NODES",
            "STEP",
            "LOSS",
            "RESTARTS",
            *wide,
            "AGE",
            *(("LABELS",) if self._labels else ()),
        )

    def _row(self, each: Listed) -> tuple[str, ...]:
        status = each.status
        wide = tuple(_wide(status)) if self._output == "wide" else ()
        where = "(local)" if status.location == "local" else status.namespace
        start = (where, status.name) if self._all else (status.name,)
        pairs = ",".join(f"{name}={value}" for name, value in sorted(each.labels.items()))
        labels = (pairs or "<none>",) if self._labels else ()
        return (*start, *_narrow(status), *wide, _age(status), *labels)


def _key(each: Listed) -> tuple[str, str, str]:
    return each.status.location, each.status.namespace, each.status.name


def _narrow(status: JobStatus) -> Iterator[str]:
    from kdist.units import number

    yield str(status.phase)
    yield str(status.nodes)
    of = f"/{status.target_steps}" if status.target_steps else ""
    yield "-" if status.step is None else f"{status.step}{of}"
    yield "-" if status.loss is None else number(status.loss)
    yield str(status.restarts)


def _wide(status: JobStatus) -> Iterator[str]:
    from kdist.units import number

    yield status.backend or "-"
    yield str(status.world_size or "-")
    yield "-" if status.throughput is None else number(round(status.throughput))
    yield "-" if status.last_checkpoint_step is None else str(status.last_checkpoint_step)
    yield status.queue or "-"
    yield status.run_id or "-"


def _age(status: JobStatus) -> str:
    from kdist.units import age

    return "-" if status.age is None else age(status.age)
