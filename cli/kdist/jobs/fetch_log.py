"""Reads from the logs of init containers how far they are that fetch data or weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kdist.errors import KdistError
from kdist.events import Event, parse
from kdist.status import FetchProgress, Pod

if TYPE_CHECKING:
    from kdist.cluster import Cluster

MOST_LOGS = 4
"""Logs that are read for one snapshot: all nodes fetch the same."""
_LINES = 20  # retries may stand between two reports of progress


def choose_pods(pods: Sequence[Pod]) -> list[Pod]:
    """The pods whose progress is to be read."""
    return [pod for pod in pods if pod.fetching and not pod.lost][:MOST_LOGS]


def read_progress(cluster: Cluster, namespace: str, pod: Pod) -> Event | None:
    """The newest event of the pod's init container that tells its progress; None if its log has
    none, or cannot be read.
    """
    if pod.init is None:
        return None
    try:
        lines = list(
            cluster.logs(pod.name, namespace=namespace, container=pod.init.name, tail=_LINES)
        )
    except (KdistError, OSError):
        return None  # it has ended meanwhile, or the user may not read logs
    events = filter(None, map(parse, reversed(lines)))
    return next((event for event in events if FetchProgress.read(event) is not None), None)
