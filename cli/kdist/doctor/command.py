"""`kdist doctor`: whether a cluster and this machine can run jobs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import Code, KdistError

if TYPE_CHECKING:
    from kdist.doctor import Finding


_COLORS = {"ok": "green", "note": "yellow", "missing": "red", "unknown": "yellow"}
_TIMEOUT = 5.0  # seconds: an unreachable cluster is reported soon


@click.command()
@click.option("--local", is_flag=True, help="Check this machine only.")
@options.output_option("table", "json", "yaml")
@options.cluster_options
def command(
    *, local: bool, output: str, namespace: str | None, context: str | None, timeout: float | None
) -> int:
    r"""Check whether a cluster and this machine can run jobs.

    Nothing is changed: the checks only read, or use a server-side dry run. Every ✗ comes with a
    fix. Without a kubeconfig only this machine is checked, unless an option such as -n or
    --context selects a cluster.

    \b
    Examples:
      kdist doctor
      kdist doctor -n ml --context prod
      kdist doctor --local
      kdist doctor -o json | jq '.checks[] | select(.mark != "ok")'

    \b
    Exit codes:
      0 nothing required is missing   1 something is missing
    """
    from kdist import doctor
    from kdist.doctor.finding import missing, note

    found: list[Finding] = []
    _print_title("this machine", output)
    found += _collect(doctor.check_machine(), output)
    if not local:
        _print_title("the cluster", output)
        try:
            cluster = targets.connect(
                namespace=namespace,
                context=context,
                timeout=_TIMEOUT if timeout is None else timeout,
            )
        except KdistError as error:
            place = options.find_place(click.get_current_context(), namespace, context)
            none = note("cluster", "no kubeconfig: local runs only")
            failed = missing("cluster", str(error), error.hint)
            found += _collect([failed if place.has_cluster() else none], output)
        else:
            found += _collect(doctor.check_cluster(cluster), output)
    missing_findings = [each for each in found if each.mark is doctor.Severity.MISSING]
    if output != "table":
        checks = [each.to_document() for each in found]
        document = {"healthy": not missing_findings, "checks": checks}
        console.emit(document, kind="Checks", output=output)
    elif missing_findings:
        console.message(
            f"{len(missing_findings)} of {len(found)} checks found something missing that jobs need"
        )
    return Code.ERROR if missing_findings else Code.OK


def _collect(findings: Iterable[Finding], output: str) -> Iterator[Finding]:
    """Yield the findings; in table output, print each as it arrives."""
    for each in findings:
        if output == "table":
            sign = console.style(each.mark.sign, _COLORS[each.mark])
            console.paragraph(f"{each.name}: {each.detail}", start=f"  {sign} ")
            if each.fix and each.mark.value != "ok":
                console.paragraph(each.fix, start="      fix: ")
        yield each


def _print_title(title: str, output: str) -> None:
    if output == "table":
        console.result(console.style(title, bold=True))
