"""A StatefulSet: pods with stable names, for clusters that allow nothing else; never completes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kdist.backends.base import Backend
from kdist.status import OUTCOME, ExitRecord, WorkloadState

if TYPE_CHECKING:
    from kdist.spec import TrainingJob


class StatefulSet(Backend):
    """`backend: statefulset`. Its pods restart whatever their exit code, so an agent stays alive
    after its end, unready.
    """

    name = "statefulset"
    api_version = "apps/v1"
    kind = "StatefulSet"
    template = "statefulset.yaml.j2"
    restart_policy = "Always"
    keeps_alive = True
    sizes = ("replicas", "selector")
    refusals = (*Backend.refusals, "updates to statefulset spec")
    reuses_pod_names = True

    def _limits(self, job: TrainingJob) -> Iterator[str]:
        yield (
            "a StatefulSet never completes: its pods hold their resources until a kdist command "
            "(wait, status, apply --wait) sees the end of the training, and "
            "ttlSecondsAfterFinished has no effect; backend: job ends by itself"
        )
        if job.spec.queue:
            yield (
                "Kueue lets a StatefulSet be scaled only to 0 and back; backend: job "
                "can be scaled within its queue"
            )

    def suspend_patch(self, suspended: bool, *, nodes: int = 1) -> dict[str, Any]:
        """Scale to 0 pods; the record of an earlier end is deleted."""
        return {
            "metadata": {"annotations": {OUTCOME: None}},
            "spec": {"replicas": 0 if suspended else nodes},
        }

    def read(self, workload: Mapping[str, Any]) -> WorkloadState:
        """It ended if it has 0 replicas and the exit record that kdist wrote at the end."""
        status = workload.get("status") or {}
        state = WorkloadState(
            active=int(status.get("replicas") or 0), ready=int(status.get("readyReplicas") or 0)
        )
        if (workload.get("spec") or {}).get("replicas") != 0:
            return state
        record = ExitRecord.parse(
            ((workload.get("metadata") or {}).get("annotations") or {}).get(OUTCOME)
        )
        if record is None:
            return replace(state, suspended=True)
        return replace(
            state,
            finished="succeeded" if record.code == 0 else "failed",
            reason=record.cause,
            message=record.message,
        )
