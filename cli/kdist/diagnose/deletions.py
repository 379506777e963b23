"""Objects of a job that were deleted while its pods run: its ConfigMaps, its service account, and
what lets its agents use the rendezvous.
"""

from __future__ import annotations

from typing import Final

from kdist.diagnose.rule import Diagnosis, DiagnosticContext
from kdist.manifest import name_rendezvous
from kdist.status import documents
from kdist.units import count


def find_lost_account(ctx: DiagnosticContext) -> Diagnosis | None:
    """The service account was deleted while the pods run: the tokens that they have are no longer
    valid, even if another account has its name.
    """
    if ctx.status.phase.terminal:
        return None
    # what one that ends was made from may be gone with the job that it belongs to
    stays = {pod.name for pod in ctx.pods if not pod.over and not pod.deleting}
    refused = [
        pod for pod, report in ctx.seen.reports.items() if pod in stays and _is_refused(ctx, report)
    ]
    for pod in ctx.seen.pods:
        if documents.name(pod) not in stays:
            continue
        name = documents.text(pod, "spec", "serviceAccountName")
        account = ctx.seen.accounts.get(name)
        volumes = documents.items(pod, "spec", "volumes")
        if account is None or all(documents.text(each, "name") != "token" for each in volumes):
            continue
        made = documents.moment(account, "metadata", "creationTimestamp")
        began = documents.moment(pod, "metadata", "creationTimestamp")
        if account and not (made and began and made > began):
            continue
        what = "was deleted and made again" if account else "does not exist"
        again = "" if account else "`kdist apply` with the job file creates it again, then "
        return Diagnosis(
            "account-gone",
            f"service account {name} {what} while pod {documents.name(pod)} exists: the API server "
            "refuses its token, so its agent cannot meet the others, nor report the end",
            "blocked",
            (f"serviceaccount/{name}: {what}",),
            f"{again}`{ctx.kdist('restart')}` gives all pods new tokens; {ctx.continuation}",
            (ctx.kdist("restart"),),
        )
    if not refused:
        return None
    told = [documents.text(ctx.seen.reports[pod], "rendezvous_refusal") for pod in refused]
    why, fix = _REFUSALS.get(next(filter(None, told), "")[:3], _REFUSALS[""])
    return Diagnosis(
        "account-gone",
        f"the API server refuses the agents of {count(len(refused), 'pod')} the rendezvous that it "
        f"has served before: {why}; they train on to the end, and could not restart after a "
        "failure",
        "waiting",
        tuple(
            f"pod/{pod}: {how or 'rendezvous_refused'}"
            for pod, how in list(zip(refused, told, strict=True))[:8]
        ),
        fix.format(restart=ctx.kdist("restart")),
    )


_APPLY = "`kdist apply` with the job file creates {} again"
_REFUSALS: Final = {
    "401": (
        "it does not accept their token (401): their ServiceAccount was deleted or made again, or "
        "the token has expired",
        f"{_APPLY.format('the ServiceAccount')}, then `{{restart}}` gives all pods new tokens",
    ),
    "403": (
        "their right to its ConfigMap is gone (403): the Role or the RoleBinding of the job",
        _APPLY.format("them"),
    ),
    "404": ("its ConfigMap was deleted (404)", _APPLY.format("it")),
    "": (
        "their ServiceAccount, its Role or its RoleBinding is gone or has changed",
        _APPLY.format("them"),
    ),
}
"""What a refusal means, and the fix, by the status that the API server answers with."""


def find_lost_config_map(ctx: DiagnosticContext) -> Diagnosis | None:
    """The ConfigMap that holds the job was deleted, and a pod waits for it, or all train."""
    return None if _stands_by(ctx) else _diagnose_lost_config_map(ctx)


def find_unused_config_map(ctx: DiagnosticContext) -> Diagnosis | None:
    """The same where all pods have started with it, and something else keeps the job from
    training.
    """
    return _diagnose_lost_config_map(ctx) if _stands_by(ctx) else None


def _stands_by(ctx: DiagnosticContext) -> bool:
    """Whether nothing that the job does not do now is for lack of its ConfigMap."""
    alive = [pod for pod in ctx.pods if not pod.over and not pod.deleting]
    is_missing = len(alive) < ctx.status.nodes.min
    return ctx.stuck and not is_missing and all(pod.has_run for pod in alive)


def _diagnose_lost_config_map(ctx: DiagnosticContext) -> Diagnosis | None:
    alive = [pod for pod in ctx.pods if not pod.over and not pod.deleting]
    if ctx.seen.config_map or not alive or ctx.status.location == "local":
        return None
    evidence = [f"pod/{pod.name}: {pod.state}" for pod in alive[:4]]
    working = sum(pod.working for pod in alive)
    goes_on = (
        f"{count(working, 'pod')} of the job {'runs' if working == 1 else 'run'} on with what "
        f"{'it has' if working == 1 else 'they have'} read, and a new pod cannot start"
    )
    if not working:
        goes_on = f"{count(len(alive), 'new pod')} of the job cannot start without it"
    return Diagnosis(
        "configmap-gone",
        f"ConfigMap {ctx.name} does not exist in namespace {ctx.namespace}, it was deleted: "
        f"{goes_on}",
        "blocked",
        (f"configmap/{ctx.name}: not found", *evidence),
        "`kdist apply` with the job file creates it again; nothing is lost",
        ("kdist apply JOB.yaml" + (f" -n {ctx.namespace}" if ctx.namespace else ""),),
    )


def _is_refused(ctx: DiagnosticContext, report: object) -> bool:
    """Whether the API server refuses the agent something that is still not there: it asks again
    only a moment after its ConfigMap has come back.
    """
    told = documents.text(report, "rendezvous_refusal")
    back = told.startswith("404") and name_rendezvous(ctx.name) in ctx.seen.config_maps
    return documents.at(report, "rendezvous_refused") is True and not back
