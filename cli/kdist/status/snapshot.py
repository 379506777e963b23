"""A job's documents at one moment and the `JobStatus` that follows from them. Pure; an invalid
document gives less information and never raises.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from kdist.status import documents
from kdist.status.agent_status import AgentStatus, latest, read_all
from kdist.status.documents import Document
from kdist.status.exit_record import DONE, PEERS_LOST, STOPPED, ExitRecord
from kdist.status.job_status import Evidence, JobStatus, Nodes, WorkloadState, decide
from kdist.status.pod import Pod, read_pod

RUN_ID, BACKEND, RENDEZVOUS = "kdist.dev/run-id", "kdist.dev/backend", "kdist.dev/rendezvous"
NAMESPACE_VARIABLE = "KDIST_NAMESPACE"
"""Stands as `$(KDIST_NAMESPACE)` in the run id of objects that were rendered for any namespace."""
ASKED = "kdist.dev/asked"
"""Annotation of the job's ConfigMap: `suspended` or `stopped`, what the user asked for last."""
OUTCOME = "kdist.dev/outcome"
"""Annotation of a workload that cannot end by itself: the exit record of the work that is over."""
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_T = TypeVar("_T")


def read_status(
    config_map: Document,
    workload: Document | None,
    pods: Iterable[Document],
    reports: Mapping[str, object],
    *,
    state: WorkloadState | None,
    lost_nodes: Collection[str] = (),
    now: float | None = None,
    name: str = "",
    namespace: str = "",
) -> JobStatus:
    """The status of one job.

    Args:
        config_map: the job's ConfigMap, which carries the job itself.
        workload: the object that makes the pods, None if there is none.
        pods: the job's pods.
        reports: the agents' `/status` documents by pod.
        state: what the workload's kind reads from it.
        lost_nodes: names of nodes that are known not to answer.
        now: unix time of the reading.
        name: of the job, where its objects may be gone.
        namespace: of the job.
    """
    now = time.time() if now is None else now
    place = namespace or documents.text(config_map, "metadata", "namespace")
    run_id = documents.annotation(config_map, RUN_ID).replace(f"$({NAMESPACE_VARIABLE})", place)
    answering = {pod for pod, document in reports.items() if document}
    seen = _read_pods(pods, answering, lost_nodes)
    known = read_all(
        {pod.name: reports[pod.name] for pod in seen if pod.name in reports and not pod.over},
        run_id=run_id,
    )
    current = latest(known)
    nodes = _read_nodes(config_map, seen)
    record = _find_record(workload, seen, current)
    spec = documents.mapping(read_job(config_map), "spec")
    backend = documents.annotation(config_map, BACKEND)
    queue = documents.label(workload, _QUEUE_LABEL) or documents.text(spec, "queue")
    ttl = documents.integer(spec, "ttlSecondsAfterFinished") if backend != "statefulset" else None
    asked = documents.annotation(config_map, ASKED)
    verdict = decide(Evidence(state, seen, known, nodes, asked, queue, record, now, ttl))
    created = _read_creation(workload) or _read_creation(config_map)
    return JobStatus(
        name=name or documents.name(config_map) or documents.name(workload),
        namespace=namespace or documents.text(config_map, "metadata", "namespace"),
        backend=backend,
        phase=verdict.phase,
        reason=verdict.reason,
        message=verdict.message,
        nodes=nodes,
        run_id=run_id,
        queue=queue,
        created=created,
        age=None if created is None else max(0.0, now - created),
        parked=any(report.parked for report in known.values()),
        pods=tuple(seen),
        exit_record=record,
        restarts=_count_restarts(known.values(), seen),
        **_read_training(current, record),
    )


def read_job(config_map: Document) -> Document:
    """The TrainingJob that the ConfigMap carries; an empty object if it cannot be read."""
    try:
        return documents.mapping(json.loads(documents.text(config_map, "data", "job.json")))
    except (ValueError, RecursionError):
        return {}


def _read_birth(document: Document | None) -> float | None:
    return documents.moment(document, "metadata", "creationTimestamp")


def _order(pod: Pod) -> tuple[int, float, str]:
    return (1 << 30 if pod.index is None else pod.index, pod.created or 0.0, pod.name)


def _read_nodes(config_map: Document, pods: Sequence[Pod]) -> Nodes:
    """Wanted numbers from the job; of pods that share an index only one is a node."""
    wanted = documents.mapping(read_job(config_map), "spec", "nodes")
    ready = {
        pod.name if pod.index is None else pod.index
        for pod in pods
        if pod.working and not pod.deleting
    }
    least, most = documents.integer(wanted, "min"), documents.integer(wanted, "max")
    most = most or least or max(1, len(ready))
    return Nodes(ready=len(ready), min=least or most, max=most)


def _read_training(current: Sequence[AgentStatus], record: ExitRecord | None) -> dict[str, Any]:
    """Numbers of the training: from the agents of the newest group; the step of one that ended from
    its record.
    """
    ranks = sorted(
        (rank for report in current for rank in report.ranks), key=lambda rank: rank.rank
    )
    steps = [report.step for report in current if report.step is not None]
    paces = [report.samples_per_second for report in current]
    shown = [rank.all_reduce_seconds for rank in ranks if rank.all_reduce_seconds is not None]
    saved = max(
        (
            (report.checkpoint_step, report.checkpoint_time)
            for report in current
            if report.checkpoint_step is not None
        ),
        key=lambda one: one[0],
        default=(None, None),
    )
    return {
        "generation": max((report.generation for report in current), default=0),
        "world_size": max((report.world_size for report in current), default=0),
        "step": max(steps) if steps else record.step if record else None,
        "target_steps": _first(report.target_steps for report in current),
        "loss": _first(report.loss for report in current),
        "learning_rate": _first(report.learning_rate for report in current),
        "throughput": sum(rates)
        if (rates := [each for each in paces if each is not None])
        else None,
        "restarts_left": _first(report.restarts_left for report in current),
        "lost_steps": max((report.lost_steps for report in current), default=0),
        "last_checkpoint_step": saved[0],
        "last_checkpoint_time": saved[1],
        # the shortest is the transfer, what is longer is waiting
        "all_reduce_seconds": min(shown) if shown else None,
        "ranks": tuple(ranks),
    }


def _first(values: Iterable[_T | None]) -> _T | None:
    """What the agent that holds rank 0 says, else the first that knows it."""
    return next((value for value in values if value is not None), None)


def _read_pods(
    pods: Iterable[Document], answering: Collection[str], lost_nodes: Collection[str]
) -> list[Pod]:
    read_each = (
        read_pod(pod, lost_nodes=lost_nodes, answers=documents.name(pod) in answering)
        for pod in pods
    )
    return sorted(read_each, key=_order)


def _read_creation(document: Document | None) -> float | None:
    return documents.moment(document, "metadata", "creationTimestamp")


def _count_restarts(reports: Iterable[AgentStatus], pods: Sequence[Pod]) -> int:
    """Restarts of the group as an agent counted them, or of containers and pods where no agent was
    there to count.
    """
    # they are in the order of their making
    latest = {pod.index: pod for pod in pods if pod.index is not None}
    replaced = sum(pod.index is not None and latest[pod.index] is not pod for pod in pods)
    return max(
        [sum(pod.restarts for pod in pods) + replaced, *(report.restarts for report in reports)]
    )


def _find_record(
    workload: Document | None, pods: Sequence[Pod], current: Sequence[AgentStatus]
) -> ExitRecord | None:
    """The record that tells most: of what ended the job, then of what ended a node, last of peers
    that only followed.
    """
    told = [
        ExitRecord.parse(documents.annotation(workload, OUTCOME)),
        *(report.exit for report in current),
    ]
    found = [record for record in (*told, *(pod.record for pod in pods)) if record is not None]
    return min(found, key=_rank_record, default=None)


def _rank_record(record: ExitRecord) -> tuple[int, float]:
    kinds = {DONE: 1, PEERS_LOST: 3, STOPPED: 4}
    return 0 if record.permanent else kinds.get(record.code, 2), record.time or float("inf")


@dataclass(frozen=True)
class Snapshot:
    """Documents of a job. What does not exist, or may not be seen, is empty; `taken` is unix time.

    `reports` are the agents' `/status` documents by pod, `nodes` those that matter, `claims` the
    volume claims that waiting pods name (an empty document for one that does not exist),
    `admission` what the queue says of the job, `deployments` those of all namespaces, if nobody
    makes pods. `unasked` counts agents that there was no time to ask.
    """

    name: str
    namespace: str = ""
    config_map: Document = field(default_factory=dict)
    workload: Document | None = None
    state: WorkloadState | None = None
    pods: Sequence[Document] = ()
    events: Sequence[Document] = ()
    reports: Mapping[str, Document] = field(default_factory=dict)
    nodes: Mapping[str, Document] = field(default_factory=dict)
    claims: Mapping[str, Document] = field(default_factory=dict)
    admission: Document | None = None
    unasked: int = 0
    deployments: Sequence[Document] = ()
    taken: float = field(default_factory=time.time)

    @property
    def backend(self) -> str:
        """Name of the workload's kind in job.yaml."""
        return documents.annotation(self.config_map, BACKEND)

    @property
    def job(self) -> Document:
        """The TrainingJob with every default."""
        return read_job(self.config_map)

    @property
    def gap(self) -> str:
        """What this snapshot does not know because there are too many pods; empty if nothing."""
        return (
            f"there was no time to ask {self.unasked} of the {len(self.pods)} pods"
            if self.unasked
            else ""
        )

    @cached_property
    def lost_nodes(self) -> list[str]:
        """Names of the nodes that are known not to answer."""
        return [name for name, node in self.nodes.items() if is_silent(node)]

    @cached_property
    def status(self) -> JobStatus:
        """What the job is doing."""
        return read_status(
            self.config_map,
            self.workload,
            self.pods,
            self.reports,
            state=self.state,
            lost_nodes=self.lost_nodes,
            now=self.taken,
            name=self.name,
            namespace=self.namespace,
        )


def is_silent(node: Document) -> bool:
    """Whether the control plane has not heard from a node, or says that it is unwell."""
    status = documents.text(documents.condition(node, "Ready"), "status")
    return status in ("Unknown", "False")
