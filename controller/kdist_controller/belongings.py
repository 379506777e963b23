"""Sorts the objects that bear a job's label by whose they are. A label selects, ownership decides:
what is not the TrainingJob's own counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kdist import backends
from kdist.backends import Backend, is_made_for
from kdist.ownership import ObjectKey
from kdist.status import documents
from kdist_controller.cache import JobObjects
from kdist_controller.resource import Resource


@dataclass(frozen=True)
class Belongings:
    """The objects of one TrainingJob.

    Attributes:
        own: its ConfigMap.
        workload: the object that makes its pods.
        makers: uids of the workload, and of what that has created to make the pods.
        children: its other objects.
        pods: its pods.
        leaving: pods of a workload of its name that is gone: they end soon.
        rivals: objects with its label that are somebody else's.
    """

    own: documents.Document | None = None
    workload: documents.Document | None = None
    makers: frozenset[str] = frozenset()
    children: Mapping[ObjectKey, documents.Document] = field(default_factory=dict)
    pods: tuple[documents.Document, ...] = ()
    leaving: tuple[documents.Document, ...] = ()
    rivals: Mapping[ObjectKey, documents.Document] = field(default_factory=dict)


def find_backend(resource: Resource, found: JobObjects) -> Backend | None:
    """The kind of a job's workload: as its status says, else that of the workload that it has; None
    if it is not decided.
    """
    chosen = documents.text(resource.status, "backend")
    if chosen in backends.NAMES:
        return backends.get(chosen)
    for each in map(backends.get, backends.NAMES):
        key = ObjectKey(each.api_version, each.kind, resource.key.name)
        if key in found.objects and resource.owns(found.objects[key]):
            return each
    return None


def sort_objects(resource: Resource, found: JobObjects, backend: Backend | None) -> Belongings:
    """Sort what is known of a job.

    Args:
        resource: the TrainingJob.
        found: the objects with the job's label.
        backend: the kind of its workload; None if that is not decided.
    """
    name = resource.key.name
    children: dict[ObjectKey, documents.Document] = {}
    rivals: dict[ObjectKey, documents.Document] = {}
    for key, document in found.objects.items():
        (children if resource.owns(document) else rivals)[key] = document
    own = children.pop(ObjectKey("v1", "ConfigMap", name), None)
    workload = None
    if backend is not None:
        workload = children.pop(ObjectKey(backend.api_version, backend.kind, name), None)
    makers = _find_makers(found.objects, backend, workload)
    for key in [key for key, each in rivals.items() if _uid(each) in makers]:
        del rivals[key]  # made by the workload itself
    owner = resource.owner(makers)
    pods = tuple(pod for pod in found.pods.values() if owner.owns(pod))
    known = {_uid(each) for each in found.objects.values()}
    leaving = tuple(
        pod
        for pod in found.pods.values()
        if is_made_for(pod, name) and not owner.owns(pod) and known.isdisjoint(_owners(pod))
    )
    return Belongings(own, workload, makers, children, pods, leaving, rivals)


def _find_makers(
    objects: Mapping[ObjectKey, documents.Document],
    backend: Backend | None,
    workload: documents.Document | None,
) -> frozenset[str]:
    if backend is None or workload is None:
        return frozenset()
    found = {uid := _uid(workload)}
    for step in backend.pod_owners(documents.name(workload)):
        made = objects.get(ObjectKey(*step))
        if made is None or uid not in _owners(made):
            break
        found.add(uid := _uid(made))
    return frozenset(found)


def _owners(document: documents.Document) -> Iterable[str]:
    owners = documents.items(document, "metadata", "ownerReferences")
    return [documents.text(each, "uid") for each in owners]
