"""Deletes a job from a cluster: which of its objects go, which stay, and how long its pods may take
to save and end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kdist import backends, rbac, render
from kdist.backends import CLAIM
from kdist.cluster import JobObjects, JobOwner, find_makers, find_resource, list_resources
from kdist.deploy import delete
from kdist.errors import KdistError, NotFoundError
from kdist.job.cluster import training_job
from kdist.job.cluster.snapshot import or_empty
from kdist.manifest import (
    JOB_LABEL,
    MANAGED_BY,
    RECLAIM_POLICY,
    TRAINING_JOB,
    Manifest,
    job_selector,
)
from kdist.rbac import Right
from kdist.status.documents import Document, integer, items, name, text

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
        resource: the job's TrainingJob, with which the controller's objects go; None without one.
    """

    cluster: Cluster
    name: str
    objects: Sequence[Manifest]
    kept: Sequence[Manifest]
    foreign: Sequence[Manifest]
    resource: Manifest | None = None

    @property
    def bucket(self) -> str:
        """URL of the job's checkpoints in a bucket, which stay; empty if it has none there."""
        for each in self.objects:
            if (each.kind, each.name) == ("ConfigMap", self.name):
                with suppress(KdistError):  # a job of another version
                    job = render.read_job(each.document)
                    if job.spec.checkpoints is not None and job.spec.checkpoints.bucket:
                        return f"{job.checkpoint_root}/{job.checkpoint_folder}"
        return ""

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

    def list_strays(self) -> list[Document]:
        """Pods that bear the job's label and have no owner, by name: somebody made them, or deleted
        the workload with `--cascade=orphan`. They stay unless a user says that they are the job's.
        """
        selector = job_selector(self.name)
        pods = or_empty(lambda: self.cluster.list("v1", "Pod", selector=selector))
        return sorted(
            (pod for pod in pods if not items(pod, "metadata", "ownerReferences")), key=name
        )

    def remove_strays(
        self,
        strays: Sequence[Document],
        *,
        grace: int | None = None,
        timeout: float | None = None,
        dry_run: bool = False,
    ) -> Iterator[str]:
        """Delete these pods, before what they need to save; the arguments are those of `run`.

        Yields:
            The name of each as it is deleted.

        Raises:
            KdistError: rights are missing (FORBIDDEN), or pods do not end in time (TIMEOUT).
        """
        if not dry_run:
            rbac.require(self.cluster, [Right("delete", "v1", "Pod")])
        own = JobObjects(self.cluster, JobOwner(self.cluster.namespace, self.name))
        for pod in strays:
            uid = text(pod, "metadata", "uid")
            own.remove_ownerless(name(pod), uid=uid, grace=grace, dry_run=dry_run)
            yield name(pod)
        if timeout is not None and not dry_run:
            uids = {text(pod, "metadata", "uid") for pod in strays}
            delete.wait_for_pods(self.cluster, self.name, timeout=timeout, uids=uids)

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
        if self.resource is not None:
            return self._remove_resource(
                self.resource, grace=grace, timeout=timeout, dry_run=dry_run
            )
        return delete.remove(
            self.cluster, self.name, self.objects, grace=grace, dry_run=dry_run, wait=timeout
        )

    def _remove_resource(
        self, found: Manifest, *, grace: int | None, timeout: float | None, dry_run: bool
    ) -> Iterator[Manifest]:
        """Delete the TrainingJob, and claims after it, which the controller would create again.

        The pods save and end before, because the garbage collector takes the rendezvous at once,
        which saving needs. Without a controller nothing would end them.
        """
        others = [each for each in self.objects if each is not found]
        orphans, _ = delete.split(others)
        if not dry_run:
            wanted = [*rbac.to_delete(self.objects), Right("patch", *TRAINING_JOB, name=self.name)]
            rbac.require(self.cluster, wanted)
        waits = timeout is not None and not dry_run
        if (
            waits
            and not orphans
            and any(map(delete.is_active, delete.find_pods(self.cluster, self.name)))
        ):
            self._end_pods(grace, timeout or 0.0)
        own = JobObjects(self.cluster, JobOwner(self.cluster.namespace, self.name))
        own.remove(*TRAINING_JOB, self.name, dry_run=dry_run)
        yield found
        if orphans:  # the garbage collector would not take what no TrainingJob owns
            yield from delete.remove(
                self.cluster, self.name, others, grace=grace, dry_run=dry_run, wait=timeout
            )
            return
        if waits:
            delete.wait_for_pods(self.cluster, self.name, timeout=timeout or 0.0)
        for each in others:
            own.remove(each.api_version, each.kind, each.name, dry_run=dry_run)
            yield each

    def _end_pods(self, grace: int | None, timeout: float) -> None:
        """Suspend the job, and wait until its pods have ended, if a controller acts."""
        spec = {"spec": {"suspend": True}}
        own = JobObjects(self.cluster, JobOwner(self.cluster.namespace, self.name))
        changed = own.change(*TRAINING_JOB, self.name, spec)
        try:
            training_job.wait_for_answer(self.cluster, changed)
        except KdistError:
            return  # deleting it ends them all the same
        if grace is not None:
            makers = _find_makers(self.cluster, changed)
            delete.end_pods(self.cluster, self.name, makers=makers, grace=grace)
        delete.wait_for_pods(self.cluster, self.name, timeout=timeout, active_only=True)


def _find_makers(cluster: Cluster, document: Document) -> frozenset[str]:
    """The uids of what makes the pods of a TrainingJob."""
    name, uid = text(document, "metadata", "name"), text(document, "metadata", "uid")
    backend = text(document, "status", "backend")
    if backend not in backends.NAMES:
        return frozenset()
    kind = backends.get(backend)
    try:
        workload = cluster.get(kind.api_version, kind.kind, name)
    except NotFoundError:
        return frozenset()
    if not JobOwner(cluster.namespace, name, uid=uid).owns(workload, kind.kind):
        return frozenset()
    return find_makers(cluster, kind, workload)


def plan_deletion(cluster: Cluster, name: str, *, purge: bool = False) -> Deletion:
    """Find what is to be deleted. There are no objects if there is no such job.

    Args:
        cluster: the cluster, with the job's namespace.
        name: of the job.
        purge: delete claims with checkpoints too, if they were created for the job; those with
            `reclaimPolicy: Delete` always are.
    """
    objects, foreign = delete.find_objects(cluster, name)
    document = find_resource(cluster, name)
    found = None if document is None else Manifest(document)
    if found is not None:
        objects = [found, *objects]
    kept = [] if purge else [each for each in objects if each.kind == CLAIM and not _goes(each)]
    return Deletion(
        cluster, name, [each for each in objects if each not in kept], kept, foreign, found
    )


def _goes(claim: Manifest) -> bool:
    """Whether a claim is deleted with its job, as `checkpoints.reclaimPolicy: Delete` asks for."""
    return text(claim.document, "metadata", "annotations", RECLAIM_POLICY) == "Delete"


def list_names(cluster: Cluster, selector: str = "") -> list[str]:
    """Names of the jobs with these labels; of all jobs of the namespace without a selector."""
    wanted = ",".join(part for part in (f"{MANAGED_BY}=kdist", selector) if part)
    found = cluster.list("v1", "ConfigMap", selector=wanted, metadata_only=True)
    labels = [each["metadata"].get("labels") or {} for each in found]
    names = [each[JOB_LABEL] for each in labels if JOB_LABEL in each]
    resources = list_resources(cluster, selector=selector)
    return list(dict.fromkeys([*names, *(str(each["metadata"]["name"]) for each in resources)]))


def default_timeout(pods: Sequence[Document], grace: int | None = None) -> float:
    """Seconds that pods may take to end: `grace`, else their longest grace period, and a margin."""
    if grace is None:
        periods = [integer(pod, "spec", "terminationGracePeriodSeconds") for pod in pods]
        grace = max(
            (each or _DEFAULT_GRACE_SECONDS for each in periods), default=_DEFAULT_GRACE_SECONDS
        )
    return grace + _MARGIN_SECONDS
