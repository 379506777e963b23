"""A job's documents at one moment and the `JobStatus` that follows from them. Pure; an invalid
document gives less information and never raises.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from kdist.manifest import QUEUE_LABEL
from kdist.status import documents
from kdist.status.agent_status import (
    STANDBY_STATE,
    AgentStatus,
    newest_generation,
    read_reports,
    read_training,
)
from kdist.status.documents import Document
from kdist.status.job_status import Evidence, JobStatus, Nodes, PhaseDecision, WorkloadState, decide
from kdist.status.pods import (
    DONE,
    PEERS_LOST,
    STOPPED,
    ExitRecord,
    FetchProgress,
    NonfiniteLoss,
    Pod,
    find_permanent_failure,
    find_slowest,
    find_successor,
    read_pod,
)
from kdist.status.resource_state import ResourceState, read_numbers, read_resource
from kdist_trainer.formats.untrusted_text import MalformedTextError, parse_json

RUN_ID, BACKEND, RENDEZVOUS = "kdist.dev/run-id", "kdist.dev/backend", "kdist.dev/rendezvous"
NAMESPACE_VARIABLE = "KDIST_NAMESPACE"
"""Variable in the run id, as `$(KDIST_NAMESPACE)`, of objects rendered for any namespace."""
ASKED = "kdist.dev/asked"
"""Annotation of the job's ConfigMap: `suspended` while the user wants the job suspended."""
STARTED = "kdist.dev/started-at"
"""Annotation of the job's ConfigMap: when a user last had the job start again, by `kdist restart`
or `kdist resume`.
"""
OUTCOME = "kdist.dev/outcome"
"""Annotation of a workload that never completes by itself: the exit record of the training."""


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
    resource: Document | None = None,
    fetches: Mapping[str, object] | None = None,
    progress: Document | None = None,
    unasked: int = 0,
) -> JobStatus:
    """Derive the status of one job.

    Args:
        config_map: the job's ConfigMap, which carries the job itself.
        workload: the object that creates the pods; None if there is none.
        pods: the job's pods.
        reports: the agents' `/status` documents by pod.
        state: state of the workload, as read by its backend.
        lost_nodes: names of nodes that do not respond.
        now: unix time of the documents.
        name: name of the job, in case its objects are deleted.
        namespace: namespace of the job.
        resource: the job's TrainingJob; None without one.
        fetches: the newest event of each init container that fetches, by pod.
        progress: the newest event of the log that tells of the training; counts without reports.
        unasked: number of agents that nobody has asked.
    """
    now = time.time() if now is None else now
    namespace = namespace or documents.text(config_map, "metadata", "namespace")
    backend, run_id = _read_placement(config_map, resource, namespace)
    known_pods = _read_pods(pods, reports, lost_nodes, fetches or {})
    answering = [pod for pod in known_pods if pod.name in reports and not pod.over]
    known_reports = read_reports({pod.name: reports[pod.name] for pod in answering}, run_id=run_id)
    current = newest_generation(known_reports)
    record = _find_record(workload, known_pods, current)
    spec = documents.mapping(_find_job(config_map, resource), "spec")
    nodes = _read_nodes(spec, known_pods)
    asked = documents.annotation(config_map, ASKED)  # what the user requested last
    if resource is not None:
        asked = "suspended" if documents.at(resource, "spec", "suspend") is True else ""
    queue = documents.label(workload, QUEUE_LABEL) or documents.text(spec, "queue")
    ttl = documents.integer(spec, "ttlSecondsAfterFinished") if backend != "statefulset" else None
    known_resource = None if resource is None else read_resource(resource)
    read = (state, known_pods, known_reports, nodes, asked, queue, record, now, ttl, known_resource)
    decided = decide(Evidence(*read, read_start(config_map, resource), unasked))
    told = read_training(current, step=record.step if record else None)
    counted = _count_restarts(known_reports.values(), known_pods)
    # the first object that exists tells when the job was created
    objects = (workload, config_map, resource)
    times = (documents.moment(each, "metadata", "creationTimestamp") for each in objects)
    created = next(filter(None, times), None)
    return JobStatus(
        name=name or documents.name(config_map) or documents.name(workload),
        namespace=namespace,
        backend=backend,
        nodes=nodes,
        run_id=run_id,
        queue=queue,
        created=created,
        age=None if created is None else max(0.0, now - created),
        # whether pods stay, or are started again, though the job has ended
        kept_alive=any(report.finished for report in known_reports.values())
        or find_permanent_failure(known_pods) is not None,
        fetch=find_slowest(known_pods),
        pods=tuple(_show_standby(known_pods, known_reports)),
        exit_record=record,
        resource=known_resource,
        **_complete(told | {"restarts": counted}, resource, progress, answered=bool(current)),
        **asdict(_add_report(decided, known_resource)),
    )


def _read_placement(
    config_map: Document, resource: Document | None, namespace: str
) -> tuple[str, str]:
    """Backend and run id; empty while they are not decided."""
    status = documents.mapping(resource, "status")
    run_id = documents.text(status, "runId") or documents.annotation(config_map, RUN_ID)
    return (
        documents.text(status, "backend") or documents.annotation(config_map, BACKEND),
        run_id.replace(f"$({NAMESPACE_VARIABLE})", namespace),
    )


def _complete(
    found: dict[str, Any], resource: Document | None, progress: Document | None, *, answered: bool
) -> dict[str, Any]:
    """Attributes of a `JobStatus` by those who know best: the agents, else the controller, else the
    log.
    """
    if answered:
        return found
    logged = {
        "step": documents.integer(progress, "step"),
        "target_steps": documents.integer(progress, "target"),
        "loss": documents.number(progress, "loss"),
        "learning_rate": documents.number(progress, "learning_rate"),
    }
    known = {name: value for name, value in logged.items() if value is not None}
    more = {**known, **read_numbers(resource)}
    return {**found, **more, "restarts": max(found["restarts"], more.get("restarts", 0))}


def _add_report(decision: PhaseDecision, resource: ResourceState | None) -> PhaseDecision:
    """Where no agent answers from here, what the controller says, which they may answer."""
    if decision.reason != "NoAnswer" or resource is None or not resource.phase:
        return decision
    said = ": ".join(filter(None, (resource.phase, resource.message)))
    return replace(decision, message=f"{decision.message}; its TrainingJob says {said}")


def _find_job(config_map: Document, resource: Document | None) -> Document:
    """The job: its TrainingJob where it has one, whatever the ConfigMap contains."""
    return read_job(config_map) if resource is None else resource


def read_start(config_map: Document, resource: Document | None) -> float | None:
    """When a user last had the job start again (unix seconds); None if never."""
    times = (
        documents.moment(config_map, "metadata", "annotations", STARTED),
        documents.moment(resource, "spec", "restartedAt"),
    )
    return max((each for each in times if each is not None), default=None)


def read_job(config_map: Document) -> Document:
    """Return the TrainingJob in the ConfigMap; an empty object if it cannot be read."""
    try:
        return documents.mapping(parse_json(documents.text(config_map, "data", "job.json")))
    except MalformedTextError:
        return {}


def _show_standby(pods: Sequence[Pod], reports: Mapping[str, AgentStatus]) -> Iterator[Pod]:
    """The pods, those that stand by with that as their state."""
    for pod in pods:
        report = reports.get(pod.name)
        stands_by = report is not None and report.state == STANDBY_STATE
        yield replace(pod, state="Standby") if stands_by and pod.working else pod


def _read_nodes(spec: Document, pods: Sequence[Pod]) -> Nodes:
    """Read the wanted numbers from the job, or where that is gone from its pods; pods that share
    an index count as one node.
    """
    number = documents.integer(spec, "nodes")  # only a TrainingJob may have one
    wanted = documents.mapping(spec, "nodes") or {"min": number, "max": number}
    ready = {
        pod.name if pod.index is None else pod.index
        for pod in pods
        if pod.working and not pod.deleting
    }
    minimum = documents.integer(wanted, "min")
    maximum = (
        documents.integer(spec, "replicas")
        or documents.integer(wanted, "max")
        or minimum
        or max(1, len({pod.name if pod.index is None else pod.index for pod in pods}))
    )
    standby = documents.integer(wanted, "standby") or 0
    spare = min(standby, max(0, len(ready) - maximum))
    return Nodes(ready=len(ready) - spare, min=minimum or maximum, max=maximum)


def _read_pods(
    pods: Iterable[Document],
    reports: Mapping[str, object],
    lost_nodes: Collection[str],
    fetches: Mapping[str, object],
) -> list[Pod]:
    answering = {pod for pod, report in reports.items() if report}
    found = []
    for document in pods:
        is_answering = documents.name(document) in answering
        pod = read_pod(document, lost_nodes=lost_nodes, answers=is_answering)
        progress = FetchProgress.read(fetches.get(pod.name))
        if pod.init is not None and progress is not None:
            pod = replace(pod, init=replace(pod.init, progress=progress))
        found.append(pod)

    def order(pod: Pod) -> tuple[int, float, str]:
        return (1 << 30 if pod.index is None else pod.index, pod.created or 0.0, pod.name)

    return sorted(found, key=order)


def _count_restarts(reports: Iterable[AgentStatus], pods: Sequence[Pod]) -> int:
    """Count restarts: those that the agents report, or those of containers and pods if these are
    more, because agents that are killed count nothing.
    """
    newest = {pod.index: pod for pod in pods if pod.index is not None}  # pods are sorted by age
    replaced = sum(pod.index is not None and newest[pod.index] is not pod for pod in pods)
    return max(
        [
            sum(pod.restarts for pod in pods) + replaced,
            *(report.restarts for report in reports),
        ]
    )


def _find_record(
    workload: Document | None, pods: Sequence[Pod], current: Sequence[AgentStatus]
) -> ExitRecord | None:
    """Find the most informative record: of what ended the job, then of what ended a node, and last
    of nodes that only lost their peers. What a pod left that was replaced since explains nothing
    that is so now, unless it ends the job.
    """
    reported = [
        ExitRecord.parse(documents.annotation(workload, OUTCOME)),
        *(report.exit for report in current),
    ]
    left = [
        pod.record
        for pod in pods
        if pod.record and (pod.record.permanent or find_successor(pod, pods) is None)
    ]
    found = [record for record in (*reported, *left) if record is not None]
    kinds = {DONE: 1, PEERS_LOST: 3, STOPPED: 4}

    def rank(record: ExitRecord) -> tuple[int, float]:
        kind = 0 if record.permanent else kinds.get(record.code, 2)
        return kind, record.time or float("inf")

    told = min(found, key=rank, default=None)
    loss = NonfiniteLoss.merge(record.nonfinite_loss for record in found)
    return None if told is None else replace(told, nonfinite_loss=loss)


@dataclass(frozen=True)
class Snapshot:
    """Documents of a job. What does not exist, or may not be read, is empty.

    Attributes:
        reports: the agents' `/status` documents by pod.
        nodes: the cluster's nodes that matter to the job.
        claims: volume claims of pending pods by name; an empty document if a claim does not exist.
        admission: the job's object in its queue.
        skipped: number of agents that were not asked, such as for lack of time.
        deployments: deployments of all namespaces, if no controller creates the job's pods.
        taken: unix time.
        resource: the job's TrainingJob; None if it was applied without one.
        fetches: the newest event of each init container that fetches, by pod.
        accounts: the service accounts of the pods by name, if they were asked for; an empty
            document if one does not exist.
        lack: a sentence about the rights without which agents could not be asked; empty if there
            is nothing to say.
        progress: the newest event of the training in the log, if no agent answers.
        placed: annotations that the ConfigMap had, by its workload, if it is gone.
        config_maps: names of the job's ConfigMaps that exist, if a pod could not mount one, or an
            agent did not find the one that it meets the others in.
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
    skipped: int = 0
    deployments: Sequence[Document] = ()
    taken: float = field(default_factory=lambda: time.time())
    resource: Document | None = None
    fetches: Mapping[str, Document] = field(default_factory=dict)
    accounts: Mapping[str, Document] = field(default_factory=dict)
    lack: str = ""
    progress: Document = field(default_factory=dict)
    placed: Mapping[str, str] = field(default_factory=dict)
    config_maps: Collection[str] = ()

    @property
    def backend(self) -> str:
        """Name of the backend, as in job.yaml."""
        return self.status.backend

    @property
    def job(self) -> Document:
        """The TrainingJob; with every default where only the ConfigMap has it."""
        return _find_job(self.config_map, self.resource)

    @property
    def gap(self) -> str:
        """Why agents were not asked, or not reached; empty if all were."""
        slow = f"there was no time to query {self.skipped} of the {len(self.pods)} pods"
        lack = self.lack
        if lack and not self.reports and self.status.step is not None:
            source = "the log" if self.progress else "the status of the TrainingJob"
            lack += f"; step and loss are those in {source}"
        return "; ".join(part for part in (slow if self.skipped else "", lack) if part)

    @cached_property
    def lost_nodes(self) -> list[str]:
        """Names of the nodes that do not respond."""
        return [name for name, node in self.nodes.items() if is_silent(node)]

    @cached_property
    def status(self) -> JobStatus:
        """The status of the job."""
        return read_status(
            self.config_map or {"metadata": {"annotations": dict(self.placed)}},
            self.workload,
            self.pods,
            self.reports,
            state=self.state,
            lost_nodes=self.lost_nodes,
            now=self.taken,
            name=self.name,
            namespace=self.namespace,
            resource=self.resource,
            fetches=self.fetches,
            progress=self.progress,
            unasked=self.skipped,
        )


def is_silent(node: Document) -> bool:
    """Whether the node is not ready, or has stopped responding."""
    status = documents.text(documents.condition(node, "Ready"), "status")
    return status in ("Unknown", "False")
