"""A JobSet with a single Job, which the controller re-creates when it fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kdist.backends.base import Backend, read_end
from kdist.backends.job import IndexedJob
from kdist.status import WorkloadState


class JobSet(Backend):
    """`backend: jobset`."""

    name = "jobset"
    api_version = "jobset.x-k8s.io/v1alpha2"
    kind = "JobSet"
    template = "jobset.yaml.j2"
    parts = ("job", "jobset")
    deletes_itself = True
    sizes = IndexedJob.sizes
    uid_label = "jobset.sigs.k8s.io/jobset-uid"
    scalable = "the replicatedJobs of a JobSet cannot be changed"

    def first_host(self, name: str) -> str:
        """Pod 0 of Job 0, within the job's headless Service, which the JobSet uses."""
        return f"{name}-node-0-0.{name}"

    def pod_owners(self, name: str) -> tuple[tuple[str, str, str], ...]:
        """Its only Job."""
        return (("batch/v1", "Job", f"{name}-node-0"),)

    def suspend_patch(self, suspended: bool, *, nodes: int = 1) -> dict[str, Any]:  # noqa: ARG002 - the count stays
        """A JobSet suspends its Job too."""
        return {"spec": {"suspend": suspended}}

    def read(self, workload: Mapping[str, Any]) -> WorkloadState:
        """How it ended. There are no counts, because a JobSet counts Jobs, not pods."""
        return replace(
            read_end(workload, "Completed", "Failed"),
            suspended=bool((workload.get("spec") or {}).get("suspend")),
        )
