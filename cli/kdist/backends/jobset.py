"""A JobSet with a single Job, which the controller re-creates when it fails."""

from __future__ import annotations

from kdist.backends.base import Backend
from kdist.backends.job import IndexedJob


class JobSet(Backend):
    """`backend: jobset`."""

    name = "jobset"
    api_version = "jobset.x-k8s.io/v1alpha2"
    kind = "JobSet"
    template = "jobset.yaml.j2"
    host = "{name}-node-0-0.{name}"  # pod 0 of Job 0; the JobSet uses the job's headless Service
    success = "Completed"
    parts = ("job", "jobset")
    deletes_itself = True
    sizes = IndexedJob.sizes
    uid_label = "jobset.sigs.k8s.io/jobset-uid"
    scalable = "the replicatedJobs of a JobSet cannot be changed"

    def pod_owners(self, name: str) -> tuple[tuple[str, str, str], ...]:
        """Its only Job."""
        return (("batch/v1", "Job", f"{name}-node-0"),)
