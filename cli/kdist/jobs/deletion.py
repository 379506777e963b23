"""Deletes a job from a cluster: which of its objects go, which stay, and how long its pods may take
to save and end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kdist.deploy import delete
from kdist.deploy.dependents import CLAIM
from kdist.manifest import JOB_LABEL, RECLAIM_POLICY, Manifest
from kdist.status.documents import Document, integer, text

if TYPE_CHECKING:
    from kdist.cluster import Cluster

_DEFAULT_GRACE_SECONDS = 30  # Kubernetes' own
_MARGIN_SECONDS = 60.0  # that a node may need beyond a pod's grace period to remove it


@dataclass(frozen=True)
class Deletion:
    """What deleting a job comes to.

    Attributes:
        cluster: the cluster.
        name: of the job.
        objects: the job's objects that are deleted.
        kept: the job's objects that stay: claims with its checkpoints.
        foreign: objects that bear the job's names or labels and belong to something else.
    """

    cluster: Cluster
    name: str
    objects: Sequence[Manifest]
    kept: Sequence[Manifest]
    foreign: Sequence[Manifest]

    @property
    def owns_pods(self) -> bool:
        """Whether pods of this name are the job's, because no foreign workload has it."""
        return not delete.split(self.foreign)[0]

    def pods_to_wait_for(self) -> list[Document]:
        """The job's pods that have not ended."""
        return [
            pod
            for pod in delete.find_pods(self.cluster, self.name)
            if text(pod, "status", "phase") not in ("Succeeded", "Failed")
        ]

    def run(
        self, *, grace: int | None = None, timeout: float | None = None, dry_run: bool = False
    ) -> Iterator[Manifest]:
        """Delete the objects.

        Args:
            grace: grace period for the pods in seconds, instead of the job's.
            timeout: seconds to wait for the pods to end; None does not wait.
            dry_run: let the server check it, and delete nothing.

        Yields:
            Each object as it is deleted.

        Raises:
            KdistError: rights are missing (FORBIDDEN), or pods do not end in time (TIMEOUT).
        """
        return delete.remove(
            self.cluster, self.name, self.objects, grace=grace, dry_run=dry_run, wait=timeout
        )


def plan_deletion(cluster: Cluster, name: str, *, purge: bool = False) -> Deletion:
    """Find what is to be deleted. There are no objects if there is no such job.

    Args:
        cluster: the cluster, with the job's namespace.
        name: of the job.
        purge: delete claims with checkpoints too, if they were created for the job; those with
            `reclaimPolicy: Delete` always are.
    """
    objects, foreign = delete.find_objects(cluster, name)
    kept = [] if purge else [each for each in objects if each.kind == CLAIM and not _goes(each)]
    return Deletion(cluster, name, [each for each in objects if each not in kept], kept, foreign)


def _goes(claim: Manifest) -> bool:
    """Whether a claim is deleted with its job, as `checkpoints.reclaimPolicy: Delete` asks for."""
    return text(claim.document, "metadata", "annotations", RECLAIM_POLICY) == "Delete"


def list_names(cluster: Cluster, selector: str = "") -> list[str]:
    """Names of the jobs with these labels; of all jobs of the namespace without a selector."""
    wanted = ",".join(part for part in ("app.kubernetes.io/managed-by=kdist", selector) if part)
    found = cluster.list("v1", "ConfigMap", selector=wanted, metadata_only=True)
    labels = [each["metadata"].get("labels") or {} for each in found]
    return list(dict.fromkeys(each[JOB_LABEL] for each in labels if JOB_LABEL in each))


def default_timeout(pods: Sequence[Document], grace: int | None = None) -> float:
    """Seconds that pods may take to end: `grace`, else their longest grace period, and a margin."""
    if grace is None:
        periods = [integer(pod, "spec", "terminationGracePeriodSeconds") for pod in pods]
        grace = max(
            (each or _DEFAULT_GRACE_SECONDS for each in periods), default=_DEFAULT_GRACE_SECONDS
        )
    return grace + _MARGIN_SECONDS
