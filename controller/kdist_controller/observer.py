"""Observes one TrainingJob: puts together what the cache has of it, and fetches the little that
the cache has not.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from kdist import backends, deploy
from kdist.backends import is_made_for
from kdist.cluster import Cluster
from kdist.errors import NotFoundError
from kdist.manifest import find_owner
from kdist.status import BACKEND, ExitRecord, documents
from kdist_controller.agent_poller import AgentPoller
from kdist_controller.cache import Cache, JobObjects
from kdist_controller.executor import strip
from kdist_controller.node_cache import NodeCache
from kdist_controller.node_recovery import NodeRecovery
from kdist_controller.observation import ChildKey, Observed
from kdist_controller.progress import is_terminal
from kdist_controller.resource import JobKey, Resource

Document = dict[str, Any]
_CLAIM = "PersistentVolumeClaim"


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
            return None
        resource = Resource(found.resource)
        own, rival = self._own(key, found), None
        if own is not None and not resource.owns(own):
            own, rival = None, own
        name = documents.annotation(own, BACKEND) or documents.text(resource.status, "backend")
        workload = None
        if name in backends.NAMES:
            kind = backends.get(name)
            workload = found.objects.get(ChildKey(kind.api_version, kind.kind, key.name))
        children = {
            child: document
            for child, document in found.objects.items()
            if find_owner(document) == key.name
            and (resource.owns(document) or child.kind == _CLAIM)
            and document is not workload
            and child != _own_key(key)
        }
        pods = [pod for pod in found.pods.values() if is_made_for(pod, key.name)]
        outlook = self._recovery.outlook(key)
        return Observed(
            resource,
            config_map=own,
            workload=workload,
            children=children,
            pods=pods,
            reports=self._poller.answers(key),
            kinds=self.kinds,
            result=self._find_result(resource) if own is not None and workload is None else None,
            rival=rival,
            diagnosis=self._poller.diagnosis(key),
            nodes=self._nodes.find(pods),
            decisions=outlook.decisions,
            held=outlook.held,
            trouble=trouble,
            now=time.time(),
        )

    def _own(self, key: JobKey, found: JobObjects) -> Document | None:
        """The job's own ConfigMap, which is watched without its data."""
        known = found.objects.get(_own_key(key))
        if known is None or find_owner(known) != key.name:
            return None
        version = documents.text(known, "metadata", "resourceVersion")
        if found.own is not None and _version(found.own) >= _number(version):
            return found.own
        try:
            own = strip(self._cluster.get("v1", "ConfigMap", key.name, key.namespace))
        except NotFoundError:
            return None
        own |= {"apiVersion": "v1", "kind": "ConfigMap"}
        self._cache.put_own(key, own)
        return own

    def _find_result(self, resource: Resource) -> ExitRecord | None:
        """How the run of a job without workload has ended, if that is not known yet."""
        if is_terminal(resource.status):
            return None
        return deploy.find_result(self._cluster.within(resource.key.namespace), resource.key.name)


def _own_key(key: JobKey) -> ChildKey:
    return ChildKey("v1", "ConfigMap", key.name)


def _version(document: Document) -> int:
    return _number(documents.text(document, "metadata", "resourceVersion"))


def _number(version: str) -> int:
    return int(version) if version.isdecimal() else 0
