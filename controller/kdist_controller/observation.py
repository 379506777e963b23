"""What is known about one TrainingJob and its objects at one moment: the input of `reconcile`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from kdist.backends import Backend, WorkloadState
from kdist.diagnose import Diagnosis
from kdist.errors import KdistError
from kdist.manifest import JobOwner, ObjectKey
from kdist.recovery.decision import HeldVolume, PodDecision
from kdist.spec import TrainingJob
from kdist.status import ASKED, ExitRecord, JobStatus, Pod, Snapshot, documents
from kdist.status.documents import Document
from kdist_controller.resource import (
    Record,
    Resource,
    correct_record,
    digest_job,
    note_start,
    read_record,
)


@dataclass(frozen=True)
class Observed:
    """A TrainingJob and its objects.

    Attributes:
        resource: the TrainingJob.
        backend: kind of the workload, once it is decided.
        config_map: the job's own ConfigMap, which holds the job as its objects are now.
        workload: the object that makes its pods.
        children: its other objects; metadata only.
        markers: the Jobs that keep its pods from nodes.
        pods: its pods.
        reports: the agents' newest `/status` documents, by pod.
        silent: the pods whose agents did not answer when they were asked last.
        makers: uids of what makes its pods: the workload, and what that has created for it.
        kinds: (API version, kind) of everything that the cluster serves.
        result: how the run of a job without workload has ended; None if nobody can say.
        leaving: pods of a workload of its name that is gone: they end soon.
        rivals: objects with its label that are somebody else's.
        diagnosis: what `kdist why` says of a job that does not progress; None if nobody asked.
        nodes: the nodes of its pods that are not ready, by name.
        decisions: what was decided about its pods on nodes that do not answer.
        held: volumes that keep its new pods waiting.
        trouble: why the last changes failed; empty if they did not.
        now: unix seconds.
    """

    resource: Resource
    backend: Backend | None = None
    config_map: Document | None = None
    workload: Document | None = None
    children: Mapping[ObjectKey, Document] = field(default_factory=dict)
    markers: Sequence[Document] = ()
    pods: Sequence[Document] = ()
    reports: Mapping[str, Document] = field(default_factory=dict)
    silent: Collection[str] = ()
    makers: frozenset[str] = frozenset()
    kinds: Collection[tuple[str, str]] = ()
    result: ExitRecord | None = None
    leaving: Sequence[Document] = ()
    rivals: Mapping[ObjectKey, Document] = field(default_factory=dict)
    diagnosis: Diagnosis | None = None
    nodes: Mapping[str, Document] = field(default_factory=dict)
    decisions: Sequence[PodDecision] = ()
    held: Sequence[HeldVolume] = ()
    trouble: str = ""
    now: float = 0.0

    @cached_property
    def owner(self) -> JobOwner:
        return self.resource.owner(self.makers)

    @cached_property
    def wanted(self) -> TrainingJob | None:
        """The job that the TrainingJob asks for; None if it is not valid."""
        try:
            return self.resource.read_job()
        except KdistError:
            return None

    @cached_property
    def record(self) -> Record:
        """What the job's own ConfigMap says that its objects were made from."""
        if self.config_map is None:
            return Record()
        wanted = "" if self.wanted is None else digest_job(self.wanted, self.resource.results)
        return read_record(self.resource, self.config_map, wanted=wanted)

    @property
    def applied(self) -> TrainingJob | None:
        """The job as its objects are now, with the `restartedAt` of the last restart; None if
        unknown.
        """
        return self.record.job

    @cached_property
    def state(self) -> WorkloadState | None:
        """State of the workload; None if there is none, and its end was not seen either."""
        if self.workload is None and self.result is not None:
            finished: Literal["succeeded", "failed"] = (
                "succeeded" if self.result.code == 0 else "failed"
            )
            cause, message = self.result.cause, self.result.message
            return WorkloadState(finished=finished, reason=cause, message=message)
        if self.backend is None or self.workload is None:
            return None
        return self.backend.read(self.workload)

    @cached_property
    def snapshot(self) -> Snapshot:
        """All of it in the form that status and diagnosis are read from. Usually only the agent of
        rank 0 is asked, and that of a controller which has just begun none.
        """
        known = {*self.reports, *self.silent}
        running = [pod for pod in self.pods if documents.text(pod, "status", "phase") == "Running"]
        return Snapshot(
            self.resource.key.name,
            self.resource.key.namespace,
            {}
            if self.config_map is None
            else correct_record(self.resource, self.config_map, self.wanted or self.applied),
            self.workload,
            self.state,
            self.pods,
            reports=self.reports,
            nodes=self.nodes,
            skipped=sum(documents.name(pod) not in known for pod in running),
            config_maps={each.name for each in self.children if each.kind == "ConfigMap"},
            markers=self.markers,
            taken=self.now,
        )

    @property
    def explained(self) -> Snapshot:
        """The same for a diagnosis, which also asks whether somebody had the job start again."""
        seen = self.snapshot
        return replace(seen, config_map=note_start(seen.config_map, self.restarted_at))

    @property
    def restarted_at(self) -> str:
        return documents.text(self.resource.document, "spec", "restartedAt")

    @property
    def status(self) -> JobStatus:
        return self.snapshot.status

    @property
    def alive(self) -> list[Pod]:
        return [pod for pod in self.status.pods if not pod.over]

    @property
    def counted_faults(self) -> dict[str, int]:
        """How many faults each node had when the controller last kept the job from it. A run that
        tells fewer is another one.
        """
        told = {each.machine: each.faults for each in self.status.machine_faults}
        counted = documents.mapping(self.resource.status, "nodeFaults")
        found = {node: documents.integer(counted, node) or 0 for node in counted}
        return {node: faults for node, faults in found.items() if told.get(node, faults) >= faults}

    @property
    def asked(self) -> bool:
        """Whether it is recorded for the other readers of the job that it is to be suspended."""
        return bool(documents.annotation(self.config_map, ASKED))
