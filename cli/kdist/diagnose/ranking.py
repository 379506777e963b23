"""The ordered table of rules, and the choice of the root cause among several diagnoses.

A cause comes before its consequences: a volume that cannot be mounted before an image that is
pulled slowly, the rank that was killed before the peers that lost it, the pods that cannot be
created before the rendezvous that waits for them. What is wrong and keeps nothing from training now
comes after all that does: a webhook that is away while all pods exist, a ConfigMap that all have
read, a change that the controller does not accept.
"""

from __future__ import annotations

from dataclasses import replace

from kdist.diagnose import (
    admission,
    container_start,
    failures,
    losses,
    runtime,
    scheduling,
)
from kdist.diagnose.rule import Cause, Diagnosis, DiagnosticContext, Rule
from kdist.status import Phase, Snapshot
from kdist.status.job_status import ASKED_TO_START, REFUSED

RULES: tuple[Rule, ...] = (
    admission.find_refusal,
    admission.find_absent_controller,
    runtime.find_success,
    runtime.find_suspended,
    runtime.find_gone,
    losses.find_lost_config_map,
    losses.find_lost_account,
    admission.find_queue,
    admission.find_rejection,
    scheduling.find_claim_trouble,
    container_start.find_mount_trouble,
    container_start.find_config_trouble,
    container_start.find_image_trouble,
    container_start.find_fetch_trouble,
    failures.find_memory_trouble,
    container_start.find_start_trouble,
    losses.find_lost_node,
    runtime.find_refused_pod,
    failures.find_slow_start,
    failures.find_eviction,
    losses.find_lost_pod,
    runtime.find_start_request,
    failures.find_full_disk,
    failures.find_failed_saves,
    failures.find_failure,
    failures.find_crash,
    scheduling.find_unschedulable,
    failures.find_limit,
    admission.find_refused_growth,
    failures.find_machine_faults,
    failures.find_restart,
    failures.find_lost_peers,
    runtime.find_hang,
    container_start.find_fetching,
    runtime.find_rendezvous,
    container_start.find_slow_pull,
    losses.find_unused_config_map,
    runtime.find_warning,
    admission.find_refused_change,
    admission.find_idle_operator,
    runtime.find_no_answer,
    runtime.find_starting,
    runtime.find_refused_connections,
    admission.find_outdated,
    failures.find_earlier_machine_faults,
    losses.find_missing_key,
    scheduling.find_avoided_nodes,
)
"""From root causes to consequences."""

_Causes = tuple[Cause, ...]

_NOTES: _Causes = ("exchange-key-missing", "avoids")
"""They explain no trouble: they come after everything else, also where nothing else was found."""
_ONLY_WHEN_ALONE: _Causes = ("start-requested", "starting", "failed", "operator-absent", "warning")
_FOLLOWS: _Causes = ("peers-lost", "rendezvous", "hang", "collective-timeout", "no-answer")
"""Consequences of a lost pod for the others: not reported in addition to its cause."""
_LOSSES: _Causes = ("node-lost", "pod-lost", "evicted", "pod-refused")
_OF_A_LOSS: _Causes = (*_LOSSES, "signal", "crash", "unknown", "not-known")
"""Not reported in addition to the loss of a pod or a node."""
_AHEAD: _Causes = ("storage", "configmap-gone")
"""What a job that trains must be told first, where it blocks what comes next."""
_OF_A_FETCH: _Causes = ("data", "config", "storage", "unknown", "crash", "fetching")
_OVER: _Causes = ("done", "stopped", "suspended")


def diagnose(seen: Snapshot) -> Diagnosis:
    """The root cause; other causes are in its `also`."""
    ctx = DiagnosticContext(seen)
    found = [diagnosis for rule in RULES if (diagnosis := rule(ctx)) is not None]
    if (
        ctx.status.phase is Phase.RUNNING
        and ctx.status.reason not in ("NoAnswer", REFUSED, ASKED_TO_START)
        and not any(each.cause == "hang" for each in found)
    ):
        # a job that trains is fine; other findings are secondary
        trains = runtime.find_nothing_wrong(ctx)
        has_enough = ctx.status.nodes.ready >= ctx.status.nodes.min  # nodes to train with
        first_loss = bool(found) and found[0].cause in _LOSSES and not has_enough
        unsaved = bool(found) and found[0].cause in _AHEAD and found[0].severity == "blocked"
        if not (first_loss or unsaved) and not (found and trains.severity != "fine"):
            found.insert(0, trains)
    if all(each.cause in _NOTES for each in found):
        found.insert(0, runtime.find_nothing_wrong(ctx))
    first, *others = found
    known = (*_ONLY_WHEN_ALONE, *_FOLLOWS, first.cause)
    further = [each for each in others if each.cause not in known and not _repeats(first, each)]
    also = {each.cause: each for each in reversed(further)}
    return replace(first, also=() if first.cause in _OVER else tuple(reversed(also.values())))


def _repeats(first: Diagnosis, other: Diagnosis) -> bool:
    """Whether both diagnoses describe the same problem."""
    if first.cause in _LOSSES and other.cause in _OF_A_LOSS:
        return True
    if first.cause.startswith("claim-") and other.cause == "unschedulable":
        return "persistentvolumeclaim" in " ".join(other.evidence).lower()
    if first.cause == "fetch":
        return other.cause in _OF_A_FETCH
    return first.cause == "out-of-memory" and other.cause in ("unknown", "signal", "crash")
