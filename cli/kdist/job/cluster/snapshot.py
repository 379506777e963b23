"""Fetches a `Snapshot` of one job, or of every job of a namespace, with as few requests as the jobs
allow: what every job has is requested at the same time, then what the first responses refer to.
The progress of init containers that fetch data or weights, and of trainings whose agents do not
answer, is read from the end of their logs.

`Events` lists the events of a namespace once and then watches them; `is_about` selects those of a
job: of its pods, deleted ones included, its workload and its volume claims. A finished job whose
workload kind cannot end by itself is scaled to zero pods.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

from kdist import backends
from kdist.errors import JobNotFoundError, KdistError, NotFoundError
from kdist.events import Event, parse
from kdist.job.cluster.agents import Agents
from kdist.manifest import (
    AVOID_LABEL,
    JOB_LABEL,
    QUEUE_LABEL,
    QUEUE_PREFIX,
    TRAINING_JOB,
    job_selector,
)
from kdist.status import (
    BACKEND,
    OUTCOME,
    ExitRecord,
    FetchProgress,
    Phase,
    Pod,
    Snapshot,
    documents,
    find_owning_resource,
    knows_numbers,
    read_pod,
)
from kdist.status.documents import Document
from kdist.threads import OnError, start_thread

if TYPE_CHECKING:
    from kdist.cluster import Cluster


MOST_LOGS = 4
"""Logs that are read for one snapshot: all nodes fetch the same."""
_LINES = 50  # others may stand between two reports of progress
PROGRESS = "progress"


def _read_fetch_progress(cluster: Cluster, namespace: str, pod: Pod) -> Event | None:
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


_KINDS = (
    *(kind for _, kind in backends.workload_kinds()),
    "TrainingJob",
    "Workload",
    "ConfigMap",
    "PodDisruptionBudget",
)


def is_about(event: Document, name: str, pods: Iterable[Document], claims: Collection[str]) -> bool:
    """Whether an event is about the job `name` or its objects, its `pods`, or one of its `claims`
    (names). Names decide, because an event outlives its object.
    """
    kind, about = (
        documents.text(event, "involvedObject", "kind"),
        documents.text(event, "involvedObject", "name"),
    )
    if kind == "Pod":
        return any(documents.name(pod) == about for pod in pods) or is_pod_name(about, name)
    if kind == "PersistentVolumeClaim":
        return about in claims or about == f"{name}-checkpoints"
    if about == name:
        return kind in _KINDS
    # A JobSet creates Jobs of its own name, a role and a number.
    return kind == "Job" and re.fullmatch(rf"{re.escape(name)}-[a-z]+-\d+", about) is not None


def is_pod_name(pod: str, name: str) -> bool:
    """Whether a pod of the job `name` may have this name, for any workload kind."""
    suffix = r"(-(worker|master|node|trainer)(-\d+){1,2}|-\d+)(-[a-z0-9]{5})?"
    return re.fullmatch(re.escape(name) + suffix, pod) is not None


_UNREAD_SECONDS = 30.0  # after which events are no longer watched


class Events:
    """The current events of one namespace. A shared namespace has thousands, too many to list every
    second, so they are watched.

    Where the user may list but not watch them, or the watch has ended, the next `read` lists them
    again. The watch ends when nobody has read them for a while, so that a program that waits for
    many jobs keeps no thread and no connection of each.
    """

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._known: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._watching: threading.Thread | None = None
        self._read_at = 0.0

    def read(self) -> list[dict[str, Any]]:
        """All events. Raises as `Cluster.list` does."""
        self._read_at = time.monotonic()
        if self._watching is None or not self._watching.is_alive():
            listed, version = self._cluster.list_with_version(
                "v1", "Event", namespace=self._namespace
            )
            self._known = {_event_key(each): each for each in listed}
            if version:  # where the watch starts
                # once it has ended, `read` starts it again
                self._watching = start_thread(
                    partial(self._watch, version), name="events", on_error=OnError.REPORT
                )
        with self._lock:
            return list(self._known.values())

    def _watch(self, version: str) -> None:
        try:
            while (end := self._read_at + _UNREAD_SECONDS) > time.monotonic():
                for change, document in self._cluster.follow(
                    "v1", "Event", namespace=self._namespace, since=version, end=end
                ):
                    version = documents.text(document, "metadata", "resourceVersion")
                    with self._lock:
                        if change == "DELETED":
                            self._known.pop(_event_key(document), None)
                        else:
                            self._known[_event_key(document)] = document
        except KdistError:
            return  # the next `read` lists them, and raises the error


def _event_key(event: dict[str, Any]) -> str:
    return documents.uid(event) or documents.name(event)


_ENDLESS = "statefulset"  # the workload kind that cannot end by itself


def finalize(cluster: Cluster, snapshot: Snapshot) -> bool:
    """Scale a finished job to zero pods, and record its outcome on the workload, where the workload
    cannot end by itself. Every command that observes such a job does so. Returns whether the
    workload was changed; it is not where the user lacks the right. Raises `KdistError` if the API
    server is unreachable (UNREACHABLE).
    """
    from kdist.cluster import ApiError, ForeignError, JobObjects, JobOwner

    status = snapshot.status
    if snapshot.resource is not None:
        return False  # the controller does
    if snapshot.backend != _ENDLESS or not status.kept_alive or not status.phase.terminal:
        return False
    if not documents.integer(snapshot.workload, "spec", "replicas"):
        return False
    record = status.exit_record or ExitRecord(
        0 if status.phase is Phase.SUCCEEDED else 1, outcome=str(status.phase).lower()
    )
    patch = {"metadata": {"annotations": {OUTCOME: record.to_text()}}, "spec": {"replicas": 0}}
    backend = backends.get(_ENDLESS)
    try:
        owner = JobOwner(snapshot.namespace or cluster.namespace, snapshot.name, _ENDLESS)
        JobObjects(cluster, owner).change(backend.api_version, backend.kind, snapshot.name, patch)
    except (ForeignError, ApiError):
        return False
    return True


_T = TypeVar("_T")
_THREADS = 8
_FEW_NODES = 8  # that are fetched one by one
_KUEUE = (f"{QUEUE_PREFIX}v1beta2", f"{QUEUE_PREFIX}v1beta1")
_ABSENT = 'configmap "'
_UNREADABLE: dict[str, Any] | None = {}


def fetch_snapshot(
    cluster: Cluster,
    name: str,
    namespace: str | None = None,
    *,
    agents: Agents | None = None,
    events: Events | None = None,
    controllers: bool = False,
    watched: Document | None = None,
) -> Snapshot:
    """Fetch all of one job as it is now. Of other objects, what the user may not read is left out.

    Args:
        cluster: the cluster.
        name: of the job.
        namespace: of the job; None for the connection's own.
        agents: reused by later snapshots of the same job, which makes them faster.
        events: reused as `agents` is.
        controllers: fetch service accounts too, and deployments if the workload has no pods.
        watched: the TrainingJob, from a caller that watches it and may neither get one nor read
            logs.

    Raises:
        JobNotFoundError: there is no such job.
        KdistError: the API server is unreachable (UNREACHABLE).
    """
    namespace = namespace or cluster.namespace
    agents = agents or Agents(cluster, namespace=namespace)
    with thread_pool() as pool:
        of_job: dict[str, Any] = {"namespace": namespace, "selector": job_selector(name)}
        pods_task = pool.submit(cluster.list, "v1", "Pod", **of_job)
        listed = partial(cluster.list, "v1", "Event", namespace=namespace)
        events_task = pool.submit(_if_permitted, listed if events is None else events.read, [])
        # the Jobs by which a job avoids nodes
        avoided: dict[str, Any] = {**of_job, "selector": f"{AVOID_LABEL}={name}"}
        markers = pool.submit(cluster.list_readable, "batch/v1", "Job", **avoided)
        config_map = cluster.look_up("v1", "ConfigMap", name, namespace) or {}
        backend, workload, placed = _find_placed(cluster, config_map, name, namespace)
        pod_documents = _select_pods(cluster, backend, workload, name, pods_task.result())
        pods = [*map(read_pod, pod_documents)]
        statuses = pool.submit(agents.poll, pods)
        nodes = pool.submit(_find_nodes, cluster, pods)
        claims = pool.submit(_find_claims, cluster, namespace, pod_documents, pods)
        logged = pods if watched is None else []
        fetching = [pod for pod in logged if pod.fetching and not pod.lost][:MOST_LOGS]
        fetches = pool.map(partial(_read_fetch_progress, cluster, namespace), fetching)
        # whoever may change ConfigMaps may remove the owner of the job's
        owned = any(find_owning_resource(each) is not None for each in (config_map, workload))
        resource = watched if owned or not config_map else None
        if watched is None and (owned or not config_map):
            resource = cluster.find_readable(*TRAINING_JOB, name, namespace)
        if not any((workload, config_map, pod_documents, resource)):
            raise JobNotFoundError((name, namespace))
        admission = pool.submit(_find_admission, cluster, namespace, workload)
        bare = controllers and not pod_documents and (workload or resource) is not None
        # a controller's may have any name and namespace
        every = partial(cluster.list_readable, "apps/v1", "Deployment", all_namespaces=True)
        deployments = pool.submit(every) if bare else None
        accounts = pool.submit(_find_accounts, cluster, namespace, pod_documents, asked=controllers)
        about = partial(is_about, name=name, pods=pod_documents, claims=claims.result())
        return Snapshot(
            name,
            namespace,
            config_map,
            workload,
            backend.read(workload) if backend and workload is not None else None,
            pod_documents,
            tuple(filter(about, events_task.result())),
            statuses.result(),
            nodes.result(),
            claims.result(),
            admission.result(),
            agents.skipped,
            deployments.result() if deployments else [],
            resource=resource,
            fetches={
                pod.name: event
                for pod, event in zip(fetching, fetches, strict=True)
                if event is not None
            },
            accounts=accounts.result(),
            lack=agents.lack(),
            progress=read_training(cluster, namespace, logged)
            if not agents.answered and not knows_numbers(resource)
            else {},
            placed=placed,
            config_maps=_find_present(cluster, name, namespace, (events_task, statuses)),
            markers=markers.result(),
        )


def watch_job(cluster: Cluster, name: str) -> Iterator[Snapshot]:
    """Yield a snapshot every second until the job has ended, and finalize it. Raises as
    `fetch_snapshot` does.
    """
    agents = Agents(cluster, namespace=cluster.namespace)
    events = Events(cluster, cluster.namespace)
    while True:
        snapshot = fetch_snapshot(cluster, name, agents=agents, events=events)
        finalize(cluster, snapshot)
        yield snapshot
        if snapshot.status.phase.terminal:
            return
        time.sleep(1.0)


def _select_pods(
    cluster: Cluster,
    backend: backends.Backend | None,
    workload: Document | None,
    name: str,
    listed: Iterable[dict[str, Any]],
) -> list[dict[str, Any]]:
    """The pods that the job's workload has made; anybody may give the job's label to others."""
    from kdist.cluster import find_makers

    makers = None
    if workload is not None and backend is not None:
        makers = _if_permitted(lambda: find_makers(cluster, backend, workload), None)
    if makers is None:  # what is between the workload and its pods may not be read
        return [pod for pod in listed if backends.is_made_for(pod, name)]
    return [
        pod
        for pod in listed
        if any(
            owner.get("controller") and documents.text(owner, "uid") in makers
            for owner in documents.items(pod, "metadata", "ownerReferences")
        )
    ]


def _find_present(
    cluster: Cluster,
    name: str,
    namespace: str,
    told: tuple[Future[list[dict[str, Any]]], Future[dict[str, dict[str, Any]]]],
) -> frozenset[str]:
    """The names of the job's ConfigMaps, if a kubelet or an agent has told, in events or reports,
    that it did not find one.
    """
    events, reports = told
    missed = any(_ABSENT in documents.text(each, "message") for each in events.result())
    refused = (documents.text(each, "rendezvous_refusal") for each in reports.result().values())
    if not missed and not any(each.startswith("404") for each in refused):
        return frozenset()
    which: dict[str, Any] = {"namespace": namespace, "selector": job_selector(name)}
    listed = cluster.list_readable("v1", "ConfigMap", **which, metadata_only=True)
    return frozenset(map(documents.name, listed))


@contextmanager
def thread_pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for concurrent requests. Ctrl-C does not wait for a server that does not respond."""
    pool = ThreadPoolExecutor(_THREADS)
    interrupted = False
    try:
        yield pool
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        pool.shutdown(wait=not interrupted, cancel_futures=interrupted)


def find_backend(name: str) -> backends.Backend | None:
    """The backend of this name; None if there is none."""
    return backends.get(name) if name in backends.NAMES else None


def _find_placed(
    cluster: Cluster, config_map: Document, name: str, namespace: str
) -> tuple[backends.Backend | None, Any, Mapping[str, str]]:
    """The job's workload and its kind; if the ConfigMap is gone, what it said of them."""
    if not config_map:
        from kdist.deploy.live_workload import find_live_workload

        if (live := find_live_workload(cluster, name, namespace)) is not None:
            return live.backend, live.document, live.decided
    backend = find_backend(documents.annotation(config_map, BACKEND))
    if backend is None:
        return None, None, {}
    return backend, cluster.look_up(backend.api_version, backend.kind, name, namespace), {}


def _find_nodes(cluster: Cluster, pods: Sequence[Pod]) -> dict[str, Any]:
    """All nodes while a pod is not scheduled, otherwise the nodes of pods that are not healthy."""
    names = {
        pod.node
        for pod in pods
        if pod.node and not pod.over and (pod.deleting or pod.lost or not pod.ready)
    }
    unscheduled = any(not pod.scheduled and not pod.over for pod in pods)
    if unscheduled or len(names) > _FEW_NODES:
        every = {documents.name(node): node for node in cluster.list_readable("v1", "Node")}
        return (
            every if unscheduled else {name: every[name] for name in sorted(names) if name in every}
        )
    found = {name: cluster.find_readable("v1", "Node", name) for name in sorted(names)}
    return {name: node for name, node in found.items() if node is not None}


def _find_claims(
    cluster: Cluster, namespace: str, pod_documents: Sequence[Document], pods: Sequence[Pod]
) -> dict[str, Any]:
    """The volume claims of pods that do not run yet; an empty document for one that does not
    exist.
    """
    waiting = {pod.name for pod in pods if not pod.running and not pod.over}
    names = {
        documents.text(volume, "persistentVolumeClaim", "claimName")
        for document in pod_documents
        if documents.name(document) in waiting
        for volume in documents.items(document, "spec", "volumes")
    }
    return _find_named(cluster, "PersistentVolumeClaim", names, namespace)


def _find_named(
    cluster: Cluster, kind: str, names: Collection[str], namespace: str
) -> dict[str, Any]:
    """The objects of these names, an empty document for one that does not exist; without those that
    the user may not read.
    """
    found = {
        name: _if_permitted(partial(cluster.look_up, "v1", kind, name, namespace), _UNREADABLE)
        for name in sorted({*names} - {""})
    }
    return {name: each or {} for name, each in found.items() if each is not _UNREADABLE}


def _find_accounts(
    cluster: Cluster, namespace: str, pod_documents: Iterable[Document], *, asked: bool
) -> dict[str, Document]:
    """The service accounts of the pods, if they are `asked` for, without those that the user may
    not read.
    """
    pods = pod_documents if asked else ()
    names = {documents.text(each, "spec", "serviceAccountName") for each in pods}
    return _find_named(cluster, "ServiceAccount", names, namespace)


def _find_admission(cluster: Cluster, namespace: str, workload: Document | None) -> Any:
    """Kueue's Workload of a job in a queue; None without one."""
    uid = documents.uid(workload)
    if not documents.label(workload, QUEUE_LABEL):
        return None
    for api_version in _KUEUE:
        try:
            listed = cluster.list(api_version, "Workload", namespace=namespace)
        except NotFoundError:
            continue
        except KdistError:
            return None
        return next((each for each in listed if uid in _owners(each)), None)
    return None


def _owners(document: Document) -> Iterator[str]:
    yield documents.label(document, "kueue.x-k8s.io/job-uid")
    yield from (
        documents.text(owner, "uid")
        for owner in documents.items(document, "metadata", "ownerReferences")
    )


def _if_permitted(fetch: Callable[[], _T], otherwise: _T) -> _T:
    """What `fetch` returns; `otherwise` if the user may not read it, or it does not exist."""
    from kdist.cluster import ApiError

    try:
        return fetch()
    except ApiError as error:
        if error.status in (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND):
            return otherwise
        raise


def list_snapshots(
    cluster: Cluster,
    namespace: str | None = None,
    *,
    all_namespaces: bool = False,
    selector: str = "",
    known: dict[str, Document] | None = None,
) -> list[Snapshot]:
    """Fetch every job as it is now, without events, nodes and claims; one agent of each job is
    polled. Raises as `fetch_snapshot` does.

    Only the metadata of ConfigMaps are listed, because most hold code; the jobs' own are then
    fetched one by one.

    Args:
        cluster: the cluster.
        namespace: of the jobs; None for the connection's own.
        all_namespaces: the jobs of all namespaces.
        selector: only jobs with these labels.
        known: cache of ConfigMaps. With the same dict a later call fetches only those that have
            changed.
    """
    known = {} if known is None else known
    namespace = namespace or cluster.namespace
    which: dict[str, Any] = {"namespace": namespace, "all_namespaces": all_namespaces}
    of_jobs = {**which, "selector": ",".join(filter(None, (JOB_LABEL, selector)))}
    with thread_pool() as pool:
        listed = pool.submit(cluster.list, "v1", "Pod", **of_jobs)
        listed_resources = pool.submit(
            cluster.list_readable, *TRAINING_JOB, **which, selector=selector
        )
        written = cluster.list("v1", "ConfigMap", **of_jobs, metadata_only=True)
        config_maps = _read_config_maps(cluster, pool, written, known)
        names = {documents.annotation(each, BACKEND) for each in config_maps}
        found = {
            kind.name: pool.submit(cluster.list_readable, kind.api_version, kind.kind, **of_jobs)
            for kind in map(find_backend, sorted(names))
            if kind is not None
        }
        workloads = {
            (name, *_key(each)): each for name, task in found.items() for each in task.result()
        }
        pods: dict[tuple[str, str], list[Document]] = {}
        for pod in listed.result():
            name = documents.label(pod, JOB_LABEL)
            if backends.is_made_for(pod, name):
                pods.setdefault((_key(pod)[0], name), []).append(pod)
        resources = {_key(each): each for each in listed_resources.result()}
        each = pool.map(
            lambda one: _summarize(cluster, one, workloads, pods.get(_key(one), []), resources),
            config_maps,
        )
        without = {*pods, *resources}.difference(map(_key, config_maps))
        bare = pool.map(lambda key: _summarize_without(cluster, key, pods, resources), without)
        return [one for one in (*each, *bare) if one is not None]


def _summarize_without(
    cluster: Cluster,
    key: tuple[str, str],
    pods_of: Mapping[tuple[str, str], Sequence[Any]],
    resources: Mapping[tuple[str, str], Document],
) -> Snapshot | None:
    """A job whose ConfigMap does not exist, by the workload that has made its pods, or by its
    TrainingJob; None if it has neither.
    """
    from kdist.deploy.live_workload import find_live_workload

    namespace, name = key
    pods, resource = pods_of.get(key, ()), resources.get(key)
    live = find_live_workload(cluster, name, namespace) if pods else None
    if live is None:
        return None if resource is None else Snapshot(name, namespace, resource=resource)
    return Snapshot(
        name,
        namespace,
        workload=live.document,
        state=live.backend.read(live.document),
        pods=pods,
        reports=_poll_first(cluster, namespace, pods),
        resource=resource,
        placed=live.decided,
    )


def _read_config_maps(
    cluster: Cluster,
    pool: ThreadPoolExecutor,
    listed: Sequence[Document],
    known: dict[str, Document],
) -> list[Document]:
    """Fetch the jobs' own ConfigMaps among those listed, and update `known`, which holds them by
    uid and version.
    """
    own = [each for each in listed if documents.label(each, JOB_LABEL) == documents.name(each)]
    versions = [
        ":".join(documents.text(each, "metadata", key) for key in ("uid", "resourceVersion"))
        for each in own
    ]
    tasks = {
        version: pool.submit(
            cluster.look_up, "v1", "ConfigMap", documents.name(each), _key(each)[0]
        )
        for each, version in zip(own, versions, strict=True)
        if version not in known
    }
    found = {version: known.get(version) or tasks[version].result() for version in versions}
    known.clear()
    known.update({version: document for version, document in found.items() if document is not None})
    return list(known.values())


def _summarize(
    cluster: Cluster,
    config_map: Document,
    workloads: dict[Any, Any],
    pods: Sequence[Any],
    resources: Mapping[tuple[str, str], Document],
) -> Snapshot:
    backend = find_backend(documents.annotation(config_map, BACKEND))
    namespace, name = _key(config_map)
    workload = workloads.get((backend.name, namespace, name)) if backend is not None else None
    state = backend.read(workload) if backend is not None and workload is not None else None
    reports = _poll_first(cluster, namespace, pods)
    owned = any(find_owning_resource(each) is not None for each in (config_map, workload))
    resource = resources.get((namespace, name)) if owned else None
    return Snapshot(
        name, namespace, config_map, workload, state, pods, reports=reports, resource=resource
    )


def _poll_first(cluster: Cluster, namespace: str, pods: Iterable[Any]) -> dict[str, Any]:
    """What the agent of the first pod that runs says."""
    first = sorted(
        (read_pod(pod) for pod in pods), key=lambda pod: (not pod.working, pod.index or 0)
    )[:1]
    return Agents(cluster, namespace=namespace, max_tunnels=0).poll(first)


def _key(document: Document) -> tuple[str, str]:
    return documents.text(document, "metadata", "namespace"), documents.name(document)
