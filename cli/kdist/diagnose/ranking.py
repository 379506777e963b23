"""The ordered table of rules, and the choice of the root cause among several diagnoses.

A cause comes before its consequences: a volume that cannot be mounted before an image that is
pulled slowly, the rank that was killed before the peers that lost it, the pods that cannot be
created before the rendezvous that waits for them.
"""

from __future__ import annotations

from dataclasses import replace

from kdist.diagnose import (
    admission,
    container_start,
    exchange,
    failures,
    fetching,
    resource,
    runtime,
    scheduling,
)
from kdist.diagnose.rule import Diagnosis, DiagnosticContext, Rule
from kdist.status import Phase, Snapshot
from kdist.status.job_status import REFUSED

RULES: tuple[Rule, ...] = (
    resource.find_refusal,
    resource.find_absent_controller,
    runtime.find_success,
    runtime.find_suspended,
    runtime.find_gone,
    runtime.find_lost_account,
    admission.find_queue,
    admission.find_rejection,
    scheduling.find_claim_trouble,
    container_start.find_mount_trouble,
    container_start.find_config_trouble,
    container_start.find_image_trouble,
    fetching.find_fetch_trouble,
    failures.find_memory_trouble,
    container_start.find_start_trouble,
    runtime.find_lost_node,
    failures.find_failure,
    failures.find_crash,
    failures.find_eviction,
    scheduling.find_unschedulable,
    failures.find_limit,
    runtime.find_hang,
    fetching.find_fetching,
    runtime.find_rendezvous,
    container_start.find_slow_pull,
    admission.find_idle_operator,
    runtime.find_no_answer,
    runtime.find_starting,
    runtime.find_refused_connections,
    resource.find_outdated,
    exchange.find_missing_key,
)
"""From root causes to consequences."""

_NOTES = ("exchange-key-missing",)
"""They explain no trouble: they come after everything else, also where nothing else was found."""
_ONLY_WHEN_ALONE = ("starting", "failed", "operator-absent")
_FOLLOWS = ("peers-lost", "rendezvous", "hang", "collective-timeout")
"""Consequences of a lost pod for the others: not reported in addition to its cause."""
_OF_A_FETCH = ("data", "config", "storage", "unknown", "crash", "fetching")
_OVER = ("done", "stopped", "suspended")


def diagnose(seen: Snapshot) -> Diagnosis:
    """The root cause; other causes are in its `also`."""
    ctx = DiagnosticContext(seen)
    found = [diagnosis for rule in RULES if (diagnosis := rule(ctx)) is not None]
    if (
        ctx.status.phase is Phase.RUNNING
        and ctx.status.reason not in ("NoAnswer", REFUSED)
        and not any(each.cause == "hang" for each in found)
    ):
        # a job that trains is fine; other findings are secondary
        found.insert(0, runtime.find_nothing_wrong(ctx))
    if all(each.cause in _NOTES for each in found):
        found.insert(0, runtime.find_nothing_wrong(ctx))
    first, *others = found
    known = (*_ONLY_WHEN_ALONE, *_FOLLOWS, first.cause)
    further = [each for each in others if each.cause not in known and not _repeats(first, each)]
    also = {each.cause: each for each in reversed(further)}
    return replace(first, also=() if first.cause in _OVER else tuple(reversed(also.values())))


def _repeats(first: Diagnosis, other: Diagnosis) -> bool:
    """Whether both diagnoses describe the same problem."""
    if first.cause.startswith("claim-") and other.cause == "unschedulable":
        return "persistentvolumeclaim" in " ".join(other.evidence).lower()
    if first.cause == fetching.FETCH:
        return other.cause in _OF_A_FETCH
    return first.cause == "out-of-memory" and other.cause in ("unknown", "signal", "crash")
