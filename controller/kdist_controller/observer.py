"""Observes one TrainingJob: puts together what the cache has of it, and fetches the little that
the cache has not.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from kdist import deploy
from kdist.cluster import Cluster
from kdist.errors import NotFoundError
from kdist.ownership import ObjectKey
from kdist.status import ExitRecord, documents
from kdist_controller.agent_poller import AgentPoller
from kdist_controller.belongings import find_backend, sort_objects
from kdist_controller.cache import Cache, JobObjects
from kdist_controller.executor import strip
from kdist_controller.node_cache import NodeCache
from kdist_controller.node_recovery import NodeRecovery
from kdist_controller.observation import Observed
from kdist_controller.progress import is_terminal
from kdist_controller.resource import JobKey, Resource

Document = dict[str, Any]


class Observer:
    """Observes TrainingJobs.

    Args:
        cluster: the cluster.
        cache: the copies of their objects.
        poller: what their agents have said.
        nodes: the nodes that are not ready.
        recovery: what was decided about their pods on these.

    Attributes:
        kinds: (API version, kind) of everything that the cluster serves.
    """

    def __init__(
        self,
        cluster: Cluster,
        cache: Cache,
        *,
        poller: AgentPoller,
        nodes: NodeCache,
        recovery: NodeRecovery,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._poller = poller
        self._nodes = nodes
        self._recovery = recovery
        self.kinds: Collection[tuple[str, str]] = ()
        self._foreign: dict[JobKey, ObjectKey] = {}

    def note_foreign(self, key: JobKey, found: ObjectKey) -> None:
        """Note that an object which is not this job's has the name of one of its own. It need not
        bear the job's label, so it is looked at again with each observation.
        """
        self._foreign[key] = found

    def _look_at_foreign(self, resource: Resource) -> dict[ObjectKey, Document]:
        """That object, if it is still there and still not the job's."""
        if (known := self._foreign.get(resource.key)) is None:
            return {}
        try:
            found = self._cluster.get(*known, resource.key.namespace)
        except NotFoundError:
            found = None
        if found is None or resource.owner().owns(found, known.kind):
            self._foreign.pop(resource.key, None)
            return {}
        return {known: found}

    def observe(self, key: JobKey, *, trouble: str = "") -> Observed | None:
        """One TrainingJob as it is now; None if it does not exist.

        Args:
            key: of the TrainingJob.
            trouble: why its last changes failed.

        Raises:
            KdistError: the API server does not answer.
        """
        found = self._cache.read(key)
        if found.resource is None:
            self._foreign.pop(key, None)
            return None
        resource = Resource(found.resource, found.results)
        backend = find_backend(resource, found)
        sorted_ = sort_objects(resource, found, backend)
        own = self._read_own(resource, found) if sorted_.own is not None else None
        pods = [dict(pod) for pod in sorted_.pods]
        outlook = self._recovery.outlook(key)
        return Observed(
            resource,
            backend=backend,
            config_map=own,
            workload=sorted_.workload,
            children=sorted_.children,
            pods=pods,
            leaving=sorted_.leaving,
            makers=sorted_.makers,
            rivals={**sorted_.rivals, **self._look_at_foreign(resource)},
            reports=self._poller.answers(key),
            silent=self._poller.silent(key),
            kinds=self.kinds,
            result=self._find_result(resource)
            if own is not None and sorted_.workload is None
            else None,
            diagnosis=self._poller.diagnosis(key),
            nodes=self._nodes.find(pods),
            decisions=outlook.decisions,
            held=outlook.held,
            trouble=trouble,
            now=time.time(),
        )

    def _read_own(self, resource: Resource, found: JobObjects) -> Document | None:
        """All of the job's own ConfigMap, which is watched without its data."""
        key = resource.key
        known = found.objects[_own_key(key)]
        version = documents.text(known, "metadata", "resourceVersion")
        if found.own is not None and _version(found.own) >= _number(version):
            own = found.own
        else:
            try:
                own = strip(self._cluster.get("v1", "ConfigMap", key.name, key.namespace))
            except NotFoundError:
                return None
            own |= {"apiVersion": "v1", "kind": "ConfigMap"}
            self._cache.put_own(key, own)
        return own if resource.owns(own) else None

    def _find_result(self, resource: Resource) -> ExitRecord | None:
        """How the run of a job without workload has ended, if that is not known yet."""
        if is_terminal(resource.status):
            return None
        return deploy.find_result(self._cluster, resource.owner())


def _own_key(key: JobKey) -> ObjectKey:
    return ObjectKey("v1", "ConfigMap", key.name)


def _version(document: Document) -> int:
    return _number(documents.text(document, "metadata", "resourceVersion"))


def _number(version: str) -> int:
    return int(version) if version.isdecimal() else 0
