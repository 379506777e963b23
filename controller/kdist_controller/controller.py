"""Connects the parts of the controller: informers fill the work queue, and each worker takes a job,
observes it, reconciles it, and executes the changes. `Observer` combines what the cache, the agents
and the node recovery know of a job.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kdist import backends, deploy
from kdist.backends import DEPENDENT_KINDS, Backend, is_made_for, workload_kinds
from kdist.cluster import Cluster
from kdist.errors import KdistError
from kdist.manifest import AVOID_LABEL, JOB_LABEL, ForeignError, ObjectKey
from kdist.spec import API_VERSION, KIND
from kdist.status import documents
from kdist_controller.agent_poller import AgentPoller, Route
from kdist_controller.cache import Cache, Informer
from kdist_controller.election import Election
from kdist_controller.executor import Executor, trim_own
from kdist_controller.metrics import Metrics
from kdist_controller.node_recovery import AVOIDANCE, Avoidance, NodeCache, NodeRecovery, trim_node
from kdist_controller.observation import Observed
from kdist_controller.reconcile import reconcile
from kdist_controller.resource import JobKey, Resource
from kdist_controller.status import is_terminal
from kdist_controller.work_queue import WorkQueue

Document = dict[str, Any]
_NODE: Final = ("v1", "Node")
_WORKERS: Final = 4
_REDISCOVERY_SECONDS: Final = 60.0
_REQUEUE_SECONDS: Final = 0.05
"""After a change, for what it has caused to arrive."""
_STUCK_SECONDS: Final = 300.0
_END_SECONDS: Final = 10.0
_LOST: Final = 1
"""Exit code of a leader that has lost its Lease."""
_log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class Observer:
    """Observes TrainingJobs.

    Attributes:
        cluster: the cluster.
        cache: the copies of their objects.
        poller: what their agents have said.
        nodes: the nodes that are not ready.
        recovery: what was decided about their pods on these.
        kinds: (API version, kind) of everything that the cluster serves.
        foreign: by the job, an object that has the name of one of its own and is not its. It need
            not bear the job's label, so it is looked at again with each observation.
    """

    cluster: Cluster
    cache: Cache
    poller: AgentPoller
    nodes: NodeCache
    recovery: NodeRecovery
    kinds: Collection[tuple[str, str]] = ()
    foreign: dict[JobKey, ObjectKey] = field(default_factory=dict)

    def _check_foreign(self, resource: Resource) -> dict[ObjectKey, Document]:
        """That object, if it is still there and still not the job's."""
        if (known := self.foreign.get(resource.key)) is None:
            return {}
        found = self.cluster.look_up(*known, resource.key.namespace)
        if found is None or resource.owner().owns(found, known.kind):
            self.foreign.pop(resource.key, None)
            return {}
        return {known: found}

    def observe(self, key: JobKey, *, trouble: str = "") -> Observed | None:
        """One TrainingJob as it is now; None if it does not exist. `trouble` is why its last
        changes failed. Raises `KdistError` if the API server does not answer.
        """
        found = self.cache.read(key)
        if found.resource is None:
            self.foreign.pop(key, None)
            return None
        resource = Resource(found.resource, found.results)
        name, objects, pods = key.name, found.objects, found.pods.values()
        # A label selects, ownership decides: what is not the TrainingJob's own counts for nothing.
        children: dict[ObjectKey, Document] = {}
        rivals: dict[ObjectKey, Document] = {}
        for each, document in objects.items():
            (children if resource.owns(document) else rivals)[each] = document
        backend = _find_backend(resource, children)
        markers = {
            key: each for key, each in children.items() if documents.label(each, AVOID_LABEL)
        }
        children = {key: each for key, each in children.items() if key not in markers}
        known = children.pop(ObjectKey("v1", "ConfigMap", name), None)
        own = None if known is None else self._read_own(resource, known, found.own)
        workload, makers = None, []
        if backend is not None:
            workload = children.pop(ObjectKey(backend.api_version, backend.kind, name), None)
        if backend is not None and workload is not None:
            # the workload, and what it has created to make the pods, in a chain of owners
            makers = [documents.uid(workload)]
            for step in backend.pod_owners(name):
                made = objects.get(ObjectKey(*step))
                if made is None or makers[-1] not in _owners(made):
                    break
                makers.append(documents.uid(made))
        owner = resource.owner(frozenset(makers))
        own_pods = [dict(pod) for pod in pods if owner.owns(pod)]
        uids = {documents.uid(each) for each in objects.values()}
        result = None  # how the run of a job without workload has ended, if that is not known yet
        if own is not None and workload is None and not is_terminal(resource.status):
            result = deploy.find_result(self.cluster, resource.owner())
        outlook = self.recovery.outlook(key)
        return Observed(
            resource,
            backend=backend,
            config_map=own,
            workload=workload,
            children=children,
            markers=list(markers.values()),
            pods=own_pods,
            leaving=[
                pod
                for pod in pods
                if is_made_for(pod, name) and not owner.owns(pod) and uids.isdisjoint(_owners(pod))
            ],
            makers=frozenset(makers),
            rivals={
                **{each: one for each, one in rivals.items() if documents.uid(one) not in makers},
                **self._check_foreign(resource),
            },
            reports=self.poller.answers(key),
            silent=self.poller.silent(key),
            kinds=self.kinds,
            result=result,
            diagnosis=self.poller.diagnosis(key),
            nodes=self.nodes.find(own_pods),
            decisions=outlook.decisions,
            held=outlook.held,
            trouble=trouble,
            now=time.time(),
        )

    def _read_own(
        self, resource: Resource, known: Document, fetched: Document | None
    ) -> Document | None:
        """All of the job's own ConfigMap, which is watched without its data: as it was fetched
        last, unless there is a newer version.
        """
        if fetched is not None and _version(fetched) >= _version(known):
            own = fetched
        else:
            key = resource.key
            found = self.cluster.look_up("v1", "ConfigMap", key.name, key.namespace)
            if found is None:
                return None
            own = trim_own(found) | {"apiVersion": "v1", "kind": "ConfigMap"}
            self.cache.put_own(key, own)
        return own if resource.owns(own) else None


def _find_backend(resource: Resource, children: Mapping[ObjectKey, Document]) -> Backend | None:
    """The kind of a job's workload, by its status or by the workload that it has."""
    chosen = documents.text(resource.status, "backend")
    if chosen in backends.NAMES:
        return backends.get(chosen)
    for each in map(backends.get, backends.NAMES):
        if ObjectKey(each.api_version, each.kind, resource.key.name) in children:
            return each
    return None


def _owners(document: Document) -> set[str]:
    owners = documents.items(document, "metadata", "ownerReferences")
    return {documents.text(each, "uid") for each in owners}


def _version(document: Document) -> int:
    version = documents.text(document, "metadata", "resourceVersion")
    return int(version) if version.isdecimal() else 0


class Controller:
    """The controller of the TrainingJobs of these namespaces, by default of all. One of several
    replicas leads, by `election`. `avoidance` says when a job avoids a machine.
    """

    def __init__(
        self,
        cluster: Cluster,
        election: Election,
        route: Route,
        namespaces: Sequence[str],
        avoidance: Avoidance = AVOIDANCE,
    ) -> None:
        self._cluster = cluster
        self._election = election
        self._namespaces = namespaces or (None,)
        self._queue = WorkQueue(share=_WORKERS - 1)  # of each namespace, so that others get a turn
        self._cache = Cache()
        self._trouble: dict[JobKey, str] = {}
        self.metrics = Metrics(
            self._phases, lambda: len(self._queue), self._count_failing, self._avoided
        )
        self._poller = AgentPoller(cluster, route, metrics=self.metrics, notify=self._queue.add)
        self._nodes = NodeCache(self._cache)
        self._recovery = NodeRecovery(
            cluster,
            self._cache,
            route,
            leads=lambda: election.leads,
            notify=self._queue.add,
            avoidance=avoidance,
        )
        self._observer = Observer(
            cluster=cluster,
            cache=self._cache,
            poller=self._poller,
            nodes=self._nodes,
            recovery=self._recovery,
        )
        self._informers: dict[tuple[str, str, str | None], Informer] = {}
        self._threads: list[threading.Thread] = []
        self._synced = threading.Event()
        self._stopping = threading.Event()

    @property
    def ready(self) -> bool:
        """Whether it leads and has seen all objects, or stands by for the replica that leads."""
        return self._synced.is_set() if self._election.leads else self._election.heard

    @property
    def healthy(self) -> bool:
        """Whether its workers live, and none of them is stuck."""
        alive = all(thread.is_alive() for thread in self._threads)
        return alive and self._queue.longest() < _STUCK_SECONDS

    def run(self) -> None:
        """Wait to lead, then look after the TrainingJobs until `stop`; finishes what is being done,
        and lets another replica lead.
        """
        try:
            if self._election.acquire():
                self._lead()
        finally:
            self.stop()
            for thread in self._threads:
                thread.join(_END_SECONDS)
            self._election.release()

    def _lead(self) -> None:
        self._election.keep(_end)
        self.metrics.leader.set(1)
        self._discover()
        for informer in list(self._informers.values()):
            while not informer.synced.wait(1.0):
                if self._stopping.is_set():
                    return
        self._synced.set()
        _log.info("%d TrainingJobs are known", len(self._cache.list_jobs()))
        self._poller.start()
        self._recovery.start()
        self._threads = self._queue.start(self._reconcile, threads=_WORKERS, name="worker")
        while not self._stopping.wait(_REDISCOVERY_SECONDS):
            try:
                self._discover()
            except KdistError as error:
                _log.warning("cannot ask what the cluster serves: %s", error)

    def stop(self) -> None:
        self._stopping.set()
        self._queue.close()
        self._election.stop()

    def _discover(self) -> None:
        """Watch each kind of objects that the cluster serves and that is not watched yet."""
        self._observer.kinds = kinds = self._cluster.kinds()
        wanted = [(API_VERSION, KIND), ("v1", "Pod"), *DEPENDENT_KINDS, *workload_kinds()]
        for kind in wanted:
            for namespace in self._namespaces:
                key = (*kind, namespace)
                if key in self._informers or kind not in kinds:
                    continue
                self._informers[key] = informer = Informer(
                    self._cluster,
                    self._cache,
                    kind,
                    namespace=namespace,
                    selector="" if kind[1] == KIND else JOB_LABEL,
                    metadata_only=kind in DEPENDENT_KINDS,
                    notify=self._add,
                )
                informer.start()
        # without the right to watch nodes no pod of a lost node is replaced
        key = (*_NODE, None)
        if key not in self._informers and self._cluster.can_i("watch", *_NODE):
            self._informers[key] = informer = Informer(
                self._cluster, self._nodes, _NODE, namespace=None, trim=trim_node, notify=self._add
            )
            informer.start()

    def _add(self, keys: Iterable[JobKey]) -> None:
        for key in keys:
            self._queue.add(key)

    def _phases(self) -> list[str]:
        jobs = self._cache.list_jobs()
        return [documents.text(document, "status", "phase") or "Pending" for _, document in jobs]

    def _avoided(self) -> list[tuple[str, str, str]]:
        return [
            (*key, words.partition(" ")[0])
            for key, document in self._cache.list_jobs()
            if not is_terminal(documents.mapping(document, "status"))
            for words in documents.texts(document, "status", "avoidedNodes")
        ]

    def _reconcile(self, key: JobKey) -> float | None:
        """Reconcile a job; returns the seconds until the next time, if it is known."""
        if not self._election.leads:
            return 1.0
        with self.metrics.reconcile_seconds.time():
            try:
                after = self._reconcile_once(key)
            except KdistError as error:
                return self._fail(key, str(error), expected=True)
            except Exception as error:  # noqa: BLE001 - the user reads of it in the status
                return self._fail(key, f"{type(error).__name__}: {error}", expected=False)
        self._queue.forgive(key)
        self._trouble.pop(key, None)
        return after

    def _reconcile_once(self, key: JobKey) -> float | None:
        observed = self._observer.observe(key, trouble=self._trouble.get(key, ""))
        if observed is None:
            self._poller.forget(key)
            self._recovery.forget(key)
            return None
        changes = reconcile(observed)
        self._poller.plan(observed, poll_now=changes.poll_now)
        self._recovery.plan(observed)
        try:
            Executor(self._cluster, self._cache, observed).execute(changes)
        except ForeignError as error:
            if error.found is None:
                raise
            self._observer.foreign[key] = error.found
            return _REQUEUE_SECONDS
        return _REQUEUE_SECONDS if changes.actions else changes.requeue_after

    def _count_failing(self) -> int:
        return len(self._trouble) if self._election.leads else 0

    def _fail(self, key: JobKey, reason: str, *, expected: bool) -> float:
        self.metrics.errors.inc()
        self._trouble[key] = reason
        pause = self._queue.count_failure(key)
        _log.log(
            logging.WARNING if expected else logging.ERROR,
            "%s: %s; again in %.1f s",
            key,
            reason,
            pause,
            exc_info=not expected,
        )
        return pause


def _end() -> None:
    """End at once: another replica leads, and what this one does now could meet what that one
    does.
    """
    _log.error("the Lease is lost")
    logging.shutdown()
    os._exit(_LOST)
