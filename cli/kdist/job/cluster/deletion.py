"""Deletes a job from a cluster: which of its objects go, which stay, and how long its pods may take
to save and end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kdist import backends, rbac, render
from kdist.cluster import (
    JobObjects,
    JobOwner,
    describe_owner,
    find_makers,
)
from kdist.deploy import delete
from kdist.errors import JobNotFoundError, KdistError
from kdist.job.cluster import wait
from kdist.job.cluster.suspend import SPARE_SECONDS
from kdist.job.job import DeleteOptions, describe_kept
from kdist.manifest import (
    JOB_LABEL,
    MANAGED_BY,
    TRAINING_JOB,
    Manifest,
    job_selector,
)
from kdist.rbac import Right
from kdist.status.documents import Document, integer, items, name, text, uid

if TYPE_CHECKING:
    from kdist.cluster import Cluster
    from kdist.job.cluster.job import ClusterJob

_DEFAULT_GRACE_SECONDS = 30  # Kubernetes' own


@dataclass(frozen=True)
class _Plan:
    """What deleting a job comes to.

    Attributes:
        job: the job.
        chosen: how it is deleted.
        objects: the job's objects that are deleted.
        kept: the job's objects that stay: claims with its checkpoints.
        foreign: objects that bear the job's names or labels and belong to something else.
        resource: the job's TrainingJob, with which the controller's objects go; None without one.
        strays: pods that bear the job's label and have no owner, by name: somebody made them, or
            deleted the workload with `--cascade=orphan`. They stay unless a user says that they are
            the job's.
    """

    job: ClusterJob
    chosen: DeleteOptions
    objects: Sequence[Manifest]
    kept: Sequence[Manifest]
    foreign: Sequence[Manifest]
    resource: Manifest | None
    strays: Sequence[Document]

    @classmethod
    def find(cls, job: ClusterJob, chosen: DeleteOptions) -> _Plan:
        """Find what is to be deleted. There are no objects if there is no such job."""
        objects, foreign = delete.find_objects(job.cluster, job.name)
        document = job.cluster.find_readable(*TRAINING_JOB, job.name)
        resource = None if document is None else Manifest(document)
        if resource is not None:
            objects = [resource, *objects]
        kept = [] if chosen.purge else [each for each in objects if each.stays]
        pods = job.cluster.list_readable("v1", "Pod", selector=job_selector(job.name))
        strays = [pod for pod in pods if not items(pod, "metadata", "ownerReferences")]
        objects = [each for each in objects if each not in kept]
        return cls(job, chosen, objects, kept, foreign, resource, sorted(strays, key=name))

    @property
    def bucket(self) -> str:
        """URL of the job's checkpoints in a bucket, which stay; empty if it has none there."""
        for each in self.objects:
            if (each.kind, each.name) == ("ConfigMap", self.job.name):
                with suppress(KdistError):  # a job of another version
                    job = render.read_job(each.document)
                    if job.spec.checkpoints is not None and job.spec.checkpoints.bucket:
                        return f"{job.checkpoint_root}/{job.checkpoint_folder}"
        return ""

    @property
    def owns_pods(self) -> bool:
        """Whether pods of this name are the job's, because no foreign workload has it."""
        return not delete.split(self.foreign)[0]

    @property
    def is_trial(self) -> bool:
        """Whether the server only checks it."""
        return self.chosen.dry_run == "server"

    @property
    def own(self) -> JobObjects:
        """What deletes objects by the job's name."""
        return JobObjects(self.job.cluster, JobOwner(self.job.namespace, self.job.name))

    def find_leaving(self) -> list[Document]:
        """The job's pods that have not ended."""
        return [
            pod
            for pod in delete.find_pods(self.job.cluster, self.job.name)
            if text(pod, "status", "phase") not in ("Succeeded", "Failed")
        ]

    def remove_strays(self, strays: Sequence[Document], timeout: float | None) -> Iterator[str]:
        """Delete these pods, before what they need to save, and yield the title of each."""
        cluster, own = self.job.cluster, self.own
        if not self.is_trial:
            rbac.require(cluster, [Right("delete", "v1", "Pod")])
        for pod in strays:
            grace = self.chosen.grace_period
            own.remove_ownerless(name(pod), uid=uid(pod), grace=grace, dry_run=self.is_trial)
            yield f"pod/{name(pod)}"
        if timeout is not None and not self.is_trial:
            uids = {uid(pod) for pod in strays}
            delete.wait_for_pods(cluster, self.job.name, timeout=timeout, uids=uids)

    def remove(self, timeout: float | None) -> Iterator[Manifest]:
        """Delete the objects, and yield each as it goes. Pods have `timeout` seconds to end; None
        does not wait.
        """
        if self.resource is None:
            return self._remove(self.objects, timeout)
        return self._remove_resource(self.resource, timeout)

    def _remove(self, objects: Sequence[Manifest], timeout: float | None) -> Iterator[Manifest]:
        grace = self.chosen.grace_period if self.owns_pods else None
        cluster, job = self.job.cluster, self.job.name
        return delete.remove(
            cluster, job, objects, grace=grace, dry_run=self.is_trial, wait=timeout
        )

    def _remove_resource(self, found: Manifest, timeout: float | None) -> Iterator[Manifest]:
        """Delete the TrainingJob, and claims after it, which the controller would create again.

        The pods save and end before, because the garbage collector takes the rendezvous at once,
        which saving needs. Without a controller nothing would end them.
        """
        cluster, job = self.job.cluster, self.job.name
        others = [each for each in self.objects if each is not found]
        orphans, _ = delete.split(others)
        if not self.is_trial:
            wanted = [*rbac.to_delete(self.objects), Right("patch", *TRAINING_JOB, name=job)]
            rbac.require(cluster, wanted)
        waits = timeout is not None and not self.is_trial
        if waits and not orphans and any(map(delete.is_active, delete.find_pods(cluster, job))):
            self._end_pods(timeout or 0.0)
        self.own.remove(*TRAINING_JOB, job, dry_run=self.is_trial)
        yield found
        if orphans:  # the garbage collector would not take what no TrainingJob owns
            yield from self._remove(others, timeout)
            return
        if waits:
            delete.wait_for_pods(cluster, job, timeout=timeout or 0.0)
        for each in others:
            self.own.remove(each.api_version, each.kind, each.name, dry_run=self.is_trial)
            yield each

    def _end_pods(self, timeout: float) -> None:
        """Suspend the job, and wait until its pods have ended, if a controller acts."""
        cluster, job = self.job.cluster, self.job.name
        changed = self.own.change(*TRAINING_JOB, job, {"spec": {"suspend": True}})
        try:
            wait.wait_for_answer(cluster, changed)
        except KdistError:
            return  # deleting it ends them all the same
        if self.owns_pods and self.chosen.grace_period is not None:
            makers = _find_makers(cluster, changed)
            delete.end_pods(cluster, job, makers=makers, grace=self.chosen.grace_period)
        delete.wait_for_pods(cluster, job, timeout=timeout, active_only=True)


def _find_makers(cluster: Cluster, document: Document) -> frozenset[str]:
    """The uids of what makes the pods of a TrainingJob."""
    owner = JobOwner(cluster.namespace, name(document), uid=uid(document))
    backend = text(document, "status", "backend")
    if backend not in backends.NAMES:
        return frozenset()
    kind = backends.get(backend)
    workload = cluster.look_up(kind.api_version, kind.kind, owner.name)
    if workload is None or not owner.owns(workload, kind.kind):
        return frozenset()
    return find_makers(cluster, kind, workload)


def delete_job(job: ClusterJob, chosen: DeleteOptions, kept: list[str]) -> Iterator[str]:
    """Delete a job, and yield the title of each object as it goes; `kept` receives sentences about
    what stays. See `Job.plan_deletion`. Raises `JobNotFoundError` if there is none.
    """
    title, dialog, plan = job.name, job.dialog, _Plan.find(job, chosen)
    for each in plan.foreign:
        owner = describe_owner(each.document)
        dialog.warn(f"{each.title} stays: it does not belong to job {title}: {owner}")
    strays = plan.strays
    if strays and not chosen.orphans:
        dialog.warn(
            f"{', '.join(map(name, strays))}: no workload owns these pods, though their label "
            f"names {title}: they stay; `kdist delete {title} --orphans -n {job.namespace}` "
            "deletes them"
        )
        strays = []
    if not plan.objects and not strays:
        raise JobNotFoundError((title, job.namespace))
    waits = chosen.wait and chosen.dry_run == "none"
    pods = plan.find_leaving() if waits and plan.owns_pods else []
    seconds = chosen.timeout
    if seconds is None:
        grace = chosen.grace_period if plan.owns_pods else None
        if grace is None:  # their longest one
            periods = (
                integer(pod, "spec", "terminationGracePeriodSeconds") for pod in (*pods, *strays)
            )
            grace = max(
                (each or _DEFAULT_GRACE_SECONDS for each in periods), default=_DEFAULT_GRACE_SECONDS
            )
        seconds = grace + SPARE_SECONDS
    if waited := [*pods, *(strays if waits else [])]:
        dialog.notify(
            f"waiting up to {seconds:.0f} s for {len(waited)} pods of {title} to save and end "
            "(Ctrl-C stops waiting)"
        )
    if chosen.dry_run == "client":
        yield from (f"pod/{name(each)}" for each in strays)
        yield from (each.title for each in plan.objects)
    else:
        if strays:
            yield from plan.remove_strays(strays, seconds if chosen.wait else None)
        limit = seconds if chosen.wait and plan.owns_pods else None
        yield from (each.title for each in plan.remove(limit))
    kept += [describe_kept(each.title, f"kdist delete {title} --purge") for each in plan.kept]
    if plan.bucket:
        kept.append(describe_kept(plan.bucket, ""))


def list_names(cluster: Cluster, selector: str = "") -> list[str]:
    """Names of the jobs with these labels; of all jobs of the namespace without a selector."""
    wanted = ",".join(part for part in (f"{MANAGED_BY}=kdist", selector) if part)
    found = cluster.list("v1", "ConfigMap", selector=wanted, metadata_only=True)
    labels = [each["metadata"].get("labels") or {} for each in found]
    names = [each[JOB_LABEL] for each in labels if JOB_LABEL in each]
    resources = cluster.list_readable(*TRAINING_JOB, selector=selector)
    return list(dict.fromkeys([*names, *(str(each["metadata"]["name"]) for each in resources)]))
