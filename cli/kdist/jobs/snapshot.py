"""Which events are about a job: those of its pods, present and past, of its workload and of its
volume claims.

The events of a namespace for whoever looks again and again: listed once, and from then on watched.

Takes away the pods of work that is over, on the kind of workload that cannot end: whoever sees it
does it.

Fetches all that a `Snapshot` holds: first what every job has, at the same time; then what the first
answers ask for.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

from kdist import backends
from kdist.errors import KdistError, NotFoundError
from kdist.jobs.agents import Agents
from kdist.status import BACKEND, OUTCOME, ExitRecord, Phase, Pod, Snapshot, documents, read_pod
from kdist.status.documents import Document

if TYPE_CHECKING:
    from kdist.cluster import Cluster

_MAKERS = (
    "Job",
    "JobSet",
    "TrainJob",
    "PyTorchJob",
    "StatefulSet",
    "Workload",
    "ConfigMap",
    "PodDisruptionBudget",
)


def is_about(event: Document, name: str, pods: Iterable[Document], claims: Collection[str]) -> bool:
    """Whether the event is about something of the job. Names decide: an event outlives what it is
    about.
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
        return kind in _MAKERS
    # A JobSet makes Jobs with a name and a number of their own.
    return kind == "Job" and re.fullmatch(rf"{re.escape(name)}-[a-z]+-\d+", about) is not None


def is_pod_name(pod: str, name: str) -> bool:
    """Whether a pod of the job `name` may be called so, on any kind of workload."""
    made = r"(-(worker|master|node|trainer)(-\d+){1,2}|-\d+)(-[a-z0-9]{5})?"
    return re.fullmatch(re.escape(name) + made, pod) is not None


class Events:
    """Events of one namespace as they are now; a shared namespace has thousands, which are too many
    to list each second.

    Where they may be listed and not watched, or the watch has ended, the next look lists them anew.
    """

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._known: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._watching: threading.Thread | None = None

    def read(self) -> list[dict[str, Any]]:
        """All that are known of. Raises as `Cluster.list` does."""
        if self._watching is None or not self._watching.is_alive():
            listed, version = self._cluster.list_with_version(
                "v1", "Event", namespace=self._namespace
            )
            self._known = {_event_key(each): each for each in listed}
            if version:  # else there is no place to go on from
                self._watching = threading.Thread(target=self._watch, args=(version,), daemon=True)
                self._watching.start()
        with self._lock:
            return list(self._known.values())

    def _watch(self, version: str) -> None:
        try:
            for change, document in self._cluster.watch(
                "v1", "Event", namespace=self._namespace, since=version
            ):
                with self._lock:
                    if change == "DELETED":
                        self._known.pop(_event_key(document), None)
                    else:
                        self._known[_event_key(document)] = document
        except KdistError:
            return  # the next look lists, and says what is wrong


def _event_key(event: dict[str, Any]) -> str:
    metadata = event.get("metadata") or {}
    return str(metadata.get("uid") or metadata.get("name"))


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
        listed = pool.submit(
            lambda: cluster.list("v1", "Pod", namespace=place, selector=f"kdist.dev/job={name}")
        )
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
            raise NotFoundError(
                f"there is no job {name} in namespace {place}", next_command=f"kdist get -n {place}"
            )
        admission = pool.submit(_find_admission, cluster, place, workload)
        wanted = closely and workload is not None and not pod_documents
        deployments = pool.submit(_find_deployments, cluster) if wanted else None
        state = backend.read(workload) if backend is not None and workload is not None else None
        about = tuple(
            each for each in heard.result() if is_about(each, name, pod_documents, claims.result())
        )
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


def list_snapshots(
    cluster: Cluster,
    namespace: str | None = None,
    *,
    all_namespaces: bool = False,
    selector: str = "",
    known: dict[str, Document] | None = None,
) -> list[Snapshot]:
    """Every job as it is now, without events, nodes and claims; of each job one agent is asked.
    Raises as `snapshot` does.

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
        pods: dict[tuple[str, str], list[Any]] = {}
        for pod in listed.result():
            pods.setdefault(
                (
                    documents.text(pod, "metadata", "namespace"),
                    documents.label(pod, "kdist.dev/job"),
                ),
                [],
            ).append(pod)
        each = pool.map(
            lambda one: _one_of_many(cluster, one, workloads, pods.get(_key(one), [])), config_maps
        )
        return sorted(each, key=lambda one: (one.namespace, one.name))


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
