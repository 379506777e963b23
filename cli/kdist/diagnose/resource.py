"""Causes that only the TrainingJob of a job shows: the controller does not accept it, does not act
on it, or waits for a restart.
"""

from __future__ import annotations

from kdist.diagnose.rule import Diagnosis, DiagnosticContext, clip
from kdist.status import CONTROLLER_FIX


def find_refusal(ctx: DiagnosticContext) -> Diagnosis | None:
    """The controller does not accept the TrainingJob as it is, and nothing of it runs."""
    return None if _has_objects(ctx) else _diagnose_refusal(ctx)


def find_refused_change(ctx: DiagnosticContext) -> Diagnosis | None:
    """The controller does not accept a change of the TrainingJob: what runs is as it was before."""
    return _diagnose_refusal(ctx) if _has_objects(ctx) else None


def _has_objects(ctx: DiagnosticContext) -> bool:
    return bool(ctx.pods) or ctx.seen.workload is not None


def _diagnose_refusal(ctx: DiagnosticContext) -> Diagnosis | None:
    state = ctx.status.resource
    if state is None or not state.refusal:
        return None
    return Diagnosis(
        "not-accepted",
        f"TrainingJob {ctx.name} is not accepted: {clip(state.refusal)}",
        evidence=(f"trainingjob/{ctx.name}: generation {state.generation}: Accepted is False",),
        fix="change the job file, and apply it again; what runs stays as it was",
        commands=("kdist apply job.yaml", ctx.kubectl("describe", "trainingjob", ctx.name)),
    )


def find_absent_controller(ctx: DiagnosticContext) -> Diagnosis | None:
    """No controller has ever acted on the TrainingJob."""
    if ctx.status.reason != "NoController":
        return None
    return Diagnosis(
        "controller-absent",
        f"no controller acts on TrainingJob {ctx.name}, so its objects do not exist",
        evidence=(f"trainingjob/{ctx.name}: no status",),
        fix=CONTROLLER_FIX,
        commands=(
            f"kdist doctor -n {ctx.namespace}",
            ctx.kubectl("get", "trainingjob", ctx.name, "-o", "yaml"),
        ),
    )


def find_outdated(ctx: DiagnosticContext) -> Diagnosis | None:
    """The TrainingJob has changes that take effect with the next restart."""
    state = ctx.status.resource
    if state is None or not state.outdated or ctx.status.phase.terminal:
        return None
    return Diagnosis(
        "outdated",
        f"changes of {ctx.name} wait for a restart: {clip(state.outdated)}",
        "waiting",
        evidence=(f"trainingjob/{ctx.name}: Outdated is True",),
        fix="restart the job; it saves first, and continues from there",
        commands=(ctx.kdist("restart"),),
    )
