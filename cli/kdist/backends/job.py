"""An Indexed Job of `batch/v1`: needs no operator, and can be scaled while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kdist.backends.base import Backend, Placement, is_elastic
from kdist.status import WorkloadState

if TYPE_CHECKING:
    from kdist.spec import TrainingJob


class IndexedJob(Backend):
    """`backend: job`."""

    name = "job"
    api_version = "batch/v1"
    kind = "Job"
    template = "job.yaml.j2"
    parts = ("job",)
    deletes_itself = True
    sizes = ("completions", "parallelism", "selector", "successPolicy", "suspend")
    uid_label = "batch.kubernetes.io/controller-uid"

    def values(self, job: TrainingJob, placement: Placement) -> dict[str, Any]:  # noqa: ARG002 - the kinds' signature
        """Annotations that let Kueue scale the running job; they cannot be added later."""
        if not job.spec.queue:
            return {}
        names = ("kueue.x-k8s.io/elastic-job", "kueue.x-k8s.io/job-completions-equal-parallelism")
        return {"workload_annotations": dict.fromkeys(names, "true")}

    def _limits(self, job: TrainingJob) -> Iterator[str]:
        if job.spec.queue and is_elastic(job):
            yield (
                f"Kueue starts the job when its queue has quota for all {job.spec.nodes.max} "
                "nodes; `kdist scale` requests fewer"
            )
        if not is_elastic(job):
            yield (
                "the Job controller re-creates a lost pod after 10 s, doubled with each further "
                "loss up to 10 min, while the others wait; backend: jobset, statefulset and "
                "pytorchjob take seconds"
            )

    def keep(self, rendered: dict[str, Any], workload: Mapping[str, Any]) -> dict[str, Any]:
        """Keep the successPolicy, which counts the initial nodes; the job only ends slightly
        later.
        """
        spec = {key: value for key, value in rendered["spec"].items() if key != "successPolicy"}
        policy = (workload.get("spec") or {}).get("successPolicy")
        return {**rendered, "spec": spec | ({"successPolicy": policy} if policy else {})}

    def read(self, workload: Mapping[str, Any]) -> WorkloadState:
        """Counts are pods."""
        status = workload.get("status") or {}
        return replace(
            super().read(workload),
            active=int(status.get("active") or 0),
            ready=int(status.get("ready") or 0),
            succeeded=int(status.get("succeeded") or 0),
            failed=int(status.get("failed") or 0),
        )
