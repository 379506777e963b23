"""The table of causes, and which of several is the one that matters.

A cause stands before its consequences: a volume that cannot be mounted before the image that is
slow to come, the rank that was killed before the peers that lost it, the pods that cannot be made
before the rendezvous that waits for them.
"""

from __future__ import annotations

from dataclasses import replace

from kdist.diagnose import admission, container_start, failures, runtime, scheduling
from kdist.diagnose.rule import Diagnosis, DiagnosticContext, Rule
from kdist.status import Phase, Snapshot

RULES: tuple[Rule, ...] = (
    runtime.find_success,
    runtime.find_rest,
    runtime.find_gone,
    admission.find_queue,
    admission.find_refusal,
    scheduling.find_claim_trouble,
    container_start.find_mount_trouble,
    container_start.find_config_trouble,
    container_start.find_image_trouble,
    failures.find_memory_trouble,
    container_start.find_start_trouble,
    runtime.find_lost_node,
    failures.find_failure,
    failures.find_crash,
    failures.find_eviction,
    scheduling.find_unschedulable,
    failures.find_limit,
    runtime.find_hang,
    runtime.find_rendezvous,
    container_start.find_slow_pull,
    admission.find_idle_operator,
    runtime.find_no_answer,
    runtime.find_on_its_way,
)
"""From the cause that explains most to the one that explains least."""

_ONLY_WHEN_ALONE = ("starting", "failed", "operator-absent")
_FOLLOWS = ("peers-lost", "rendezvous", "hang", "collective-timeout")
"""What happens to the other pods when one is lost: no news beside the reason for which it was."""
_OVER = ("done", "stopped", "suspended")


def diagnose(seen: Snapshot) -> Diagnosis:
    """The one cause that matters; the others that were found are in its `also`."""
    case = DiagnosticContext(seen)
    found = [diagnosis for rule in RULES if (diagnosis := rule(case)) is not None]
    if (
        case.status.phase is Phase.RUNNING
        and case.status.reason != "NoAnswer"
        and not any(each.cause == "hang" for each in found)
    ):
        # what limps beside a job that trains is worth a word, no more
        found.insert(0, runtime.find_nothing_wrong(case))
    if not found:
        found = [runtime.find_nothing_wrong(case)]
    first, *others = found
    known = (*_ONLY_WHEN_ALONE, *_FOLLOWS, first.cause)
    news = [each for each in others if each.cause not in known and not _repeats(first, each)]
    also = {each.cause: each for each in reversed(news)}
    return replace(first, also=() if first.cause in _OVER else tuple(reversed(also.values())))


def _repeats(first: Diagnosis, other: Diagnosis) -> bool:
    """Whether it is the same trouble, seen from another side."""
    if first.cause.startswith("claim-") and other.cause == "unschedulable":
        return "persistentvolumeclaim" in " ".join(other.evidence).lower()
    return first.cause == "out-of-memory" and other.cause in ("unknown", "signal", "crash")
