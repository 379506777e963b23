"""A PyTorchJob of Kubeflow's training-operator (v1), with workers only, as elastic jobs require."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kdist.backends.base import Backend
from kdist.status import WorkloadState

if TYPE_CHECKING:
    from kdist.spec import TrainingJob


class PyTorchJob(Backend):
    """`backend: pytorchjob`. The operator requires the container's name, and sets the pods'
    restart policy itself.
    """

    name = "pytorchjob"
    api_version = "kubeflow.org/v1"
    kind = "PyTorchJob"
    template = "pytorchjob.yaml.j2"
    host = "{name}-worker-0"  # the operator's own Service
    success = "Succeeded"
    container = "pytorch"
    restart_policy = ""
    keeps_template = True
    sizes = ("maxReplicas", "minReplicas", "replicas", "suspend")
    reuses_pod_names = True

    def _limits(self, job: TrainingJob) -> Iterator[str]:
        yield (
            "the training-operator re-creates failed pods without limit, because its backoffLimit "
            "does not count them, so only the agents enforce maxRestarts; and it never deletes a "
            "job that failed; backend: job does both"
        )
        from kdist.spec import list_sources  # the fields of job.yaml are slow to import

        if list_sources(job.spec):
            yield (
                "the training-operator does not read the exit codes of init containers: data that "
                "cannot be fetched (a wrong URL or checksum) is tried again without end; "
                "backend: job ends the job"
            )
        yield from super()._limits(job)

    def keep(self, rendered: dict[str, Any], workload: Mapping[str, Any]) -> dict[str, Any]:
        """Keep the template of running pods: the operator would create a lost pod from the new
        one.
        """
        worker = (
            ((workload.get("spec") or {}).get("pytorchReplicaSpecs") or {}).get("Worker")
        ) or {}
        if "template" not in worker or self.read(workload).suspended:
            return rendered
        replicas = {
            "Worker": {
                **rendered["spec"]["pytorchReplicaSpecs"]["Worker"],
                "template": worker["template"],
            }
        }
        return {**rendered, "spec": {**rendered["spec"], "pytorchReplicaSpecs": replicas}}

    def suspend_patch(self, suspended: bool, *, nodes: int = 1) -> dict[str, Any]:  # noqa: ARG002 - the count stays
        """The operator deletes the pods of a suspended job."""
        return {"spec": {"runPolicy": {"suspend": suspended}}}

    def read(self, workload: Mapping[str, Any]) -> WorkloadState:
        """Counts are worker pods; the operator does not count the ready ones."""
        counts = ((workload.get("status") or {}).get("replicaStatuses") or {}).get("Worker") or {}
        return replace(
            super().read(workload),
            active=int(counts.get("active") or 0),
            succeeded=int(counts.get("succeeded") or 0),
            failed=int(counts.get("failed") or 0),
            suspended=bool(((workload.get("spec") or {}).get("runPolicy") or {}).get("suspend")),
        )
