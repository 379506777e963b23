"""A job's documents at one moment and the `JobStatus` that follows from them. Pure; an invalid
document gives less information and never raises.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

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
from kdist.status.job_status import AvoidedNode, Evidence, JobStatus, Nodes, WorkloadState, decide
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
from kdist.status.resource_state import read_numbers, read_resource

RUN_ID, BACKEND, RENDEZVOUS = "kdist.dev/run-id", "kdist.dev/backend", "kdist.dev/rendezvous"
NAMESPACE_VARIABLE = "KDIST_NAMESPACE"
"""Variable in the run id, as `$(KDIST_NAMESPACE)`, of objects rendered for any namespace."""
ASKED = "kdist.dev/asked"
"""Annotation of the job's ConfigMap: `suspended` while the user wants the job suspended, and after
a blank the step that its pods have saved, if they said so.
"""
STARTED = "kdist.dev/started-at"
"""Annotation of the job's ConfigMap: when a user last had the job start again, by `kdist restart`
or `kdist resume`.
"""
OUTCOME = "kdist.dev/outcome"
"""Annotation of a workload that never completes by itself: the exit record of the training."""


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
        markers: the Jobs that keep its pods from nodes.
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
    markers: Sequence[Document] = ()

    @property
    def backend(self) -> str:
        return self.status.backend

    @property
    def job(self) -> Document:
        """The TrainingJob; with every default where only the ConfigMap has it."""
        return read_job(self.config_map) if self.resource is None else self.resource

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
        return [name for name, node in self.nodes.items() if is_silent(node)]

    @cached_property
    def status(self) -> JobStatus:
        resource, workload, now = self.resource, self.workload, self.taken
        config_map = self.config_map or {"metadata": {"annotations": dict(self.placed)}}
        namespace = self.namespace or documents.text(config_map, "metadata", "namespace")
        written = documents.mapping(resource, "status")
        run_id = documents.text(written, "runId") or documents.annotation(config_map, RUN_ID)
        run_id = run_id.replace(f"$({NAMESPACE_VARIABLE})", namespace)
        backend = documents.text(written, "backend") or documents.annotation(config_map, BACKEND)
        pods = _read_pods(self.pods, self.reports, self.lost_nodes, self.fetches)
        answering = [pod.name for pod in pods if pod.name in self.reports and not pod.over]
        reports = read_reports({pod: self.reports[pod] for pod in answering}, run_id=run_id)
        current = newest_generation(reports)
        record = _find_record(workload, pods, current)
        spec = documents.mapping(self.job, "spec")
        asked = documents.annotation(config_map, ASKED)  # what the user requested last
        if resource is not None:
            asked = "suspended" if documents.at(resource, "spec", "suspend") is True else ""
        ttl = documents.integer(spec, "ttlSecondsAfterFinished")
        evidence = Evidence(
            state=self.state,
            pods=pods,
            reports=reports,
            nodes=_read_nodes(spec, pods),
            asked=asked,
            queue=documents.label(workload, QUEUE_LABEL) or documents.text(spec, "queue"),
            record=record,
            now=now,
            ttl=ttl if backend != "statefulset" else None,
            resource=None if resource is None else read_resource(resource),
            started=read_start(config_map, resource),
            unasked=self.skipped,
        )
        decided, state = decide(evidence), evidence.resource
        if decided.reason == "NoAnswer" and state is not None and state.phase:
            # the agents that do not answer from here may answer the controller
            said = ": ".join(filter(None, (state.phase, state.message)))
            words = f"{decided.message}; its TrainingJob says {said}"
            decided = decided._replace(message=words)
        found = read_training(current, step=record.step if record else None)
        found["restarts"] = _count_restarts(reports.values(), pods)
        if not current:  # the controller knows the numbers better than the log
            logged = {
                "step": documents.integer(self.progress, "step"),
                "target_steps": documents.integer(self.progress, "target"),
                "loss": documents.number(self.progress, "loss"),
                "learning_rate": documents.number(self.progress, "learning_rate"),
            }
            known = {name: value for name, value in logged.items() if value is not None}
            known |= read_numbers(resource)
            restarts = max(found["restarts"], known.get("restarts", 0))
            found |= {**known, "restarts": restarts}
        if asked and found.get("last_checkpoint_step") is None:
            saved = asked.partition(" ")[2]
            found["last_checkpoint_step"] = int(saved) if re.fullmatch(r"\d{1,15}", saved) else None
        # the first object that exists tells when the job was created
        objects = (workload, config_map, resource)
        times = (documents.moment(each, "metadata", "creationTimestamp") for each in objects)
        created = next(filter(None, times), None)
        avoided = [AvoidedNode.read(each, job=self.name) for each in self.markers]
        standby = {pod for pod, report in reports.items() if report.state == STANDBY_STATE}
        return JobStatus(
            name=self.name or documents.name(config_map) or documents.name(workload),
            namespace=namespace,
            backend=backend,
            nodes=evidence.nodes,
            run_id=run_id,
            queue=evidence.queue,
            created=created,
            age=None if created is None else max(0.0, now - created),
            # whether pods stay, or are started again, though the job has ended
            kept_alive=any(report.finished for report in reports.values())
            or find_permanent_failure(pods) is not None,
            fetch=find_slowest(pods),
            pods=tuple(
                replace(pod, state="Standby") if pod.name in standby and pod.working else pod
                for pod in pods
            ),
            exit_record=record,
            resource=state,
            avoided=tuple(each for each in avoided if each is not None),
            **found,
            **decided._asdict(),
        )


def read_start(config_map: Document, resource: Document | None) -> float | None:
    """When a user last had the job start again (unix seconds); None if never."""
    times = (
        documents.moment(config_map, "metadata", "annotations", STARTED),
        documents.moment(resource, "spec", "restartedAt"),
    )
    return max((each for each in times if each is not None), default=None)


def read_job(config_map: Document) -> Document:
    """Return the TrainingJob in the ConfigMap; an empty object if it cannot be read."""
    return documents.parse(documents.text(config_map, "data", "job.json"))


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


def is_silent(node: Document) -> bool:
    """Whether the node is not ready, or has stopped responding."""
    status = documents.text(documents.condition(node, "Ready"), "status")
    return status in ("Unknown", "False")
