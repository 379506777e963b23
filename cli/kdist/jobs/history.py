"""What the receipt of a run in the cluster needs: its ledger, when somebody kept it going, and how
its pods came to life.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kdist.errors import NotFoundError
from kdist.jobs import checkpoints
from kdist.jobs.job import ClusterJob
from kdist.jobs.wait import Tell
from kdist.status.documents import condition, items, moment, name, text

_PULLED = re.compile(r"Successfully pulled image .* in (?:(\d+)m)?([\d.]+)(ms|s)\b")

Life = tuple[float, float | None]


@dataclass(frozen=True)
class History:
    """Ledger, lives and births, in the words of `report.receipt`; a birth is (created, scheduled,
    started, pull seconds).
    """

    events: Sequence[Mapping[str, Any]]
    steps: Sequence[Mapping[str, Any]]
    lives: list[Life]
    births: list[tuple[float, float | None, float | None, float]]


def read(target: ClusterJob, *, tell: Tell) -> History:
    """The run's history. Raises `KdistError` where nobody can read its ledger."""
    ledger = checkpoints.ask(target, "ledger", tell=tell)
    events = [one for one in ledger.get("events", ()) if isinstance(one, dict)]
    pods = target.cluster.list("v1", "Pod", selector=target.backend.pod_selector(target.name))
    happened = target.cluster.list("v1", "Event")
    births = [_birth(pod, happened) for pod in pods]
    created = moment(target.config_map, "metadata", "creationTimestamp") or time.time()
    born = [birth[0] for birth in births]
    return History(
        events,
        list(ledger.get("steps", ())),
        list(lives(events, created, _end(target), born)),
        births,
    )


def lives(
    events: Sequence[Mapping[str, Any]], created: float, ended: float | None, born: Sequence[float]
) -> Iterator[Life]:
    """The times between which the job was meant to run: from its creation to its end, less what lay
    between stop and resume.

    A resume is taken to begin with the first pod that was born (`born`, unix times) after the stop,
    else with its generation.
    """
    since, stopped = created, None
    for event in events:
        at = event.get("time")
        if not isinstance(at, int | float):
            continue
        if event.get("event") == "stopped":
            stopped = float(at)
        elif event.get("event") == "generation" and stopped is not None:
            if event.get("reason") == "resume":
                yield since, stopped
                since = min((time for time in born if stopped < time <= at), default=float(at))
            stopped = None
    yield since, stopped if stopped is not None else ended


def _end(target: ClusterJob) -> float | None:
    """When the workload ended; None while it has not, so that the report counts up to what was
    heard last.
    """
    try:
        workload = target.workload()
    except NotFoundError:
        return None
    ends = [
        moment(condition(workload, kind), "lastTransitionTime")
        for kind in ("Complete", "Completed", "Succeeded", "Failed")
    ]
    return next(
        (end for end in ends if end is not None),
        time.time() if not target.backend.read(workload).finished else None,
    )


def _birth(
    pod: Mapping[str, Any], happened: Sequence[Mapping[str, Any]]
) -> tuple[float, float | None, float | None, float]:
    started = None
    for status in items(pod, "status", "containerStatuses"):
        started = moment(status, "state", "running", "startedAt") or moment(
            status, "state", "terminated", "startedAt"
        )
    pulls = [
        pull_seconds(text(event, "message"))
        for event in happened
        if text(event, "involvedObject", "name") == name(pod) and text(event, "reason") == "Pulled"
    ]
    scheduled = moment(condition(pod, "PodScheduled"), "lastTransitionTime")
    return (
        moment(pod, "metadata", "creationTimestamp") or 0.0,
        scheduled,
        started,
        max(pulls, default=0.0),
    )


def pull_seconds(message: str) -> float:
    """Seconds in the kubelet's words on a pull; 0 for an image that was there already."""
    found = _PULLED.search(message)
    if found is None:
        return 0.0
    number = float(found[2]) / (1000 if found[3] == "ms" else 1)
    return int(found[1] or 0) * 60 + number
