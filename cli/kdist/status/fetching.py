"""What the pods of a job fetch by URL before they train, and whether that can succeed."""

from __future__ import annotations

from collections.abc import Sequence

from kdist.status.pods import FetchProgress, Pod
from kdist.units import count


def find_permanent_failure(pods: Sequence[Pod]) -> Pod | None:
    """A pod that its workload keeps starting although what it should fetch cannot be fetched; None
    without one.
    """
    return next(
        (pod for pod in pods if not pod.over and pod.init and pod.init.failed_permanently), None
    )


def explain_permanent_failure(pod: Pod) -> tuple[str, str]:
    """The cause of such a pod's failure, and a sentence about it."""
    record = pod.record
    words = f"it cannot fetch {pod.init.what}" if pod.init else ""
    cause, message = (record.cause, record.message) if record else ("", "")
    return cause or "data", message or words


def describe_fetching(pods: Sequence[Pod]) -> str:
    """What pods fetch now, in a sentence that changes only when that does; empty if none does."""
    fetching = [pod.init for pod in pods if pod.init is not None and pod.fetching]
    if not fetching:
        return ""
    where = f" on {count(len(fetching), 'node')}" if len(pods) > 1 else ""
    return f"fetching {fetching[0].what}{where}"


def find_slowest(pods: Sequence[Pod]) -> FetchProgress | None:
    """The progress of the fetching pod that has most to do; None if no progress is known."""
    known = [pod.init.progress for pod in pods if pod.fetching and pod.init and pod.init.progress]
    return max(known, key=lambda each: (each.total or 0) - each.done, default=None)
