"""`kdist get`: the jobs of a cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import Code, JobNotFoundError, UsageError

if TYPE_CHECKING:
    from kdist.cluster import Cluster
    from kdist.status import JobStatus

_POLL_SECONDS = 2.0
_LIST = {"apiVersion": "cli.kdist.dev/v1", "kind": "JobList"}


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("-A", "--all-namespaces", is_flag=True, help="The jobs of all namespaces.")
@click.option("-l", "--selector", default="", metavar="LABELS", help="Only jobs with these labels.")
@click.option("-w", "--watch", is_flag=True, help="Keep watching, and show each job that changes.")
@options.output_option("table", "wide", "name", "json", "yaml", "jsonpath")
@options.cluster_options
def command(
    names: tuple[str, ...],
    *,
    all_namespaces: bool,
    selector: str,
    watch: bool,
    output: str,
    **cluster_options: Any,
) -> int:
    r"""List the jobs of a cluster.

    One row per job, whatever its workload kind; step and loss are reported by its agents.

    \b
    Examples:
      kdist get
      kdist get -A -w
      kdist get digits -o jsonpath='{.step}'
      kdist get -l team=vision -o json | jq '.items[].phase'
    """
    if all_namespaces and (names or cluster_options["namespace"]):
        raise UsageError(
            "-A lists the jobs of all namespaces and cannot be combined with names or -n"
        )
    cluster = targets.connect(**cluster_options, stays=watch)
    scope: dict[str, Any] = {"all_namespaces": all_namespaces, "selector": selector, "known": {}}
    found = _find(cluster, names, **scope)
    shown = Rows(output, all_namespaces=all_namespaces)
    if not found and output in ("table", "wide") and not watch:
        scope_name = "" if all_namespaces else f" in namespace {cluster.namespace}"
        console.message(f"there are no jobs{scope_name}")
        return Code.OK
    shown.show(found, whole=not names or len(names) > 1)
    while watch:
        time.sleep(_POLL_SECONDS)
        shown.show_changes(_find(cluster, names, **scope, strict=False))
    return Code.OK


def _find(
    cluster: Cluster, names: tuple[str, ...], *, strict: bool = True, **scope: Any
) -> list[JobStatus]:
    """Status of the named jobs, or of all if there are no names.

    Args:
        cluster: the cluster to read from.
        names: of the jobs; empty for all.
        strict: fail for a name without a job.
        **scope: arguments of `list_snapshots`.

    Raises:
        JobNotFoundError: a named job does not exist, and `strict` is set.
    """
    from kdist import jobs

    every = [seen.status for seen in jobs.list_snapshots(cluster, **scope)]
    missing = [name for name in names if name not in {status.name for status in every}]
    if missing and strict:
        raise JobNotFoundError(*((name, cluster.namespace) for name in missing))
    return [status for status in every if not names or status.name in names]


class Rows:
    """Prints jobs in one format, and remembers what it printed, to print only changes later."""

    def __init__(self, output: str, *, all_namespaces: bool) -> None:
        self._output = output
        self._all = all_namespaces
        self._shown: dict[tuple[str, str], tuple[str, ...]] = {}
        self._widths: list[int] = []

    def show(self, found: list[JobStatus], *, whole: bool) -> None:
        """Print all jobs: as a list, or as a single document if `whole` is false."""
        self._remember(found)
        if self._output in ("table", "wide"):
            rows = [self._row(status) for status in found]
            header = self._header()
            self._widths = [
                max(len(row[index]) for row in [header, *rows]) for index in range(len(header))
            ]
            console.table(rows, header=header)
        elif self._output == "name":
            for status in found:
                console.result(f"job/{status.name}")
        else:
            items = [status.to_document() for status in found]
            document: dict[str, Any] = {**_LIST, "items": items} if whole else items[0]
            console.emit(document, output=self._output)

    def show_changes(self, found: list[JobStatus]) -> None:
        """Print the jobs that are new or have changed."""
        for status in found:
            if self._shown.get((status.namespace, status.name)) == self._facts(status):
                continue
            if self._output in ("table", "wide"):
                cells = zip(self._row(status), self._widths, strict=True)
                console.result("   ".join(cell.ljust(width) for cell, width in cells).rstrip())
            elif self._output == "name":
                console.result(f"job/{status.name}")
            else:
                console.emit(status.to_document(), output=self._output)
        self._remember(found)

    def _remember(self, found: list[JobStatus]) -> None:
        self._shown = {(status.namespace, status.name): self._facts(status) for status in found}

    def _facts(self, status: JobStatus) -> tuple[str, ...]:
        return self._row(status)[:-1]  # the age always changes

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
        )

    def _row(self, status: JobStatus) -> tuple[str, ...]:
        wide = tuple(_wide(status)) if self._output == "wide" else ()
        start = (status.namespace, status.name) if self._all else (status.name,)
        return (*start, *_narrow(status), *wide, _age(status))


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
    from kdist.views.status_table import age

    return "-" if status.age is None else age(status.age)
