"""Fetches a `Snapshot` of every job of a namespace, with as few requests as the jobs allow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from kdist import backends
from kdist.backends import Backend
from kdist.jobs.agents import Agents
from kdist.jobs.snapshot import find_backend, or_empty, or_none, thread_pool
from kdist.manifest import JOB_LABEL
from kdist.status import BACKEND, Snapshot, documents, find_owning_resource, read_pod
from kdist.status.documents import Document

if TYPE_CHECKING:
    from kdist.cluster import Cluster


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
    from kdist.cluster import list_resources

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

    with thread_pool() as pool:
        listed = pool.submit(find, "v1", "Pod")
        listed_resources = pool.submit(
            list_resources, cluster, namespace, all_namespaces=all_namespaces, selector=selector
        )
        config_maps = _read_config_maps(
            cluster, pool, find("v1", "ConfigMap", metadata_only=True), known
        )
        kinds = _find_backends(config_maps)
        found = {
            kind.name: pool.submit(or_empty, partial(find, kind.api_version, kind.kind))
            for kind in kinds
        }
        workloads = {
            (name, *_key(each)): each for name, task in found.items() for each in task.result()
        }
        pods = _group_by_job(listed.result())
        resources = {_key(each): each for each in listed_resources.result()}
        each = pool.map(
            lambda one: _summarize(cluster, one, workloads, pods.get(_key(one), []), resources),
            config_maps,
        )
        without = {*pods, *resources}.difference(map(_key, config_maps))
        bare = pool.map(lambda key: _summarize_without(cluster, key, pods, resources), without)
        both = (one for one in (*each, *bare) if one is not None)
        return sorted(both, key=lambda one: (one.namespace, one.name))


def _find_backends(config_maps: Sequence[Document]) -> list[Backend]:
    """The workload kinds of these jobs."""
    names = {documents.annotation(each, BACKEND) for each in config_maps}
    return [backend for backend in map(find_backend, sorted(names)) if backend is not None]


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


def _group_by_job(pods: Iterable[Document]) -> dict[tuple[str, str], list[Any]]:
    """The pods by the namespace and the name of the job that has made them."""
    found: dict[tuple[str, str], list[Any]] = {}
    for pod in pods:
        namespace, name = (
            documents.text(pod, "metadata", "namespace"),
            documents.label(pod, JOB_LABEL),
        )
        if backends.is_made_for(pod, name):
            found.setdefault((namespace, name), []).append(pod)
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
            or_none, partial(cluster.get, "v1", "ConfigMap", documents.name(each), _key(each)[0])
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
