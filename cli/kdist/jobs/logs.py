"""The logs of all pods of a job as one stream, which goes on through restarts and replaced pods."""

from __future__ import annotations

import heapq
import queue
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from kdist.diagnose import diagnose
from kdist.errors import KdistError, NotFoundError
from kdist.events import Line
from kdist.jobs.agents import Agents
from kdist.jobs.events import Events
from kdist.jobs.snapshot import fetch_snapshot, finalize
from kdist.jobs.wait import too_late
from kdist.status import Pod, Snapshot, read_pod

if TYPE_CHECKING:
    from kdist.cluster import Cluster

LOOK_SECONDS = 1.0  # between two looks at the job while its logs are followed
MOST_STREAMS = 64  # logs that are read at the same time
_WAITING_LINES = 10_000  # lines that wait for a slow reader; then the reading waits


@dataclass(frozen=True)
class LogRequest:
    """Which logs: of the pods that `choose` picks, the last `tail` lines, those of the last `since`
    seconds.
    """

    choose: Callable[[Pod], bool] = lambda _: True
    tail: int | None = None
    since: float | None = None
    previous: bool = False


def read(
    cluster: Cluster,
    seen: Snapshot,
    wanted: LogRequest,
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[Line]:
    """The lines that are there now, over all pods in the order of their times. Raises `KdistError`
    if there is no log at all.
    """
    chosen = [pod for pod in seen.status.pods if wanted.choose(pod)]
    pods = [
        pod for pod in chosen if (pod.before is not None if wanted.previous else has_started(pod))
    ]
    if not pods:
        raise _no_logs(seen, wanted)
    if len(pods) > MOST_STREAMS:
        tell(
            f"the first {MOST_STREAMS} of {len(pods)} pods are shown; choose others with "
            "--rank or --pod"
        )
    streams = [_read_one(cluster, seen.namespace, pod, wanted) for pod in pods[:MOST_STREAMS]]
    yield from heapq.merge(*streams, key=lambda line: line.stamp)


def _no_logs(seen: Snapshot, wanted: LogRequest) -> KdistError:
    cause = diagnose(seen)
    what = (
        "no container of it has been started again"
        if wanted.previous
        else f"there is nothing to read yet: {cause.sentence}"
    )
    return NotFoundError(
        f"{seen.name}: {what}",
        next_command=cause.commands[0] if cause.commands and not wanted.previous else "",
    )


def has_started(pod: Pod) -> bool:
    """Whether its container has run, so that there is a log."""
    return pod.running or pod.ended is not None or pod.before is not None


def _read_one(cluster: Cluster, namespace: str, pod: Pod, wanted: LogRequest) -> Iterator[Line]:
    """Lines of one pod; none if it is gone meanwhile."""
    try:
        for text in cluster.logs(
            pod.name,
            namespace=namespace,
            container=pod.container,
            previous=wanted.previous,
            tail=wanted.tail,
            since=wanted.since,
            timestamps=True,
        ):
            if line := _line(pod, text):
                yield line
    except NotFoundError:
        return


def _line(pod: Pod, text: str) -> Line | None:
    """The line, or None for what the kubelet says itself where a log is gone: that has no time
    before it.
    """
    stamp, _, rest = text.partition(" ")
    return Line(pod, stamp, rest) if stamp[:1].isdigit() else None


@dataclass
class _Reading:
    """What has been read of one pod. `restarts` counts those of its container when the reading
    began.

    `last` is the stamp of the line that came last, which no later reading repeats; `whole` says
    that nothing more comes of this container; `early` that the pod was there at the beginning, so
    that the limits of what is wanted hold for it.
    """

    restarts: int
    last: str = ""
    over: bool = True
    whole: bool = False
    early: bool = False


class Follower:
    """Follows the logs of a job until it has ended. `status` is of the last look."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        wanted: LogRequest,
        *,
        namespace: str | None = None,
        tell: Callable[[str], None] = lambda _: None,
        look_seconds: float = LOOK_SECONDS,
        timeout: float | None = None,
    ) -> None:
        self._cluster = cluster
        self._name = name
        self._namespace = namespace or cluster.namespace
        self._wanted = wanted
        self._tell = tell
        self._look_seconds = look_seconds
        self._timeout = timeout
        self._agents = Agents(cluster, namespace=self._namespace)
        self._events = Events(cluster, self._namespace)
        self._lines: queue.Queue[Line] = queue.Queue(_WAITING_LINES)
        self._readings: dict[str, _Reading] = {}
        self._told = ""
        # nobody follows any more: threads that still read say nothing
        self._ended = threading.Event()
        self.seen: Snapshot | None = None

    def lines(self) -> Generator[Line, None, None]:
        """Lines as they come. Raises `NotFoundError` if there is no such job, `KdistError` if the
        API server stays away, or with code TIMEOUT if the job has not ended after `timeout`
        seconds.
        """
        try:
            yield from self._follow()
        finally:
            self._ended.set()

    def _follow(self) -> Iterator[Line]:
        end = float("inf") if self._timeout is None else time.monotonic() + self._timeout
        yield from self._read_history()
        while True:
            ended = self._look()
            until = min(end, time.monotonic() + self._look_seconds)
            while (left := until - time.monotonic()) > 0 and not (ended and self._is_quiet()):
                try:
                    yield self._lines.get(timeout=min(left, 0.1))
                except queue.Empty:
                    continue
            if ended and self._is_quiet():
                return
            if time.monotonic() >= end:
                raise too_late(self.seen, "done", self._timeout or 0.0)

    def _read_history(self) -> Iterator[Line]:
        """What is there at the beginning, over all pods in the order of its times; the following
        goes on after it.
        """
        self.seen = seen = self._take_snapshot()
        pods = [pod for pod in seen.status.pods if self._wanted.choose(pod) and has_started(pod)]
        if not pods:
            return
        self._readings = {
            pod.name: _Reading(pod.restarts, whole=not pod.running, early=True)
            for pod in pods[:MOST_STREAMS]
        }
        for line in read(self._cluster, seen, self._wanted):
            self._readings[line.pod.name].last = line.stamp
            yield line

    def _take_snapshot(self) -> Snapshot:
        return fetch_snapshot(
            self._cluster, self._name, self._namespace, agents=self._agents, events=self._events
        )

    def _is_quiet(self) -> bool:
        return all(reading.over for reading in self._readings.values()) and self._lines.empty()

    def _look(self) -> bool:
        """See which containers there are and read those that are new; whether the job has ended."""
        try:
            self.seen = seen = self._take_snapshot()
        except NotFoundError:
            if self.seen is None:
                raise
            return True  # it was deleted while we looked on
        finalize(self._cluster, seen)
        for pod in seen.status.pods:
            if self._wanted.choose(pod) and has_started(pod):
                self._take(pod)
        if not self._readings or all(reading.over for reading in self._readings.values()):
            self._say_why(seen)
        return seen.status.phase.terminal and not any(
            pod.running for pod in seen.status.pods if self._wanted.choose(pod)
        )

    def _take(self, pod: Pod) -> None:
        """Read the pod's log unless that is being done, or there is nothing new in it."""
        reading = self._readings.get(pod.name)
        restarted = reading is not None and pod.restarts > reading.restarts
        if reading is not None and (not reading.over or (reading.whole and not restarted)):
            return
        if sum(not each.over for each in self._readings.values()) >= MOST_STREAMS:
            self._say_once(
                f"the logs of {MOST_STREAMS} pods are followed and no more; choose some "
                "with --rank or --pod"
            )
            return
        if reading is not None and pod.restarts > reading.restarts + 1:
            self._tell(
                f"{pod.name} has restarted {pod.restarts - reading.restarts} times at "
                "once: of some there is no log any more"
            )
        fresh = _Reading(pod.restarts, over=False)
        if reading is not None:
            fresh.last, fresh.early = reading.last, reading.early and not restarted
        self._readings[pod.name] = fresh
        known = reading.restarts if reading is not None else 0
        threading.Thread(
            target=self._read, args=(pod, fresh, known), daemon=True, name=f"log {pod.name}"
        ).start()

    def _read(self, pod: Pod, reading: _Reading, known: int) -> None:
        """Put the pod's new lines into the queue, in a thread of its own: of the container that
        ended, then the present one.

        `known` are the restarts up to which its log was read.
        """
        try:
            # Time has passed since the look: another container may have begun.
            self._put_previous(pod, reading, known)
            self._put(pod, reading)
            reading.whole = True
        except NotFoundError:
            reading.whole = True  # the pod is gone, and its log with it
        except (KdistError, OSError) as error:
            not_there_yet = getattr(error, "status", None) == HTTPStatus.BAD_REQUEST
            if not not_there_yet and not self._ended.is_set():
                self._tell(f"the log of {pod.name} cannot be read: {error}; trying again")
        finally:
            reading.over = True

    def _put_previous(self, pod: Pod, reading: _Reading, known: int) -> None:
        """Put what is left of the container that ended, if the present one has been started again
        more than `known` times.
        """
        from kdist.cluster import ApiError

        reading.restarts = read_pod(
            self._cluster.get("v1", "Pod", pod.name, self._namespace)
        ).restarts
        if reading.restarts > known:
            with suppress(ApiError):  # the node keeps the log of one container back, or of none
                self._put(pod, reading, previous=True)

    def _put(self, pod: Pod, reading: _Reading, *, previous: bool = False) -> None:
        known, limited, first = reading.last, reading.early and not reading.last, not previous
        for text in self._cluster.logs(
            pod.name,
            namespace=self._namespace,
            container=pod.container,
            follow=not previous,
            previous=previous,
            timestamps=True,
            since=self._wanted.since if limited else known or None,
            tail=self._wanted.tail if limited else None,
        ):
            line = _line(pod, text)
            if line is not None and line.stamp > known:
                # it may be of a container that was started after the last look at the pod
                if first:
                    first = False
                    with suppress(NotFoundError):
                        self._put_previous(pod, reading, reading.restarts)
                reading.last = line.stamp
                self._lines.put(line)

    def _say_why(self, seen: Snapshot) -> None:
        """While there is nothing to read: why, once for each reason."""
        cause = diagnose(seen)
        if cause.severity != "fine":
            self._say_once(cause.sentence)

    def _say_once(self, sentence: str) -> None:
        if (news := without_times(sentence)) != self._told:
            self._told = news
            self._tell(sentence)


def without_times(sentence: str) -> str:
    """The sentence without its durations, which change while its news does not."""
    return re.sub(r"\d+(:\d\d)+|[\d.]+ (s|ms|µs)\b", "…", sentence)
