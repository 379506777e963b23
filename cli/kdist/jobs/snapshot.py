"""Fetches a `Snapshot` of one job, or of every job of a namespace: what every job has is requested
at the same time, then what the first answers refer to. `finalize` scales a finished job to zero
pods where its workload kind cannot end by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

from kdist import backends
from kdist.errors import KdistError, NotFoundError
from kdist.jobs.agents import Agents
from kdist.jobs.events import Events, is_about
from kdist.status import BACKEND, OUTCOME, ExitRecord, Phase, Pod, Snapshot, documents, read_pod
from kdist.status.documents import Document

if TYPE_CHECKING:
    from kdist.cluster import Cluster


_KIND = "statefulset"


def finalize(cluster: Cluster, seen: Snapshot) -> bool:
    """Scale a parked job to zero pods and note its outcome on the workload; whether there was
    something to do.

    Does nothing where we may not: then somebody else will. Raises `KdistError` if the API server
    stays away.
    """
    from kdist.cluster import ApiError, ForeignError

    status = seen.status
    if seen.backend != _KIND or not status.parked or not status.phase.terminal:
        return False
    if not documents.integer(seen.workload, "spec", "replicas"):
        return False
    record = status.exit_record or ExitRecord(
        0 if status.phase is Phase.SUCCEEDED else 1, outcome=str(status.phase).lower()
    )
    patch = {"metadata": {"annotations": {OUTCOME: record.to_text()}}, "spec": {"replicas": 0}}
    backend = backends.get(_KIND)
    try:
        cluster.change(
            backend.api_version,
            backend.kind,
            seen.name,
            patch,
            job=seen.name,
            namespace=seen.namespace,
        )
    except (ForeignError, ApiError):
        return False
    return True


_T = TypeVar("_T")
_THREADS = 8
_FEW_NODES = 8  # that are asked for one by one
_KUEUE = ("kueue.x-k8s.io/v1beta2", "kueue.x-k8s.io/v1beta1")
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def fetch_snapshot(
    cluster: Cluster,
    name: str,
    namespace: str | None = None,
    *,
    agents: Agents | None = None,
    events: Events | None = None,
    closely: bool = False,
) -> Snapshot:
    """All of one job as it is now. `agents` and `events` may be kept from one snapshot to the next,
    which is quicker then.

    `closely` looks for the controllers, too, where nobody makes pods.

    Raises `NotFoundError` if there is no such job, `KdistError` (code UNREACHABLE) if the API
    server stays away. What may not be read is left out, except for the job's own objects.
    """
    place = namespace or cluster.namespace
    agents = agents or Agents(cluster, namespace=place)
    list_events = (
        events.read if events is not None else lambda: cluster.list("v1", "Event", namespace=place)
    )
    with _side_by_side() as pool:
        told = pool.submit(lambda: _optional(lambda: cluster.get("v1", "ConfigMap", name, place)))
        listed = pool.submit(_list_pods, cluster, name, place)
        heard = pool.submit(lambda: _listed(list_events))
        config_map = told.result() or {}
        backend = _find_backend(documents.annotation(config_map, BACKEND))
        made = pool.submit(lambda: _find_workload(cluster, backend, name, place))
        pod_documents = listed.result()
        pods = [read_pod(document) for document in pod_documents]
        asked = pool.submit(agents.ask, pods)
        nodes = pool.submit(_find_nodes, cluster, pods)
        claims = pool.submit(_find_claims, cluster, place, pod_documents, pods)
        workload = made.result()
        if workload is None and not config_map and not pod_documents:
            raise _report_absence(name, place)
        admission = pool.submit(_find_admission, cluster, place, workload)
        wanted = closely and workload is not None and not pod_documents
        deployments = pool.submit(_find_deployments, cluster) if wanted else None
        state = backend.read(workload) if backend is not None and workload is not None else None
        about = _select_events(heard.result(), name, pod_documents, claims.result())
        return Snapshot(
            name,
            place,
            config_map,
            workload,
            state,
            pod_documents,
            about,
            asked.result(),
            nodes.result(),
            claims.result(),
            admission.result(),
            agents.unasked,
            deployments.result() if deployments else (),
        )


def _list_pods(cluster: Cluster, name: str, namespace: str) -> list[dict[str, Any]]:
    return cluster.list("v1", "Pod", namespace=namespace, selector=f"kdist.dev/job={name}")


def _select_events(
    events: Iterable[Document], name: str, pods: Sequence[Document], claims: Collection[str]
) -> tuple[Document, ...]:
    return tuple(event for event in events if is_about(event, name, pods, claims))


def _report_absence(name: str, namespace: str) -> NotFoundError:
    return NotFoundError(
        f"there is no job {name} in namespace {namespace}",
        next_command=f"kdist get -n {namespace}",
    )


def list_snapshots(
    cluster: Cluster,
    namespace: str | None = None,
    *,
    all_namespaces: bool = False,
    selector: str = "",
    known: dict[str, Document] | None = None,
) -> list[Snapshot]:
    """Every job as it is now, without events, nodes and claims; of each job one agent is asked.
    Raises as `fetch_snapshot` does.

    Of ConfigMaps only metadata are listed, as most hold code; the jobs' own are read one by one. A
    survey that is handed the same `known` again, where it keeps them, reads those alone that have
    changed.
    """
    known = {} if known is None else known
    place = namespace or cluster.namespace
    wanted = ",".join(part for part in ("kdist.dev/job", selector) if part)

    def find(api_version: str, kind: str, *, metadata_only: bool = False) -> list[Any]:
        return cluster.list(
            api_version,
            kind,
            namespace=place,
            all_namespaces=all_namespaces,
            selector=wanted,
            metadata_only=metadata_only,
        )

    with _side_by_side() as pool:
        listed = pool.submit(find, "v1", "Pod")
        config_maps = _read_config_maps(
            cluster, pool, find("v1", "ConfigMap", metadata_only=True), known
        )
        names = {documents.annotation(each, BACKEND) for each in config_maps}
        kinds = [backend for backend in map(_find_backend, sorted(names)) if backend is not None]
        found = {
            kind.name: pool.submit(_listed, partial(find, kind.api_version, kind.kind))
            for kind in kinds
        }
        workloads = {
            (name, *_key(each)): each
            for name, listing in found.items()
            for each in listing.result()
        }
        pods = _group_by_job(listed.result())
        each = pool.map(
            lambda one: _one_of_many(cluster, one, workloads, pods.get(_key(one), [])), config_maps
        )
        return sorted(each, key=lambda one: (one.namespace, one.name))


def _group_by_job(pods: Iterable[Document]) -> dict[tuple[str, str], list[Any]]:
    """The pods by the namespace and the name of their job."""
    found: dict[tuple[str, str], list[Any]] = {}
    for pod in pods:
        namespace = documents.text(pod, "metadata", "namespace")
        found.setdefault((namespace, documents.label(pod, "kdist.dev/job")), []).append(pod)
    return found


def _read_config_maps(
    cluster: Cluster,
    pool: ThreadPoolExecutor,
    listed: Sequence[Document],
    known: dict[str, Document],
) -> list[Document]:
    """The jobs' own ConfigMaps among those listed; `known` holds them by uid and version and is
    brought up to date.
    """
    own = [
        each for each in listed if documents.label(each, "kdist.dev/job") == documents.name(each)
    ]
    versions = [
        ":".join(documents.text(each, "metadata", key) for key in ("uid", "resourceVersion"))
        for each in own
    ]
    asked = {
        version: pool.submit(
            _optional, partial(cluster.get, "v1", "ConfigMap", documents.name(each), _key(each)[0])
        )
        for each, version in zip(own, versions, strict=True)
        if version not in known
    }
    found = {version: known.get(version) or asked[version].result() for version in versions}
    known.clear()
    known.update({version: document for version, document in found.items() if document is not None})
    return list(known.values())


@contextmanager
def _side_by_side() -> Iterator[ThreadPoolExecutor]:
    """Threads for what may be asked at the same time. Who is interrupted does not wait for a server
    that is away.
    """
    pool, patient = ThreadPoolExecutor(_THREADS), True
    try:
        yield pool
    except KeyboardInterrupt:
        patient = False
        raise
    finally:
        pool.shutdown(wait=patient, cancel_futures=not patient)


def _one_of_many(
    cluster: Cluster, config_map: Document, workloads: dict[Any, Any], pods: Sequence[Any]
) -> Snapshot:
    backend = _find_backend(documents.annotation(config_map, BACKEND))
    namespace, name = _key(config_map)
    workload = workloads.get((backend.name, namespace, name)) if backend is not None else None
    state = backend.read(workload) if backend is not None and workload is not None else None
    first = sorted(
        (read_pod(pod) for pod in pods), key=lambda pod: (not pod.working, pod.index or 0)
    )[:1]
    reports = Agents(cluster, namespace=namespace, forwards=0).ask(first)
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
    return _optional(lambda: cluster.get(backend.api_version, backend.kind, name, namespace))


def _find_nodes(cluster: Cluster, pods: Sequence[Pod]) -> dict[str, Any]:
    """All nodes while a pod looks for one; the nodes of pods that are not well; none while all is
    well.
    """
    names = {
        pod.node
        for pod in pods
        if pod.node and not pod.over and (pod.deleting or pod.lost or not pod.ready)
    }
    homeless = any(not pod.scheduled and not pod.over for pod in pods)
    if homeless or len(names) > _FEW_NODES:
        every = {documents.name(node): node for node in _listed(lambda: cluster.list("v1", "Node"))}
        return every if homeless else {name: every[name] for name in sorted(names) if name in every}
    found = {name: _find_node(cluster, name) for name in sorted(names)}
    return {name: node for name, node in found.items() if node is not None}


def _find_node(cluster: Cluster, name: str) -> Any:
    return _permitted(lambda: cluster.get("v1", "Node", name), None)


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
    """The claim; an empty document if it does not exist, None if we may not know."""
    return _permitted(
        lambda: (
            _optional(lambda: cluster.get("v1", "PersistentVolumeClaim", name, namespace)) or {}
        ),
        None,
    )


def _find_admission(cluster: Cluster, namespace: str, workload: Document | None) -> Any:
    """What Kueue says of a job that a queue admits."""
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
    """All deployments that we may see: a controller's may have any name and namespace."""
    return _listed(lambda: cluster.list("apps/v1", "Deployment", all_namespaces=True))


def _owners(document: Document) -> Iterator[str]:
    yield documents.label(document, "kueue.x-k8s.io/job-uid")
    yield from (
        documents.text(owner, "uid")
        for owner in documents.items(document, "metadata", "ownerReferences")
    )


def _optional(ask: Callable[[], _T]) -> _T | None:
    try:
        return ask()
    except NotFoundError:
        return None


def _listed(ask: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What the server lists; nothing where we may not know."""
    return _permitted(ask, [])


def _permitted(ask: Callable[[], _T], otherwise: _T) -> _T:
    """What the server says, or `otherwise` where we may not know, or it has no such thing."""
    from kdist.cluster import ApiError

    try:
        return ask()
    except ApiError as error:
        if error.status in (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND):
            return otherwise
        raise
