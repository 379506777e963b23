"""`kdist get`: the jobs of a cluster, and the runs on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import Code, UsageError
from kdist.job.find import NO_CLUSTER, Listed, Listing
from kdist.terminal import columns
from kdist.units import age, number, or_dash

if TYPE_CHECKING:
    from kdist.status import JobStatus

_POLL_SECONDS = 2.0


class _Column(NamedTuple):
    title: str
    show: Callable[[JobStatus], str]
    when: str = ""
    """The output that has it, or `all` for more than one namespace; empty for always."""


def _step(status: JobStatus) -> str:
    of = f"/{status.target_steps}" if status.target_steps else ""
    return or_dash(status.step, lambda step: f"{step}{of}")


def _rate(status: JobStatus) -> str:
    return or_dash(status.throughput, lambda rate: number(round(rate)))


_COLUMNS = (
    _Column(
        "NAMESPACE", lambda job: "(local)" if job.location == "local" else job.namespace, "all"
    ),
    _Column("NAME", lambda status: status.name),
    _Column("PHASE", lambda status: str(status.phase)),
    _Column("NODES", lambda status: str(status.nodes)),
    _Column("STEP", _step),
    _Column("LOSS", lambda status: or_dash(status.loss, number)),
    _Column("RESTARTS", lambda status: str(status.restarts)),
    _Column("BACKEND", lambda status: status.backend or "-", "wide"),
    _Column("RANKS", lambda status: str(status.world_size or "-"), "wide"),
    _Column("SAMPLES/S", _rate, "wide"),
    _Column("SAVED", lambda job: or_dash(job.last_checkpoint_step, str), "wide"),
    _Column("QUEUE", lambda status: status.queue or "-", "wide"),
    _Column("RUN", lambda status: status.run_id or "-", "wide"),
    _Column("AGE", lambda status: or_dash(status.age, age)),
)


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=options.complete_name)
@click.option("-A", "--all-namespaces", is_flag=True, help="The jobs of all namespaces.")
@click.option("-l", "--selector", default="", metavar="LABELS", help="Only jobs with these labels.")
@click.option("-w", "--watch", is_flag=True, help="Keep watching, and show each job that changes.")
@click.option("--local", is_flag=True, help="Only the runs on this machine.")
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
    namespace: str | None,
    context: str | None,
    timeout: float | None,
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
      kdist get digits -o json | jq .step
      kdist get -l team=vision -o json | jq '.items | sort_by(.age)[].name'
    """
    if all_namespaces and (names or namespace):
        raise UsageError(
            "-A lists the jobs of all namespaces and cannot be combined with names or -n"
        )
    place = options.find_place(click.get_current_context(), namespace, context)
    if local and (place.is_chosen or all_namespaces or selector):
        raise UsageError("--local lists runs on this machine, which have no namespace or labels")
    listing = Listing(
        names,
        place,
        local=local,
        all_namespaces=all_namespaces,
        selector=selector,
        timeout=timeout,
        stays=watch,
        dialog=targets.DIALOG,
    )
    found = listing.read()
    if not found and output in ("table", "wide") and not watch:
        if listing.cluster is not None:
            inside = "" if all_namespaces else f" in namespace {listing.cluster.namespace}"
            console.message(
                f"there are no jobs{inside}{', nor on this machine' if listing.here else ''}"
            )
            return Code.OK
        console.message(f"there are no jobs on this machine{'' if local else NO_CLUSTER}")
        console.message("Next: kdist init")
        return Code.OK
    both = len({each.status.location for each in found}) > 1
    shown = Rows(
        output,
        all_namespaces=all_namespaces or both,
        header=not flags["no_headers"],
        labels=flags["show_labels"],
    )
    if watch and output == "json":
        shown.show_changes(found)
    else:
        shown.show(found, whole=not names or len(names) > 1 or len(found) > 1)
    while watch:
        time.sleep(_POLL_SECONDS)
        shown.show_changes(listing.read(strict=False))
    return Code.OK


class Rows:
    """Prints jobs in one format, and remembers what it printed, to print only changes later."""

    def __init__(self, output: str, *, all_namespaces: bool, header: bool, labels: bool) -> None:
        self._output = output
        self._labels = labels
        when = ("", output, "all" if all_namespaces else "")
        self._columns = [column for column in _COLUMNS if column.when in when]
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
            document, name = each.status.to_document(), f"job/{each.status.name}"
            console.emit(document, output=self._output, name=name, stream=True)

    def _remember(self, found: list[Listed]) -> None:
        self._shown = {_key(each): self._facts(each) for each in found}

    def _facts(self, each: Listed) -> tuple[str, ...]:
        return self._row(each, without="AGE")  # which always changes

    def _header(self) -> tuple[str, ...]:
        labels = ("LABELS",) if self._labels else ()
        return (*(column.title for column in self._columns), *labels)

    def _row(self, each: Listed, *, without: str = "") -> tuple[str, ...]:
        pairs = ",".join(f"{name}={value}" for name, value in sorted(each.labels.items()))
        labels = (pairs or "<none>",) if self._labels else ()
        shown = [column for column in self._columns if column.title != without]
        return (*(column.show(each.status) for column in shown), *labels)


def _key(each: Listed) -> tuple[str, str, str]:
    return each.status.location, each.status.namespace, each.status.name
