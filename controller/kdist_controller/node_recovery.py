"""Recovers jobs from node loss, as `kdist recover` does, on threads of its own, and keeps them from
machines with faults, as `kdist recover --avoid` does. It reads everything at the moment of the
decision, and polls the agents that are left. `NodeCache` keeps the nodes that are not ready: a job
with pods on one of them needs recovery. Its times are in `kdist.recovery.decision`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from kdist.cluster import ApiError, Cluster
from kdist.errors import Code, KdistError, NotFoundError
from kdist.recovery import (
    AVOID_SECONDS,
    HeldVolume,
    PodDecision,
    avoid,
    decide,
    fetch_held_volumes,
    observe,
    replace_pods,
)
from kdist.status import AvoidedNode, Pod, documents
from kdist.status.snapshot import is_silent
from kdist_controller.actions import Notice
from kdist_controller.agent_poller import Route, ask_agents
from kdist_controller.cache import Cache
from kdist_controller.executor import make_target, write_event
from kdist_controller.observation import Observed
from kdist_controller.resource import JobKey, Resource
from kdist_controller.work_queue import WorkQueue

Document = dict[str, Any]
_log = logging.getLogger(__name__)
_THREADS: Final = 4
_SHARE: Final = 2
"""Threads that one namespace may keep busy."""
_PAUSE_SECONDS: Final = 2.0
_LONGEST_PAUSE: Final = 10.0
_MOST_AVOIDED: Final = 8
"""Nodes that a job avoids at a time: where still more have faults, it is not the machines."""
_LONGEST_REASON: Final = 300
_MOST_SEEN: Final = 4096
"""Nodes that are remembered of a job."""
_FINAL: Final = (HTTPStatus.BAD_REQUEST, HTTPStatus.FORBIDDEN, HTTPStatus.UNPROCESSABLE_ENTITY)
"""What the API server answers again however often it is asked; webhooks refuse with the first."""
_PASSING: Final = (Code.NOT_FOUND, Code.TIMEOUT, Code.UNREACHABLE)


def trim_node(node: Document) -> Document:
    """A node without what no decision needs."""
    metadata = node.get("metadata") or {}
    ready = documents.condition(node, "Ready")
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": metadata.get("name"), "uid": metadata.get("uid")},
        "status": {"conditions": [dict(ready)] if ready else []},
    }


class NodeCache:
    """The nodes that are not ready. Its methods return the jobs that a change concerns."""

    def __init__(self, jobs: Cache) -> None:
        self._jobs = jobs
        self._unready: dict[str, Document] = {}
        self._lock = threading.Lock()

    def put(self, node: Document) -> set[JobKey]:
        name = documents.name(node)
        with self._lock:
            was = name in self._unready
            if is_silent(node):
                self._unready[name] = node
            else:
                self._unready.pop(name, None)
        return self._jobs.find_jobs_on(name) if was or is_silent(node) else set()

    def drop(self, node: Document) -> set[JobKey]:
        with self._lock:
            self._unready.pop(documents.name(node), None)
        return self._jobs.find_jobs_on(documents.name(node))

    def replace(
        self,
        kind: str,  # noqa: ARG002 - that of every sink
        namespace: str | None,  # noqa: ARG002
        listed: Iterable[Document],
    ) -> set[JobKey]:
        """Keep these nodes as all that there are."""
        with self._lock:
            before = set(self._unready)
            self._unready.clear()
        changed = [self.put(node) for node in listed]
        return set().union(*changed, *map(self._jobs.find_jobs_on, before))

    def find(self, pods: Iterable[Document]) -> dict[str, Document]:
        """The nodes of these pods that are not ready, by name."""
        names = {documents.text(pod, "spec", "nodeName") for pod in pods}
        with self._lock:
            return {name: self._unready[name] for name in names if name in self._unready}


@dataclass(frozen=True)
class Avoidance:
    """After how many faults within a run its job avoids a machine, 0 for never; for how long."""

    faults: int = 2
    seconds: float = AVOID_SECONDS


AVOIDANCE: Final = Avoidance()


def find_faulty(
    observed: Observed, avoidance: Avoidance, seen: Container[str]
) -> list[AvoidedNode]:
    """The machines that the job is to avoid from now on, by what its agents tell of those that its
    pods were `seen` on. One that it has avoided before, until its time was over or a person allowed
    it, takes a further fault.
    """
    if observed.status.phase.terminal:
        return []
    counted = observed.counted_faults
    known = {each.node: each for each in observed.status.avoided}
    used = {pod.node for pod in observed.alive if not pod.deleting}
    # marked, and left by a controller that has died before it could delete the pod
    leaving = [each for each in known.values() if each.faults and each.node in used]
    new: dict[str, AvoidedNode] = {}
    for each in observed.status.machine_faults:
        node, reason = each.machine, each.summary[:_LONGEST_REASON]
        least = max(avoidance.faults, counted.get(node, 0) + 1)
        is_new = node in seen and node not in known
        if is_new and avoidance.faults and each.faults >= least:
            until = round(observed.now + avoidance.seconds)
            new[node] = AvoidedNode(node, until, reason, each.faults)
    return [*leaving, *list(new.values())[: max(0, _MOST_AVOIDED - len(known))]]


@dataclass(frozen=True)
class Outlook:
    """What is known of the pods of one job whose nodes do not answer: the decision about each, and
    the volumes that keep new pods waiting.
    """

    decisions: tuple[PodDecision, ...] = ()
    held: tuple[HeldVolume, ...] = ()


@dataclass
class _Machines:
    """What is known of the machines of one job.

    Attributes:
        uid: of the TrainingJob.
        seen: the nodes on which pods of it were, the latest at the end.
        refused: the faults of each node that it cannot be kept from.
        faulty: the nodes to keep it from, and how it was observed then.
    """

    uid: str
    seen: dict[str, None] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    faulty: tuple[Observed, list[AvoidedNode]] | None = None

    def note(self, nodes: Collection[str]) -> None:
        """Remember nodes on which pods are now, and forget the first ones of too many."""
        before = [each for each in self.seen if each not in nodes]
        self.seen = dict.fromkeys([*before, *nodes][-_MOST_SEEN:])
        self.refused = {node: each for node, each in self.refused.items() if node in self.seen}


@dataclass
class _AffectedJob:
    """A job with pods on nodes that do not answer; kept until the pods that replace them run."""

    lost: set[str]
    observed: Observed
    outlook: Outlook = Outlook()


class NodeRecovery:
    """Replaces the pods of nodes that are gone, and takes those of machines with faults elsewhere,
    if `leads` says that this replica may act. `notify` receives each job about which something new
    is known.
    """

    def __init__(
        self,
        cluster: Cluster,
        cache: Cache,
        route: Route,
        *,
        leads: Callable[[], bool],
        notify: Callable[[JobKey], None],
        avoidance: Avoidance = AVOIDANCE,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._route = route
        self._leads = leads
        self._notify = notify
        self._queue = WorkQueue(share=_SHARE)
        self._avoidance = avoidance
        self._avoiding = WorkQueue(share=_SHARE)
        self._machines: dict[JobKey, _Machines] = {}
        self._jobs: dict[JobKey, _AffectedJob] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the threads, which end with the process."""
        self._queue.start(self._recover, threads=_THREADS, name="recovery")
        self._avoiding.start(self.avoid_nodes, threads=_THREADS, name="avoidance")

    def outlook(self, key: JobKey) -> Outlook:
        """What is known of a job; empty if all of its nodes answer."""
        with self._lock:
            known = self._jobs.get(key)
            return Outlook() if known is None else known.outlook

    def plan(self, observed: Observed) -> None:
        """Recover a job for as long as one of its nodes does not answer, and until the pods
        that replace the lost ones run.
        """
        key = observed.resource.key
        self._plan_avoidance(observed)
        suspect = {name for pod in observed.alive if (name := pod.node) in observed.nodes}
        with self._lock:
            known = self._jobs.get(key)
            if known is None and suspect:
                self._jobs[key] = _AffectedJob(suspect, observed)
            elif known is not None and not suspect and all(pod.working for pod in observed.alive):
                del self._jobs[key]
            elif known is not None:
                known.lost |= suspect
                known.observed = observed
        if suspect and known is None:
            self._queue.add(key)

    def _plan_avoidance(self, observed: Observed) -> None:
        """Have a job avoid nodes. One that waits to be tried again goes on waiting."""
        key, uid = observed.resource.key, observed.resource.uid
        nodes = {documents.text(pod, "spec", "nodeName") for pod in observed.pods} - {""}
        with self._lock:
            known = self._machines.get(key)
            if known is None or known.uid != uid:
                known = self._machines[key] = _Machines(uid)
            known.note({*observed.counted_faults, *nodes})
            found = find_faulty(observed, self._avoidance, known.seen)
            faulty = [
                each for each in found if (each.faults or 0) > known.refused.get(each.node, 0)
            ]
            before = set() if known.faulty is None else {each.node for each in known.faulty[1]}
            known.faulty = (observed, faulty) if faulty else None
        if {each.node for each in faulty} - before:
            self._avoiding.add(key)

    def forget(self, key: JobKey) -> None:
        with self._lock:
            self._jobs.pop(key, None)
            self._machines.pop(key, None)
        self._avoiding.forgive(key)

    def avoid_nodes(self, key: JobKey) -> float | None:
        """Keep a job from its faulty nodes; returns the seconds until the next time. What cannot
        pass is tried again after the next fault of the machine.
        """
        with self._lock:
            known = self._machines.get(key)
            planned = None if known is None else known.faulty
        if known is None or planned is None:
            return None
        (observed, faulty), left = planned, []
        for each in faulty:
            if not self._leads():
                return None
            try:
                self._avoid(observed, each, known)
            except KdistError as error:
                _log.warning("%s: %s is not avoided: %s", key, each.node, error)
                left.append(each)
        with self._lock:
            if known.faulty is planned:
                known.faulty = (observed, left) if left else None
        if left:
            return self._avoiding.count_failure(key)
        self._avoiding.forgive(key)
        return None

    def _avoid(self, observed: Observed, node: AvoidedNode, known: _Machines) -> None:
        """Keep a job from a node, or tell that it cannot be. Raises `KdistError` for what may pass
        later.
        """
        cluster = self._cluster.within(observed.resource.key.namespace)
        try:
            avoid(make_target(cluster, observed), node)
        except KdistError as error:
            is_final = error.code not in _PASSING
            if isinstance(error, ApiError):
                is_final = error.status in _FINAL
            if is_final or error.code is Code.TIMEOUT:
                words = f"{node.node} is not avoided ({node.reason}): {error}"
                notice = Notice("NodeNotAvoided", words, warning=True)
                write_event(cluster, observed.resource, notice, identity=node.node)
            if not is_final:
                raise
            with self._lock:
                known.refused[node.node] = node.faults or 0

    def _recover(self, key: JobKey) -> float | None:
        """Decide about the pods of a job once; returns the seconds until the next time."""
        try:
            return self._decide(key)
        except NotFoundError:
            self.forget(key)
            return None
        except KdistError as error:
            _log.warning("%s: cannot say whether its nodes are gone: %s", key, error)
            return _PAUSE_SECONDS

    def _decide(self, key: JobKey) -> float | None:
        with self._lock:
            known = self._jobs.get(key)
            if known is None:
                return None
            lost, observed = sorted(known.lost), known.observed
        if not self._leads():
            return _PAUSE_SECONDS

        def ask(pods: Sequence[Pod]) -> dict[str, documents.Document]:
            copies = self._cache.read(key).pods
            running = [copies[pod.name] for pod in pods if pod.running and pod.name in copies]
            return ask_agents(self._route, key.namespace, running)

        cluster = self._cluster.within(key.namespace)
        target = make_target(cluster, observed)
        situation = observe(target, ask=ask)
        decisions = decide(situation)
        if not self._leads():  # the answers may have taken long
            return _PAUSE_SECONDS
        found = replace_pods(target, situation, decisions)
        resource = self._cache.read(key).resource
        for each in found.decisions:
            done = found.replacements.get(each.pod)
            if resource is not None and done is not None and done.marked:
                words = f"{each.pod} is given up: {each.message}"
                notice = Notice("PodReplaced", words, warning=True)
                write_event(cluster, Resource(resource), notice, identity=each.uid)
        held = [volume for node in lost for volume in fetch_held_volumes(target, node)]
        with self._lock:
            if (known := self._jobs.get(key)) is not None:
                known.outlook = Outlook(found.decisions, tuple(held))
        self._notify(key)
        pauses = [each.retry_seconds for each in found.decisions if each.retry_seconds]
        return min([_LONGEST_PAUSE, *pauses])
