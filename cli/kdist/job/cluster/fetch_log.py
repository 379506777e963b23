"""Reads from the logs of containers how far they are: init containers that fetch data or weights,
and trainings whose agents do not answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING

from kdist.errors import KdistError
from kdist.events import Event, parse
from kdist.status import FetchProgress, Pod

if TYPE_CHECKING:
    from kdist.cluster import Cluster

MOST_LOGS = 4
"""Logs that are read for one snapshot: all nodes fetch the same."""
_LINES = 50  # others may stand between two reports of progress
PROGRESS = "progress"


Reading = Future[Event | None]


def start_reading(
    pool: Executor, cluster: Cluster, namespace: str, pods: Sequence[Pod]
) -> dict[str, Reading]:
    """Start to read the newest event of each pod that fetches, by pod."""
    fetching = [pod for pod in pods if pod.fetching and not pod.lost][:MOST_LOGS]
    return {pod.name: pool.submit(_read_progress, cluster, namespace, pod) for pod in fetching}


def collect(readings: Mapping[str, Reading]) -> dict[str, Event]:
    """Wait for the events, by pod; without those that cannot be read."""
    found = {pod: reading.result() for pod, reading in readings.items()}
    return {pod: event for pod, event in found.items() if event is not None}


def _read_progress(cluster: Cluster, namespace: str, pod: Pod) -> Event | None:
    """The newest event of the pod's init container that tells its progress; None if its log has
    none, or cannot be read.
    """
    if pod.init is None:
        return None
    events = _read_events(cluster, namespace, pod.name, pod.init.name)
    return next((event for event in events if FetchProgress.read(event) is not None), None)


def read_training(cluster: Cluster, namespace: str, pods: Sequence[Pod]) -> Event:
    """The newest event by which rank 0 tells its progress; empty if no log that is read has one."""
    running = [pod for pod in pods if pod.running and not pod.lost][:MOST_LOGS]
    found = (
        event
        for pod in running
        for event in _read_events(cluster, namespace, pod.name, pod.container)
        if event.get("event") == PROGRESS
    )
    return next(found, {})


def _read_events(cluster: Cluster, namespace: str, pod: str, container: str) -> Iterator[Event]:
    """The last events of a container, the newest first."""
    try:
        lines = list(cluster.logs(pod, namespace=namespace, container=container, tail=_LINES))
    except (KdistError, OSError):
        return  # it has ended meanwhile, or the user may not read logs
    yield from filter(None, map(parse, reversed(lines)))
