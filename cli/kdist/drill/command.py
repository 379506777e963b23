"""`kdist drill`: a fault on purpose, and the report of the recovery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import click

from kdist import console
from kdist.commands import options, targets
from kdist.commands.confirmation import confirm
from kdist.errors import Code, UsageError

if TYPE_CHECKING:
    from kdist.drill.faults import Fault, Situation
    from kdist.drill.report import DrillReport
    from kdist.drill.target import DrillTarget, FaultPlan


_FAULTS = ("rank", "agent", "pod", "silence")


@click.command()
@options.job_argument
@click.option(
    "--fault",
    type=click.Choice(_FAULTS),
    help="What to do to it; without, show what it would survive.",
)
@click.option("--rank", type=click.IntRange(min=0), help="Rank to kill (default: the last).")
@click.option("--node", type=click.IntRange(min=0), help="Node to strike (default: the last).")
@click.option(
    "--for",
    "lasts",
    type=options.seconds,
    metavar="DURATION",
    help="How long a silence lasts (default: until the others have noticed it).",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@options.accept_option
@options.local_option
@options.cluster_options
@options.preview_option
@options.output_option("table", "json")
def command(
    *,
    fault: str | None,
    rank: int | None,
    node: int | None,
    lasts: float | None,
    yes: bool,
    dry_run: str,
    output: str,
    timeout: float | None,
    **which: Any,
) -> int:
    r"""Hurt a running job on purpose, and report how it recovers.

    Without --fault nothing is hurt: it shows which faults the job would survive now, and why not
    the others. A fault that the job would not survive is refused.

    \b
    Faults:
      rank     kill -9 of one rank
      agent    kill -9 of a node's agent, whose ranks then end
      pod      delete a pod without grace period; of a local run, kill an agent and its ranks
      silence  stop all processes of a node (SIGSTOP), then resume them

    The report compares what the job's own records show with what is promised: the time without a
    finished step, the steps that were done again, their losses bit by bit, the samples. Ctrl-C ends
    a fault that lasts. --timeout is the time that the job gets to train again (5m).

    \b
    Examples:
      kdist drill digits
      kdist drill digits --fault rank
      kdist drill digits --fault silence --node 1 --for 30s -n ml --yes

    \b
    Exit codes:
      0 every promise was kept   1 one was broken, or the fault was refused   4 no such job
      7 a right is missing
    """
    from kdist.drill import drill, faults

    if fault is None:
        for option, value in {"--rank": rank, "--node": node, "--for": lasts}.items():
            if value is not None:
                raise UsageError(f"{option} needs --fault", next_command="kdist drill --help")
    place = _find_place(timeout=timeout, **which)
    chosen = cast("Fault | None", fault)
    situation = drill.examine(place, chosen)
    if chosen is None:
        _preview(situation, output)
        return Code.OK
    plan = drill.plan_fault(situation, chosen, rank=rank, node=node, lasts=lasts)
    for warning in faults.list_warnings(plan.fault, situation, seconds=plan.seconds):
        console.warning(f"{situation.name}: {warning}")
    what = _describe(situation, plan)
    if dry_run == "client":
        if output == "json":
            document = {"job": situation.name, "fault": plan.fault, "does": what}
            console.emit(document, kind="DrillPlan", output=output)
        else:
            console.result(f"--fault {plan.fault} {what} (client dry run)")
        return Code.OK
    if not yes:
        confirm(f"--fault {plan.fault} {what}", f"This {what}. Go on?")
    report = drill.run_drill(place, plan, timeout=timeout, notify=console.message)
    _show(report, output)
    return Code.OK if report.kept else Code.ERROR


def _find_place(*, timeout: float | None, **which: Any) -> DrillTarget:
    from kdist.job.local.job import LocalJob

    found = targets.find(changes=True, **which)
    if isinstance(found, LocalJob):
        from kdist.drill.local import LocalDrillTarget

        return LocalDrillTarget(found)
    from kdist.drill.cluster import ClusterDrillTarget

    return ClusterDrillTarget(found.applied, timeout=timeout)


def _preview(situation: Situation, output: str) -> None:
    from kdist.drill import faults

    found = [
        {
            "fault": fault,
            "does": does,
            "obstacle": faults.why_refused(fault, situation),
            "costs": faults.describe_risk(situation),
        }
        for fault, does in faults.FAULTS.items()
    ]
    if output == "json":
        listed = [{**each, "survives": not each["obstacle"]} for each in found]
        console.emit({"job": situation.name, "faults": listed}, kind="DrillPreview", output="json")
        return
    for each in found:
        fault, obstacle = each["fault"], each["obstacle"]
        what = f"not now: {obstacle}" if obstacle else f"{each['does']}; costs {each['costs']}"
        console.paragraph(what, start=f"{fault:9}{'no ' if obstacle else 'yes'}  ")
    if possible := [each["fault"] for each in found if not each["obstacle"]]:
        command = situation.check.replace("kdist status", "kdist drill", 1)
        console.message(f"Next: {command} --fault {possible[0]}")


def _describe(situation: Situation, plan: FaultPlan) -> str:
    from kdist.drill import faults

    risk = faults.describe_risk(situation)
    return f"{plan.action} of {situation.name}, which costs {risk}"


def _show(report: DrillReport, output: str) -> None:
    from kdist.drill.report import HEADER
    from kdist.units import moment

    if output == "json":
        console.emit(report.to_document(), output="json")
        return
    seen = report.observation
    console.paragraph(
        f"{seen.before.name}: drill {seen.fault}, {seen.target} at {moment(seen.began)}"
    )
    console.result("")
    console.table([line.cells() for line in report.lines], header=HEADER)
    console.result("")
    for name, value in report.facts.items():
        console.paragraph(value, start=f"{name:14}")
