"""`kdist recover`: replace the pods of a job whose node is gone, or faulty."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import Code, UsageError
from kdist.units import age

if TYPE_CHECKING:
    from kdist.job.cluster.applied import AppliedJob
    from kdist.job.local.job import LocalJob
    from kdist.recovery import PodDecision, Recovery


@click.command()
@options.job_argument
@click.option(
    "--node-is-off",
    "switched_off",
    metavar="NODE",
    multiple=True,
    help="You vouch that this machine is switched off; may be repeated.",
)
@click.option(
    "--avoid",
    "avoided",
    metavar="NODE",
    help="Keep the job's pods from this node, which answers but has faults.",
)
@click.option(
    "--for",
    "duration",
    type=options.seconds,
    metavar="DURATION",
    help="How long --avoid lasts (default: 24h).",
)
@click.option("--allow", "allowed", metavar="NODE", help="Let the job's pods use this node again.")
@options.cluster_options
@options.wait_option
@options.dry_run_option
@options.output_option("table", "json")
def command(
    *,
    switched_off: tuple[str, ...],
    avoided: str | None,
    duration: float | None,
    allowed: str | None,
    wait: bool,
    dry_run: str,
    output: str,
    timeout: float | None,
    **which: Any,
) -> int:
    r"""Replace the pods of a job whose node is gone, or faulty.

    Kubernetes does not replace a pod on a node that does not answer, because it may come back. This
    marks the job's own pods there as failed, so that they are created again on other nodes, and
    touches nothing else on the node.

    It does so once the node's Ready condition is Unknown, its Lease has run out, and the job's
    other agents no longer hear the pod's. If no other agent is left, it takes one more Lease, and
    checkpoints on a volume that all nodes share. Otherwise it says what it waits for. If you are
    certain that the machine is off, --node-is-off NODE stands for the evidence of the node.

    --avoid NODE is for a machine that answers, and is faulty: the job's own pods there save and
    end, and start on other nodes. A pod that sleeps keeps this job, and no other, from the node
    until --for has passed, or --allow NODE removes it.

    \b
    Examples:
      kdist recover digits
      kdist recover digits --dry-run=client --no-wait
      kdist recover digits --node-is-off worker-2
      kdist recover digits --avoid worker-2 --for 12h

    \b
    Exit codes:
      0 no pod is left on such a node   1 one is left, and waiting does not help   4 no such job
      6 one is left after --timeout, or with --no-wait   7 a right is missing
    """
    from kdist.job.local.job import LocalJob
    from kdist.recovery import AVOID_SECONDS, recover

    meant = targets.find(changes=True, **which)
    if isinstance(meant, LocalJob):
        raise meant.refuse("recover", *_advise(meant))
    target = meant.applied
    how = {"dry_run": dry_run == "server", "change": dry_run != "client"}
    note = "" if dry_run == "none" else f" ({dry_run} dry run)"
    if duration is not None and not avoided:
        raise UsageError("--for belongs to --avoid")
    if avoided or allowed:
        if switched_off or (avoided and allowed):
            raise UsageError("choose one of --node-is-off, --avoid and --allow")
        seconds = AVOID_SECONDS if duration is None else duration
        _avoid_or_allow(target, avoided or "", allowed or "", seconds, output, note, **how)
        return Code.OK
    found = recover(
        target,
        switched_off=switched_off,
        wait=wait,
        timeout=timeout,
        **how,
        notify=console.message,
    )
    if output == "json":
        document = {"job": target.name, "pods": found.to_document()}
        console.emit(document, kind="Recovery", output="json")
    else:
        _show(target, found, note)
    if found.complete:
        return Code.OK
    return Code.ERROR if found.hopeless else Code.TIMEOUT


def _advise(run: LocalJob) -> tuple[str, str]:
    """What recovers a run on this machine: in words, and as a command."""
    if run.active:
        return "its `kdist run` starts agents again that end", run.kdist("status")
    if run.is_done:
        return "it is done", run.kdist("report")
    from kdist.job.local.job import CONTINUES

    return CONTINUES, run.next_run


def _avoid_or_allow(
    target: AppliedJob, node: str, allowed: str, seconds: float, output: str, note: str, **how: bool
) -> None:
    from kdist.recovery import allow, avoid
    from kdist.status import AvoidedNode

    pods: list[str] = []
    if node:
        wanted = AvoidedNode(node, time.time() + seconds, "asked for by `kdist recover`")
        pods = avoid(target, wanted, **how)
    else:
        allow(target, allowed, **how)
    if output == "json":
        document = {"job": target.name, "node": node or allowed, "avoided": bool(node)}
        console.emit({**document, "pods": pods}, kind="Avoidance", output="json")
        return
    what = f"{node} is avoided for {age(seconds)}" if node else f"{allowed} may be used again"
    console.result(what + note)
    for pod in pods:
        console.result(f"{pod} saves and ends, and starts on another node{note}")


def _show(target: AppliedJob, found: Recovery, note: str) -> None:
    if not found.decisions:
        console.result(f"all nodes of {target.name} answer: there is nothing to recover")
        return
    for each in found.decisions:
        _show_pod(each, found, note=note, changes=not note)
    if not found.complete:
        nodes = sorted({each.node for each in found.decisions if not each.recover})
        off = " ".join(f"--node-is-off {node}" for node in nodes)
        console.message(f"Next: if the machine is certainly off: {target.command('recover', off)}")
    elif not note:
        for line in _held_volumes(target, found):
            console.warning(line)
        console.message(f"Next: {target.command('wait', '--for=first-step')}")


def _show_pod(decision: PodDecision, found: Recovery, *, note: str, changes: bool) -> None:
    done = found.replacements.get(decision.pod)
    if not decision.recover:
        mark = console.style("waits", "yellow", bold=True)
    elif changes and (done is None or done.changed):
        mark = console.style("changed", "yellow", bold=True)
    else:
        mark = console.style("given up" if changes else "would be given up", bold=True)
    console.paragraph(f"{decision.pod}: {decision.message}{note}", start=f"{mark} ")
    for line in decision.evidence:
        console.paragraph(line, start=f"  {console.style('|', dim=True)} ")


def _held_volumes(target: AppliedJob, found: Recovery) -> list[str]:
    """Sentences about volumes that keep the new pods waiting."""
    from kdist.recovery import fetch_held_volumes

    nodes = sorted({each.node for each in found.decisions})
    held = [volume for node in nodes for volume in fetch_held_volumes(target, node)]
    return [volume.explain() for volume in held]
