"""`kdist doctor`: what a cluster and this machine can do for a job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import click

from kdist import console
from kdist.commands import options
from kdist.errors import Code, KdistError

if TYPE_CHECKING:
    from kdist.doctor import Finding

_COLORS = {"ok": "green", "note": "yellow", "missing": "red", "unknown": "yellow"}
_PATIENCE = 5.0  # seconds: whoever asks the doctor wants to hear soon that nobody answers


@click.command()
@click.option("--local", is_flag=True, help="Check this machine alone.")
@options.output_option("table", "json", "yaml")
@options.cluster_options
def command(
    *, local: bool, output: str, namespace: str | None, context: str | None, timeout: float | None
) -> int:
    r"""Check what a cluster, and this machine, can do for a job.

    Nothing is changed: what jobs need is looked up, or rehearsed. Every ✗ comes with its fix.

    \b
    Examples:
      kdist doctor
      kdist doctor -n ml --context prod
      kdist doctor --local
      kdist doctor -o json | jq '.checks[] | select(.mark != "ok")'

    \b
    Exit codes:
      0 nothing that is needed is missing   1 something is
    """
    from kdist import doctor
    from kdist.doctor.finding import missing

    found: list[Finding] = []
    _tell("this machine", output)
    found += _collect(doctor.check_machine(), output)
    if not local:
        _tell("the cluster", output)
        try:
            cluster = options.connect(
                namespace=namespace,
                context=context,
                timeout=_PATIENCE if timeout is None else timeout,
            )
        except KdistError as error:
            found += _collect([missing("cluster", str(error), error.hint)], output)
        else:
            found += _collect(doctor.check_cluster(cluster), output)
    lacking = [each for each in found if each.mark is doctor.Severity.MISSING]
    if output != "table":
        checks = [each.to_document() for each in found]
        console.emit(
            {
                "apiVersion": "cli.kdist.dev/v1",
                "kind": "Checks",
                "healthy": not lacking,
                "checks": checks,
            },
            output=output,
        )
    elif lacking:
        console.message(
            f"{len(lacking)} of {len(found)} checks found something missing that jobs need"
        )
    return Code.ERROR if lacking else Code.OK


def _collect(findings: Iterable[Finding], output: str) -> Iterator[Finding]:
    """Pass the findings on, and show each to a person at once."""
    for each in findings:
        if output == "table":
            _show(each)
        yield each


def _tell(title: str, output: str) -> None:
    if output == "table":
        console.result(click.style(title, bold=True))


def _show(finding: Finding) -> None:
    console.result(
        f"  {click.style(finding.mark.sign, fg=_COLORS[finding.mark])} {finding.name}: "
        f"{finding.detail}"
    )
    if finding.fix and finding.mark.value != "ok":
        console.result(f"      fix: {finding.fix}")
