"""A TrainJob of Kubeflow Trainer (v2) with its own TrainingRuntime, which contains the pod
template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kdist.backends.base import Backend, read_end
from kdist.backends.jobset import JobSet
from kdist.status import WorkloadState


class TrainJob(Backend):
    """`backend: trainjob`. Trainer requires the container's name, and creates a JobSet with the
    job's name.
    """

    name = "trainjob"
    api_version = "trainer.kubeflow.org/v1alpha1"
    kind = "TrainJob"
    template = "trainjob.yaml.j2"
    parts = ("job", "jobset")
    deletes_itself = True
    sizes = (*JobSet.sizes, "numNodes")
    uid_label = "jobset.sigs.k8s.io/jobset-uid"
    container = "node"
    keeps_template = True  # Trainer uses its own snapshot of the runtime
    scalable = "the number of nodes of a TrainJob cannot be changed"

    def first_host(self, name: str) -> str:
        """Pod 0 of the JobSet's Job, within the job's headless Service."""
        return f"{name}-node-0-0.{name}"

    def pod_owners(self, name: str) -> tuple[tuple[str, str, str], ...]:
        """The JobSet that Trainer creates, and its only Job."""
        return (
            ("jobset.x-k8s.io/v1alpha2", "JobSet", name),
            ("batch/v1", "Job", f"{name}-node-0"),
        )

    def suspend_patch(self, suspended: bool, *, nodes: int = 1) -> dict[str, Any]:  # noqa: ARG002 - the count stays
        """Trainer suspends the JobSet too."""
        return {"spec": {"suspend": suspended}}

    def read(self, workload: Mapping[str, Any]) -> WorkloadState:
        """How it ended. There are no counts, because a TrainJob counts Jobs, not pods."""
        return replace(
            read_end(workload, "Complete", "Failed"),
            suspended=bool((workload.get("spec") or {}).get("suspend")),
        )
