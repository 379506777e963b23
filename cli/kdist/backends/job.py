"""An Indexed Job of `batch/v1`: needs nothing but Kubernetes, and can be scaled while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from kdist.backends.base import Backend, WorkloadState, read_end
from kdist.spec import TrainingJob


class IndexedJob(Backend):
    """`backend: job`."""

    name = "job"
    api_version = "batch/v1"
    kind = "Job"
    template = "job.yaml.j2"

    def first_host(self, name: str) -> str:
        """Its hostname within the job's headless Service."""
        return f"{name}-0.{name}"

    def _limits(self, job: TrainingJob) -> Iterable[str]:
        if job.spec.nodes.min > 1:
            yield (
                "a pod on a dead node is not replaced until the node comes back, is deleted, or is tainted "
                "node.kubernetes.io/out-of-service: with a podFailurePolicy Kubernetes allows no other podReplacementPolicy "
                "than Failed; with nodes.min below nodes.max the others go on meanwhile"
            )

    def scale_patch(self, nodes: int) -> dict[str, Any]:
        """Completions move together with parallelism, as an elastic Indexed Job wants it."""
        return {"spec": {"completions": nodes, "parallelism": nodes}}

    def suspend_patch(self, suspended: bool, *, nodes: int = 1) -> dict[str, Any]:  # noqa: ARG002 - the count stays
        """Pods of a suspended Job end by SIGTERM, which saves."""
        return {"spec": {"suspend": suspended}}

    def read(self, workload: Mapping[str, Any]) -> WorkloadState:
        """Counts are pods."""
        status = workload.get("status") or {}
        return replace(
            read_end(workload, "Complete", "Failed"),
            active=int(status.get("active") or 0),
            ready=int(status.get("ready") or 0),
            succeeded=int(status.get("succeeded") or 0),
            failed=int(status.get("failed") or 0),
            suspended=bool((workload.get("spec") or {}).get("suspend")),
        )
