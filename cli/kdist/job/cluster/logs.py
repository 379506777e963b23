"""The logs of a job in the cluster: those of all pods as one stream, which goes on through restarts
and replaced pods, with a selection of lines by rank; and those that its agents keep next to the
checkpoints, where they outlive the pods. The kept ones are read as checkpoints are: by the
trainer's tool, in a running pod of the job or in a helper pod.
"""

from __future__ import annotations

import heapq
import queue
import re
import threading
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, BinaryIO, Final

from kdist.diagnose import diagnose
from kdist.errors import KdistError, NotFoundError, UsageError
from kdist.events import RANK_PREFIX, Entry, Event, ParsedLine, read_files, split_line
from kdist.job.cluster import checkpoints
from kdist.job.cluster.agents import Agents
from kdist.job.cluster.applied import AppliedJob
from kdist.job.cluster.checkpoints import reading_pod
from kdist.job.cluster.snapshot import Events, fetch_snapshot, finalize
from kdist.job.cluster.wait import timeout_error
from kdist.job.job import FAILED, LogSelection, Notify
from kdist.status import JobStatus, Phase, Pod, Snapshot, documents, read_pod
from kdist.status.documents import Document, integer, items, texts
from kdist.threads import OnError, start_thread

if TYPE_CHECKING:
    from kdist.cluster import Cluster
    from kdist.job.cluster.job import ClusterJob
    from kdist.job.job import LogLine


@dataclass(frozen=True)
class PodLine:
    """One line that a container wrote.

    Attributes:
        pod: the pod of the container.
        stamp: time of the line as the kubelet writes it; stamps compare as text.
        text: the line without its stamp and newline.
    """

    pod: Pod
    stamp: str
    text: str

    @cached_property
    def _parsed(self) -> ParsedLine:
        return split_line(self.text)

    @property
    def event(self) -> Event | None:
        """The trainer's event in the line; None if it holds none."""
        return self._parsed.event

    @property
    def printed(self) -> str:
        """The printed text, without the event and without what a progress bar has overwritten."""
        return self._parsed.printed

    @property
    def source(self) -> str:
        """The pod's name without the random suffix that a Job adds: `digits-0`."""
        index = self.pod.index
        head, _, suffix = self.pod.name.rpartition("-")
        has_suffix = index is not None and head.endswith(f"-{index}") and len(suffix) == 5
        return head if has_suffix else self.pod.name


class RankFilter:
    """Selects the lines of some ranks: events that name their rank, and prints, which the agent
    prefixes with `[rank3]: `.

    A line without a rank is selected if its pod runs one of the ranks. Which pod runs which ranks
    is learned from the agents' own events.

    Args:
        wanted: the ranks to select.
        known: ranks of each pod, as far as known before the first line.
    """

    def __init__(self, wanted: Collection[int], known: Mapping[str, Collection[int]]) -> None:
        self._wanted = frozenset(wanted)
        self._ranks_of_pod: dict[str, set[int]] = {pod: set(ranks) for pod, ranks in known.items()}

    def matches(self, line: PodLine) -> bool:
        """Whether the line belongs to a selected rank. Pass the lines of one pod in their order."""
        event = line.event
        prefix = RANK_PREFIX.match(line.text)
        rank = event.get("rank") if event else int(prefix[2]) if prefix else None
        if event and event["event"] == "rendezvous-completed":
            self._ranks_of_pod[line.pod.name] = set()
        if isinstance(rank, int):
            if event and event["event"] == "worker-started":
                self._ranks_of_pod.setdefault(line.pod.name, set()).add(rank)
            return rank in self._wanted
        return bool(self._wanted & self._ranks_of_pod.get(line.pod.name, set()))


POLL_SECONDS = 1.0  # between two snapshots of the job while its logs are followed
MOST_STREAMS = 64  # logs that are read at the same time
_WAITING_LINES = 10_000  # lines that wait for a slow reader; then the reading waits


def _choose(pods: Iterable[Pod], request: LogSelection) -> list[Pod]:
    """The pods that are asked for."""
    return [pod for pod in pods if request.pod is None or _matches(pod, request.pod)]


def _matches(pod: Pod, name_or_index: str) -> bool:
    return pod.name == name_or_index.removeprefix("pod/") or (
        name_or_index.isdecimal() and pod.index == int(name_or_index)
    )


def _has_log(pod: Pod, request: LogSelection) -> bool:
    """Whether the pod may have a log that is asked for. Whether an init container has run, its log
    alone tells.
    """
    if request.container is not None:
        return pod.scheduled
    restarted = pod.before is not None
    return restarted if request.previous else restarted or pod.running or pod.ended is not None


def read(
    cluster: Cluster,
    snapshot: Snapshot,
    request: LogSelection,
    *,
    notify: Notify = lambda _: None,
) -> Iterator[PodLine]:
    """Yield the lines that exist now, of all pods in the order of their times; `notify` hears if
    not all pods can be shown. Raises `NotFoundError` if there is no log yet.
    """
    specs = [documents.mapping(pod, "spec") for pod in snapshot.pods]
    names = [
        documents.text(each, "name")
        for spec in specs
        for kind in ("initContainers", "containers")
        for each in documents.items(spec, kind)
    ]
    if request.container is not None and specs and request.container not in names:
        raise UsageError(
            f"the pods of {snapshot.name} have no container `{request.container}`",
            hint=f"their containers: {', '.join(dict.fromkeys(names))}",
        )
    chosen = _choose(snapshot.status.pods, request)
    pods = [pod for pod in chosen if _has_log(pod, request)]
    if not pods:
        if request.previous:
            raise NotFoundError(f"{snapshot.name}: no container has been restarted")
        cause = diagnose(snapshot)
        what = f"{snapshot.name}: there is nothing to read yet: {cause.sentence}"
        raise NotFoundError(what, next_command=next(iter(cause.commands), ""))
    if len(pods) > MOST_STREAMS:
        notify(
            f"the first {MOST_STREAMS} of {len(pods)} pods are shown; choose others with "
            "--rank or --pod"
        )
    streams = [_read_one(cluster, snapshot.namespace, pod, request) for pod in pods[:MOST_STREAMS]]
    yield from heapq.merge(*streams, key=lambda line: line.stamp)


def _read_one(
    cluster: Cluster, namespace: str, pod: Pod, request: LogSelection
) -> Iterator[PodLine]:
    """Lines of one pod; none if it has been deleted in the meantime, or the container has not run
    yet that is asked for.
    """
    from kdist.cluster import ApiError

    try:
        for text in cluster.logs(
            pod.name,
            namespace=namespace,
            container=request.container or pod.container,
            previous=request.previous,
            tail=request.tail,
            since=request.since,
            timestamps=True,
        ):
            if line := _line(pod, text):
                yield line
    except NotFoundError:
        return
    except ApiError as error:
        if request.container is None or error.status != HTTPStatus.BAD_REQUEST:
            raise


def _line(pod: Pod, text: str) -> PodLine | None:
    """The line; None for the kubelet's own message about a missing log, which has no timestamp."""
    stamp, _, rest = text.partition(" ")
    return PodLine(pod, stamp, rest) if stamp[:1].isdigit() else None


@dataclass
class _Reading:
    """Progress of reading one pod's log.

    Attributes:
        restarts: of the container when the reading started.
        last: timestamp of the last line, where a later reading continues.
        ended: whether its thread has ended.
        complete: whether the container's log has been read to its end.
        initial: whether the pod existed at the start, so that `tail` and `since` apply to it.
    """

    restarts: int
    last: str = ""
    ended: bool = True
    complete: bool = False
    initial: bool = False


class Follower:
    """Follows the logs of a job until it has ended; `snapshot` is the job's latest snapshot, None
    before the first.

    Args:
        cluster: the cluster.
        name: of the job.
        request: which logs, and how long to follow them.
        notify: receives messages, such as why there is nothing to read yet.
        interval: seconds between two snapshots of the job.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        request: LogSelection,
        *,
        notify: Notify = lambda _: None,
        interval: float = POLL_SECONDS,
    ) -> None:
        self._cluster = cluster
        self._name = name
        self._namespace = cluster.namespace
        self._request = request
        self._notify = notify
        self._interval = interval
        self._agents = Agents(cluster, namespace=self._namespace)
        self._events = Events(cluster, self._namespace)
        self._lines: queue.Queue[PodLine] = queue.Queue(_WAITING_LINES)
        self._readings: dict[str, _Reading] = {}
        self._reported = ""
        # set when nobody follows any more, so that threads report no more errors
        self._closed = threading.Event()
        self.snapshot: Snapshot | None = None

    def lines(self) -> Generator[PodLine, None, None]:
        """Lines as they come. Raises `NotFoundError` if there is no such job, `KdistError` if the
        API server stays away, or with code TIMEOUT if the job has not ended after `timeout`
        seconds.
        """
        try:
            yield from self._follow()
        finally:
            self._closed.set()

    def _follow(self) -> Iterator[PodLine]:
        timeout = self._request.timeout
        end = float("inf") if timeout is None else time.monotonic() + timeout
        yield from self._read_history()
        while True:
            ended = self._poll()
            until = min(end, time.monotonic() + self._interval)
            while (left := until - time.monotonic()) > 0 and not (ended and self._is_quiet()):
                try:
                    yield self._lines.get(timeout=min(left, 0.1))
                except queue.Empty:
                    continue
            if ended and self._is_quiet():
                return
            if time.monotonic() >= end:
                raise timeout_error(self.snapshot, "done", timeout or 0.0)

    def _read_history(self) -> Iterator[PodLine]:
        """Yield the lines that exist at the start, in the order of their times over all pods."""
        self.snapshot = snapshot = self._take_snapshot()
        chosen = _choose(snapshot.status.pods, self._request)
        pods = [pod for pod in chosen if _has_log(pod, self._request)]
        if not pods:
            return
        named = self._request.container is not None  # whether that one has ended is not known yet
        self._readings = {
            pod.name: _Reading(pod.restarts, complete=not (pod.running or named), initial=True)
            for pod in pods[:MOST_STREAMS]
        }
        try:
            for line in read(self._cluster, snapshot, self._request):
                self._readings[line.pod.name].last = line.stamp
                yield line
        except ConnectionError as error:
            self._notify(f"the log cannot be read: {error}; trying again")
            for reading in self._readings.values():
                reading.complete = False

    def _take_snapshot(self) -> Snapshot:
        return fetch_snapshot(
            self._cluster, self._name, self._namespace, agents=self._agents, events=self._events
        )

    def _is_quiet(self) -> bool:
        return all(reading.ended for reading in self._readings.values()) and self._lines.empty()

    def _poll(self) -> bool:
        """Start to read new containers; returns whether the job has ended."""
        try:
            self.snapshot = snapshot = self._take_snapshot()
        except NotFoundError:
            if self.snapshot is None:
                raise
            return True  # the job was deleted
        finalize(self._cluster, snapshot)
        chosen = _choose(snapshot.status.pods, self._request)
        for pod in chosen:
            if _has_log(pod, self._request):
                self._start_reading(pod)
        if not self._readings or all(reading.ended for reading in self._readings.values()):
            cause = diagnose(snapshot)
            if cause.severity != "fine":
                self._notify_once(cause.sentence)
        if self._request.container is not None and chosen and self._has_read(chosen):
            return True
        return snapshot.status.phase.terminal and not any(pod.running for pod in chosen)

    def _has_read(self, pods: Sequence[Pod]) -> bool:
        """Whether the log of the container that is asked for was read to its end in all pods."""
        readings = [self._readings.get(pod.name) for pod in pods]
        return all(reading is not None and reading.complete for reading in readings)

    def _start_reading(self, pod: Pod) -> None:
        """Start to read the pod's log, unless it is being read or contains nothing new."""
        reading = self._readings.get(pod.name)
        restarted = reading is not None and pod.restarts > reading.restarts
        if reading is not None and (not reading.ended or (reading.complete and not restarted)):
            return
        if sum(not each.ended for each in self._readings.values()) >= MOST_STREAMS:
            self._notify_once(
                f"only the logs of {MOST_STREAMS} pods are followed; choose others with --rank or "
                "--pod"
            )
            return
        if reading is not None and pod.restarts > reading.restarts + 1:
            self._notify(
                f"{pod.name} has restarted {pod.restarts - reading.restarts} times at "
                "once: the logs of some instances are lost"
            )
        fresh = _Reading(pod.restarts, ended=False)
        if reading is not None:
            fresh.last = reading.last
            fresh.initial = reading.initial and not restarted
        self._readings[pod.name] = fresh
        run = partial(self._read, pod, fresh, 0 if reading is None else reading.restarts)
        start_thread(run, name=f"log {pod.name}", on_error=OnError.REPORT)  # `_poll` retries it

    def _read(self, pod: Pod, reading: _Reading, known: int) -> None:
        """Put the pod's new lines into the queue: of the previous container instance, then of the
        current one. Runs in a thread of its own. The log has been read up to the restart `known`.
        """
        try:
            # Another container may have started since the last snapshot.
            self._put_previous(pod, reading, known)
            self._put(pod, reading)
            reading.complete = True
        except NotFoundError:
            reading.complete = True  # the pod was deleted, and its log with it
        except (KdistError, OSError) as error:
            not_ready = getattr(error, "status", None) == HTTPStatus.BAD_REQUEST
            if not not_ready and not self._closed.is_set():
                self._notify(f"the log of {pod.name} cannot be read: {error}; trying again")
        finally:
            reading.ended = True

    def _put_previous(self, pod: Pod, reading: _Reading, known: int) -> None:
        """Put the rest of the previous container instance, if the container has restarted more than
        `known` times.
        """
        from kdist.cluster import ApiError

        if self._request.container is not None:
            return
        reading.restarts = read_pod(
            self._cluster.get("v1", "Pod", pod.name, self._namespace)
        ).restarts
        if reading.restarts > known:
            with suppress(ApiError):  # the node keeps at most one previous log
                self._put(pod, reading, previous=True)

    def _put(self, pod: Pod, reading: _Reading, *, previous: bool = False) -> None:
        known, limited, first = reading.last, reading.initial and not reading.last, not previous
        for text in self._cluster.logs(
            pod.name,
            namespace=self._namespace,
            container=self._request.container or pod.container,
            follow=not previous,
            previous=previous,
            timestamps=True,
            since=self._request.since if limited else known or None,
            tail=self._request.tail if limited else None,
        ):
            line = _line(pod, text)
            if line is not None and line.stamp > known:
                # it may be of a container that started after the last snapshot
                if first:
                    first = False
                    with suppress(NotFoundError):
                        self._put_previous(pod, reading, reading.restarts)
                reading.last = line.stamp
                self._lines.put(line)

    def _notify_once(self, sentence: str) -> None:
        if (key := without_times(sentence)) != self._reported:
            self._reported = key
            self._notify(sentence)


def without_times(sentence: str) -> str:
    """The sentence without its durations, to compare what it says."""
    return re.sub(r"\d+(:\d\d)+|[\d.]+ (s|ms|µs)\b", "…", sentence)


def select(job: ClusterJob, chosen: LogSelection) -> Iterator[LogLine | JobStatus]:
    """Yield the lines of a job's logs that are chosen. See `Job.logs`."""
    if chosen.follow and chosen.previous:
        raise UsageError("--previous cannot be combined with --follow")
    if chosen.generation is not None:
        yield from _select_kept(job, chosen)
        return
    if chosen.follow:
        rank_filter = chosen.rank and _filter_ranks(chosen, fetch_snapshot(job.cluster, job.name))
        follower = Follower(job.cluster, job.name, chosen, notify=job.dialog.notify)
        yield from (
            each for each in follower.lines() if not rank_filter or rank_filter.matches(each)
        )
        status = follower.snapshot and follower.snapshot.status
        if status and (chosen.container is None or status.phase.terminal):
            yield status
        return
    snapshot = fetch_snapshot(job.cluster, job.name)
    is_plain = not (chosen.previous or chosen.container) and chosen.since is None
    status = snapshot.status
    is_over = status.phase.terminal or status.phase is Phase.SUSPENDED
    has_none = is_over and not status.pods  # and gets none for now
    if is_plain and chosen.rank != FAILED and has_none and are_kept(job.applied):
        job.dialog.notify(
            f"no pod of {job.name} is left: showing the log kept next to its checkpoints"
        )
        yield from _select_kept(job, chosen)
        return
    if chosen.rank and snapshot.gap:
        job.dialog.warn(f"{snapshot.gap}: ranks of pods whose agents do not answer are not known")
    rank_filter = chosen.rank and _filter_ranks(chosen, snapshot)
    lines = read(job.cluster, snapshot, chosen, notify=job.dialog.notify)
    yield from (each for each in lines if not rank_filter or rank_filter.matches(each))


def _filter_ranks(chosen: LogSelection, snapshot: Snapshot) -> RankFilter:
    known: dict[str, list[int]] = {}
    for rank in snapshot.status.ranks:
        known.setdefault(rank.pod, []).append(rank.rank)
    why = f"kdist why {snapshot.name} -n {snapshot.namespace}"
    return RankFilter(chosen.find_ranks(snapshot.status, why=why), known)


def _select_kept(job: ClusterJob, chosen: LogSelection) -> Iterator[Entry]:
    with TemporaryDirectory() as folder:
        files = fetch(
            job.applied, Path(folder), generation=chosen.generation, notify=job.dialog.notify
        )
        yield from chosen.select(read_files(files, tail=chosen.tail))


_MORE_BYTES: Final = 1 << 20
_NODE: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")


def are_kept(target: AppliedJob) -> bool:
    """Whether the job's agents keep their logs, and there are checkpoints to keep them with."""
    spec = target.job.spec
    return checkpoints.has_checkpoints(target) and spec.logs.max_bytes > 0


def fetch(
    target: AppliedJob, folder: Path, *, generation: int | None, notify: Notify
) -> dict[str, Path]:
    """Copy what is kept of each node's log to a file in `folder`, which exists; returns the file of
    each node. With None, the last generation of which a log is kept. `notify` receives a message if
    a helper pod is needed.

    Raises:
        NotFoundError: nothing is kept, or nothing of this generation.
        KdistError: the job has no checkpoints in the cluster, or they cannot be read.
    """
    checkpoints.check_has_checkpoints(target)
    with reading_pod(target, notify) as (pod, container):
        tool = ["python", "-m", checkpoints.MODULE, "logs", target.checkpoints]
        code, output = target.cluster.run(pod, tool, container=container)
        answer = checkpoints.read_answer(output.decode(errors="replace"), code, pod)
        wanted, nodes = choose(target.name, answer, generation)
        found = {}
        for node in nodes:
            command = [*tool, "--name", node, "--generation", str(wanted)]
            found[node] = folder / node
            most = 2 * target.job.spec.logs.max_bytes + _MORE_BYTES  # it may be written just now
            with found[node].open("wb") as file:
                write = partial(_write, file, most=most)
                code = target.cluster.exec(
                    pod, command, container=container, out=write, err=lambda _: None
                )
            if code != 0:
                raise KdistError(f"the kept log of {node} cannot be read: exit code {code}")
        return found


def _write(file: BinaryIO, data: bytes, *, most: int) -> None:
    if file.tell() + len(data) > most:
        raise KdistError(f"the kept log of {Path(file.name).name} is larger than {most} bytes")
    file.write(data)


def choose(job: str, document: Document, generation: int | None) -> tuple[int, list[str]]:
    """The generation to show, and the nodes that have a log of it.

    Raises:
        NotFoundError: there is none.
        KdistError: what answered names no nodes; their names become files here.
    """
    kept: Mapping[int, list[str]] = {
        integer(one, "generation") or 0: texts(one, "nodes")
        for one in items(document, "generations")
    }
    if not kept:
        raise NotFoundError(f"no log of {job} is kept", next_command="kdist explain spec.logs")
    wanted = max(kept) if generation is None else generation
    if wanted not in kept:
        raise NotFoundError(
            f"no log of generation {wanted} of {job} is kept; there are those of "
            f"{', '.join(map(str, sorted(kept)))}"
        )
    nodes = kept[wanted]
    if not all(_NODE.fullmatch(node) for node in nodes):
        raise KdistError(f"what keeps the logs of {job} names nodes that cannot be any")
    return wanted, nodes
