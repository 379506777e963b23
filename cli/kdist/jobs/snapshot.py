"""Fetches a `Snapshot` of one job, or of every job of a namespace: what every job has is requested
at the same time, then what the first responses refer to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

from kdist import backends
from kdist.errors import JobNotFoundError, KdistError, NotFoundError
from kdist.jobs.agents import Agents
from kdist.jobs.events import Events, is_about
from kdist.jobs.finalization import finalize
from kdist.manifest import JOB_LABEL, job_selector
from kdist.status import BACKEND, Pod, Snapshot, documents, read_pod
from kdist.status.documents import Document

if TYPE_CHECKING:
    from kdist.cluster import Cluster


_T = TypeVar("_T")
_THREADS = 8
_FEW_NODES = 8  # that are fetched one by one
_KUEUE = ("kueue.x-k8s.io/v1beta2", "kueue.x-k8s.io/v1beta1")
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def fetch_snapshot(
    cluster: Cluster,
    name: str,
    namespace: str | None = None,
    *,
    agents: Agents | None = None,
    events: Events | None = None,
    controllers: bool = False,
) -> Snapshot:
    """Fetch all of one job as it is now. What the user may not read is left out, except for the
    job's own objects.

    Args:
        cluster: the cluster.
        name: of the job.
        namespace: of the job; None for the connection's own.
        agents: reused by later snapshots of the same job, which makes them faster.
        events: reused as `agents` is.
        controllers: fetch the deployments of controllers too, if the workload has no pods.

    Raises:
        JobNotFoundError: there is no such job.
        KdistError: the API server is unreachable (UNREACHABLE).
    """
    namespace = namespace or cluster.namespace
    agents = agents or Agents(cluster, namespace=namespace)
    with _thread_pool() as pool:
        config_map_task = pool.submit(_find_config_map, cluster, name, namespace)
        pods_task = pool.submit(_list_pods, cluster, name, namespace)
        events_task = pool.submit(_list_events, cluster, namespace, events)
        config_map = config_map_task.result() or {}
        backend = _find_backend(documents.annotation(config_map, BACKEND))
        workload_task = pool.submit(lambda: _find_workload(cluster, backend, name, namespace))
        pod_documents = pods_task.result()
        pods = [read_pod(document) for document in pod_documents]
        statuses = pool.submit(agents.poll, pods)
        nodes = pool.submit(_find_nodes, cluster, pods)
        claims = pool.submit(_find_claims, cluster, namespace, pod_documents, pods)
        workload = workload_task.result()
        if workload is None and not config_map and not pod_documents:
            raise JobNotFoundError((name, namespace))
        admission = pool.submit(_find_admission, cluster, namespace, workload)
        wanted = controllers and workload is not None and not pod_documents
        deployments = pool.submit(_find_deployments, cluster) if wanted else None
        state = backend.read(workload) if backend is not None and workload is not None else None
        return Snapshot(
            name,
            namespace,
            config_map,
            workload,
            state,
            pod_documents,
            _select_events(events_task.result(), name, pod_documents, claims.result()),
            statuses.result(),
            nodes.result(),
            claims.result(),
            admission.result(),
            agents.skipped,
            deployments.result() if deployments else (),
        )


def watch_job(cluster: Cluster, name: str, *, interval: float = 1.0) -> Iterator[Snapshot]:
    """Yield a snapshot every `interval` seconds until the job has ended, and finalize it. Raises as
    `fetch_snapshot` does.
    """
    agents, events = (
        Agents(cluster, namespace=cluster.namespace),
        Events(cluster, cluster.namespace),
    )
    while True:
        snapshot = fetch_snapshot(cluster, name, agents=agents, events=events)
        finalize(cluster, snapshot)
        yield snapshot
        if snapshot.status.phase.terminal:
            return
        time.sleep(interval)


def _list_pods(cluster: Cluster, name: str, namespace: str) -> list[dict[str, Any]]:
    return cluster.list("v1", "Pod", namespace=namespace, selector=job_selector(name))


def _find_config_map(cluster: Cluster, name: str, namespace: str) -> dict[str, Any] | None:
    return _or_none(lambda: cluster.get("v1", "ConfigMap", name, namespace))


def _list_events(cluster: Cluster, namespace: str, events: Events | None) -> list[dict[str, Any]]:
    if events is not None:
        return _or_empty(events.read)
    return _or_empty(lambda: cluster.list("v1", "Event", namespace=namespace))


def _select_events(
    events: Iterable[Document], name: str, pods: Sequence[Document], claims: Collection[str]
) -> tuple[Document, ...]:
    return tuple(event for event in events if is_about(event, name, pods, claims))


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
    wanted = ",".join(part for part in (JOB_LABEL, selector) if part)

    def find(api_version: str, kind: str, *, metadata_only: bool = False) -> list[Any]:
        return cluster.list(
            api_version,
            kind,
            namespace=namespace,
            all_namespaces=all_namespaces,
            selector=wanted,
            metadata_only=metadata_only,
        )

    with _thread_pool() as pool:
        listed = pool.submit(find, "v1", "Pod")
        config_maps = _read_config_maps(
            cluster, pool, find("v1", "ConfigMap", metadata_only=True), known
        )
        names = {documents.annotation(each, BACKEND) for each in config_maps}
        kinds = [backend for backend in map(_find_backend, sorted(names)) if backend is not None]
        found = {
            kind.name: pool.submit(_or_empty, partial(find, kind.api_version, kind.kind))
            for kind in kinds
        }
        workloads = {
            (name, *_key(each)): each
            for name, listing in found.items()
            for each in listing.result()
        }
        pods = _group_by_job(listed.result())
        each = pool.map(
            lambda one: _summarize(cluster, one, workloads, pods.get(_key(one), [])), config_maps
        )
        return sorted(each, key=lambda one: (one.namespace, one.name))


def _group_by_job(pods: Iterable[Document]) -> dict[tuple[str, str], list[Any]]:
    """The pods by the namespace and the name of their job."""
    found: dict[tuple[str, str], list[Any]] = {}
    for pod in pods:
        namespace = documents.text(pod, "metadata", "namespace")
        found.setdefault((namespace, documents.label(pod, JOB_LABEL)), []).append(pod)
    return found


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
            _or_none, partial(cluster.get, "v1", "ConfigMap", documents.name(each), _key(each)[0])
        )
        for each, version in zip(own, versions, strict=True)
        if version not in known
    }
    found = {version: known.get(version) or tasks[version].result() for version in versions}
    known.clear()
    known.update({version: document for version, document in found.items() if document is not None})
    return list(known.values())


@contextmanager
def _thread_pool() -> Iterator[ThreadPoolExecutor]:
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


def _summarize(
    cluster: Cluster, config_map: Document, workloads: dict[Any, Any], pods: Sequence[Any]
) -> Snapshot:
    backend = _find_backend(documents.annotation(config_map, BACKEND))
    namespace, name = _key(config_map)
    workload = workloads.get((backend.name, namespace, name)) if backend is not None else None
    state = backend.read(workload) if backend is not None and workload is not None else None
    first = sorted(
        (read_pod(pod) for pod in pods), key=lambda pod: (not pod.working, pod.index or 0)
    )[:1]
    reports = Agents(cluster, namespace=namespace, max_tunnels=0).poll(first)
    return Snapshot(name, namespace, config_map, workload, state, pods, reports=reports)


def _key(document: Document) -> tuple[str, str]:
    return documents.text(document, "metadata", "namespace"), documents.name(document)


def _find_backend(name: str) -> backends.Backend | None:
    return backends.get(name) if name in backends.NAMES else None


def _find_workload(
    cluster: Cluster, backend: backends.Backend | None, name: str, namespace: str
) -> Any:
    if backend is None:
        return None
    return _or_none(lambda: cluster.get(backend.api_version, backend.kind, name, namespace))


def _find_nodes(cluster: Cluster, pods: Sequence[Pod]) -> dict[str, Any]:
    """All nodes while a pod is not scheduled, otherwise the nodes of pods that are not healthy."""
    names = {
        pod.node
        for pod in pods
        if pod.node and not pod.over and (pod.deleting or pod.lost or not pod.ready)
    }
    unscheduled = any(not pod.scheduled and not pod.over for pod in pods)
    if unscheduled or len(names) > _FEW_NODES:
        every = {
            documents.name(node): node for node in _or_empty(lambda: cluster.list("v1", "Node"))
        }
        return (
            every if unscheduled else {name: every[name] for name in sorted(names) if name in every}
        )
    found = {name: _find_node(cluster, name) for name in sorted(names)}
    return {name: node for name, node in found.items() if node is not None}


def _find_node(cluster: Cluster, name: str) -> Any:
    return _if_permitted(lambda: cluster.get("v1", "Node", name), None)


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
    return {
        name: claim
        for name in sorted(names - {""})
        if (claim := _find_claim(cluster, namespace, name)) is not None
    }


def _find_claim(cluster: Cluster, namespace: str, name: str) -> Any:
    """The claim; an empty document if it does not exist, None if the user may not read it."""
    return _if_permitted(
        lambda: _or_none(lambda: cluster.get("v1", "PersistentVolumeClaim", name, namespace)) or {},
        None,
    )


def _find_admission(cluster: Cluster, namespace: str, workload: Document | None) -> Any:
    """Kueue's Workload of a job in a queue; None without one."""
    uid = documents.text(workload, "metadata", "uid")
    if not documents.label(workload, _QUEUE_LABEL):
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


def _find_deployments(cluster: Cluster) -> list[dict[str, Any]]:
    """All deployments that the user may list: a controller's may have any name and namespace."""
    return _or_empty(lambda: cluster.list("apps/v1", "Deployment", all_namespaces=True))


def _owners(document: Document) -> Iterator[str]:
    yield documents.label(document, "kueue.x-k8s.io/job-uid")
    yield from (
        documents.text(owner, "uid")
        for owner in documents.items(document, "metadata", "ownerReferences")
    )


def _or_none(fetch: Callable[[], _T]) -> _T | None:
    """What `fetch` returns; None if it does not exist."""
    try:
        return fetch()
    except NotFoundError:
        return None


def _or_empty(fetch: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The list that `fetch` returns; empty if the user may not list it."""
    return _if_permitted(fetch, [])


def _if_permitted(fetch: Callable[[], _T], otherwise: _T) -> _T:
    """What `fetch` returns; `otherwise` if the user may not read it, or it does not exist."""
    from kdist.cluster import ApiError

    try:
        return fetch()
    except ApiError as error:
        if error.status in (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND):
            return otherwise
        raise
