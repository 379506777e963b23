"""Builds the goodput report of a run in the cluster from its history: its ledger, the intervals in
which it was meant to run, and the startup times of its pods.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from kdist.errors import NotFoundError
from kdist.job.cluster import checkpoints
from kdist.job.cluster.applied import AppliedJob
from kdist.job.job import Notify
from kdist.manifest import COMMIT
from kdist.report.goodput import PodStartup, build_goodput_report
from kdist.status import FETCHER, OUTCOME, ExitRecord, NonfiniteLoss, read_pod
from kdist.status.documents import annotation, condition, items, moment, name, text

_PULLED = re.compile(r"Successfully pulled image .* in (?:(\d+)m)?([\d.]+)(ms|s)\b")

Interval = tuple[float, float | None]
"""(start, end) in unix seconds; the end is None while it lasts."""


def read_report(target: AppliedJob, *, notify: Notify) -> dict[str, Any]:
    """The goodput report of the job's run, with what its pods have told of a loss that is not
    finite, the commit of the last apply, and the digests of the images that the pods run. Raises
    `KdistError` if its ledger cannot be read.
    """
    ledger = checkpoints.run_tool(target, "ledger", notify=notify)
    events = [one for one in ledger.get("events", ()) if isinstance(one, dict)]
    if not events:
        raise NotFoundError(
            f"{target.name} has written no ledger yet", next_command=target.command("status")
        )
    pods = target.cluster.list("v1", "Pod", selector=target.backend.pod_selector(target.name))
    pod_events = target.cluster.list("v1", "Event")
    startups = [_read_startup(pod, pod_events) for pod in pods]
    created = moment(target.config_map, "metadata", "creationTimestamp") or time.time()
    workload = None
    with suppress(NotFoundError):
        workload = target.workload()
    created_pods = [startup.created for startup in startups]
    report = build_goodput_report(
        events,
        list(ledger.get("steps", ())),
        active=list(active_intervals(events, created, _find_end(target, workload), created_pods)),
        startups=startups,
        # no pod holds anything in memory, and the run is not known to be done
        unsaved=all(read_pod(pod).over for pod in pods)
        and (workload is None or target.backend.read(workload).finished != "succeeded"),
    )
    loss = find_nonfinite_loss(pods, workload)
    applied = target.resource() if target.is_resource else target.config_map
    return {
        **report,
        "nonFiniteLoss": None if loss is None else loss.to_document(),
        "appliedCommit": annotation(applied, COMMIT),
        "images": list_images(pods, target.backend.container),
    }


def list_images(pods: Iterable[Mapping[str, Any]], container: str) -> list[str]:
    """The images of this container of the pods, with their digests as the kubelet names them."""
    statuses = (each for pod in pods for each in items(pod, "status", "containerStatuses"))
    found = (text(each, "imageID") for each in statuses if text(each, "name") == container)
    return sorted({each for each in found if each})


def find_nonfinite_loss(
    pods: Sequence[Mapping[str, Any]], workload: Mapping[str, Any] | None
) -> NonfiniteLoss | None:
    """What the exit records of the pods, and the kept one, report of a script's loss."""
    kept = ExitRecord.parse(annotation(workload or {}, OUTCOME))
    records = (kept, *(read_pod(pod).record for pod in pods))
    return NonfiniteLoss.merge(each.nonfinite_loss for each in records if each is not None)


def active_intervals(
    events: Sequence[Mapping[str, Any]],
    created: float,
    ended: float | None,
    created_pods: Sequence[float],
) -> Iterator[Interval]:
    """Yield the intervals in which the job was meant to run: from its creation to its end, None
    while it runs, without the times between a stop and a resume. All times are unix seconds. A
    resume starts with the first pod created after the stop, otherwise with its generation.
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
                since = min(
                    (time for time in created_pods if stopped < time <= at), default=float(at)
                )
            stopped = None
    yield since, stopped if stopped is not None else ended


def _find_end(target: AppliedJob, workload: Mapping[str, Any] | None) -> float | None:
    """When the workload ended, in unix seconds: now if it has not. None if unknown, so that the
    report ends with the last event.
    """
    if workload is None:
        return None
    ends = [
        moment(condition(workload, kind), "lastTransitionTime")
        for kind in ("Complete", "Completed", "Succeeded", "Failed")
    ]
    latest = None if target.backend.read(workload).finished else time.time()
    return next((end for end in ends if end is not None), latest)


def _read_startup(pod: Mapping[str, Any], pod_events: Sequence[Mapping[str, Any]]) -> PodStartup:
    started = None
    for status in items(pod, "status", "containerStatuses"):
        started = moment(status, "state", "running", "startedAt") or moment(
            status, "state", "terminated", "startedAt"
        )
    pulls = [
        pull_seconds(text(event, "message"))
        for event in pod_events
        if text(event, "involvedObject", "name") == name(pod) and text(event, "reason") == "Pulled"
    ]
    scheduled = moment(condition(pod, "PodScheduled"), "lastTransitionTime")
    ends = [
        moment(status, "state", "terminated", "finishedAt")
        for status in items(pod, "status", "initContainerStatuses")
        if text(status, "name").startswith(FETCHER)
    ]
    return PodStartup(
        moment(pod, "metadata", "creationTimestamp") or 0.0,
        scheduled,
        started,
        max(pulls, default=0.0),
        max((end for end in ends if end is not None), default=None),
    )


def pull_seconds(message: str) -> float:
    """Seconds of an image pull, from the kubelet's event message; 0 if the image was present."""
    found = _PULLED.search(message)
    if found is None:
        return 0.0
    number = float(found[2]) / (1000 if found[3] == "ms" else 1)
    return int(found[1] or 0) * 60 + number
