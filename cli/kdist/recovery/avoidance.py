"""Keeps a job's pods from a node for a time, though a workload that runs cannot change how its pods
are scheduled. Every pod of a job refuses a node on which a pod has `AVOID_LABEL` with the job's
name: `avoid` has a Job make one there, the marker, which sleeps until its deadline.

The marker names its node, because a scheduler would not put it next to the pods that refuse it. It
requests nothing, because the kubelet of a full node would reject it, and schedulers count no pod
that has ended. Its priority is that of the job's pods, which preempt it if theirs is higher.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import asdict, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from kdist import rbac
from kdist.cluster import ApiError, JobObjects, find_makers
from kdist.errors import Code, KdistError, UsageError
from kdist.manifest import AVOID_LABEL, JOB_LABEL, MANAGED_BY, OWNER, mark
from kdist.rbac import Right
from kdist.status import AVOIDED, AvoidedNode, container_of, documents, find_owning_resource
from kdist.status.documents import Document
from kdist_trainer.formats.json_text import encode_json

if TYPE_CHECKING:
    from kdist.cluster import Cluster
    from kdist.job.cluster.applied import AppliedJob

AVOID_SECONDS: Final = 86_400.0
_JOB: Final = ("batch/v1", "Job")
_PATIENCE_SECONDS: Final = 30.0
_RETRIES: Final = 10_000
"""More than a marker takes until its deadline, whatever keeps its container from running."""
_TAKEN: Final = ("imagePullSecrets", "priorityClassName", "securityContext")
"""Fields of the job's pods that the marker's pod has too."""
_CONFINED: Final = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def name_marker(job: str, node: str) -> str:
    """The name of the marker of a job on a node."""
    return f"{job}-avoid-{hashlib.sha256(node.encode()).hexdigest()[:6]}"


def avoid(
    target: AppliedJob, wanted: AvoidedNode, *, dry_run: bool = False, change: bool = True
) -> list[str]:
    """Keep the job's pods from a node, if a person asks for as long as that says, and delete those
    that were there before, so that they save and start elsewhere; returns their names. Without
    `change` nothing is sent, with `dry_run` the server only checks it.

    Raises `UsageError` for a node that does not exist, `ForeignError` for a marker that is not the
    job's, and `KdistError` if the job has no pod that would stay away from it, rights are missing
    (FORBIDDEN), the marker gets no pod (TIMEOUT), or a pod that came after the marker stays there.
    """
    cluster, job, node = target.cluster, target.name, wanted.node
    if pinned := documents.text(target.job.spec.pod_template, "spec", "nodeName"):
        raise KdistError(
            f"podTemplate names a node for the pods of {job}: they would come back to {pinned}",
            hint="remove spec.nodeName from podTemplate, and restart the job",
        )
    makers = find_makers(cluster, target.backend, target.workload())
    # without a backend: the marker is a Job, whatever the kind of the workload
    objects = JobObjects(cluster, replace(target.owner, backend="", makers=makers))
    pods = cluster.list("v1", "Pod", selector=target.backend.pod_selector(job))
    # pods that do not refuse markers would come back: they stay
    pods = [pod for pod in pods if objects.owner.owns(pod, "Pod") and _refuses_markers(pod, job)]
    there = [pod for pod in pods if documents.text(pod, "spec", "nodeName") == node]
    if not pods:
        raise KdistError(
            f"{job} has no pod that would stay away from {node}: only pods that this version has "
            "applied do, unless podTemplate removes their podAntiAffinity",
            hint="a restart makes new pods, from the last checkpoint",
            next_command=target.command("restart"),
        )
    marker = cluster.look_up(*_JOB, name_marker(job, node))
    if not there and marker is None and _is_absent(cluster, node):
        raise UsageError(
            f"--avoid {node}: there is no such node", next_command=target.command("status")
        )
    alive = [
        pod
        for pod in there
        if documents.text(pod, "status", "phase") not in ("Succeeded", "Failed")
        and not documents.text(pod, "metadata", "deletionTimestamp")
    ]
    if marker is not None:
        objects.owner.check(marker, api_version=_JOB[0], kind=_JOB[1])
    # a scheduler that puts a pod next to the marker's would do so again
    marks = cluster.list("v1", "Pod", selector=f"{AVOID_LABEL}={job}") if marker else []
    marks = [pod for pod in marks if documents.text(pod, "spec", "nodeName") == node]
    since = min((_created(pod) or math.inf for pod in marks), default=math.inf)
    staying = [documents.name(pod) for pod in alive if (_created(pod) or 0.0) > since]
    leaving = {
        name: documents.uid(pod) for pod in alive if (name := documents.name(pod)) not in staying
    }
    if change:
        verbs = ("create" if marker is None else "patch", "delete")
        rbac.require(cluster, [*(Right(each, *_JOB) for each in verbs), *rbac.on_pods("delete")])
        if marker is None:
            objects.create(_make_marker(target, [*there, *pods][0], wanted), dry_run=dry_run)
        elif wanted.faults is None:
            _extend(objects, marker, wanted, dry_run=dry_run)
        if not dry_run:
            _wait_for_pod(target, name_marker(job, node))
        for name, uid in leaving.items():
            objects.remove("v1", "Pod", name, uid=uid, dry_run=dry_run)
    if staying:
        raise KdistError(
            f"{', '.join(staying)} came to {node} after that was marked, and stays: the scheduler "
            f"does not keep to the podAntiAffinity of {job}, so another pod could follow",
            hint="look at schedulerName in podTemplate",
        )
    return list(leaving)


def allow(target: AppliedJob, node: str, *, dry_run: bool = False, change: bool = True) -> None:
    """Let the job's pods use a node again. Raises `UsageError` if it is not avoided."""
    name = name_marker(target.name, node)
    if target.cluster.look_up(*_JOB, name) is None:
        raise UsageError(
            f"--allow {node}: {target.name} does not avoid that node",
            next_command=target.command("status"),
        )
    if change:
        rbac.require(target.cluster, [Right("delete", *_JOB)])
        objects = JobObjects(target.cluster, replace(target.owner, backend=""))
        objects.remove(*_JOB, name, dry_run=dry_run)


def _is_absent(cluster: Cluster, node: str) -> bool:
    """Whether there is no such node; False for a user who may not read nodes."""
    try:
        cluster.get("v1", "Node", node)
    except ApiError as error:
        if error.status not in (HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN):
            raise
        return error.status == HTTPStatus.NOT_FOUND
    return False


def _created(document: Document | None) -> float | None:
    return documents.moment(document, "metadata", "creationTimestamp")


def _extend(objects: JobObjects, marker: Document, wanted: AvoidedNode, *, dry_run: bool) -> None:
    """Let a marker that is there already end when a person wants it."""
    started = documents.moment(marker, "status", "startTime") or _created(marker) or time.time()
    body = {
        "metadata": {"annotations": {AVOIDED: _describe(wanted)}},
        "spec": {"activeDeadlineSeconds": max(1, round(wanted.until - started))},
    }
    objects.change(*_JOB, documents.name(marker), body, dry_run=dry_run)


def _describe(wanted: AvoidedNode) -> str:
    return encode_json(asdict(wanted), ensure_ascii=False)


def _refuses_markers(pod: Document, job: str) -> bool:
    """Whether a pod of a job stays away from its markers."""
    rules = documents.mapping(pod, "spec", "affinity", "podAntiAffinity")
    terms = documents.items(rules, "requiredDuringSchedulingIgnoredDuringExecution")
    selectors = (documents.mapping(each, "labelSelector", "matchLabels") for each in terms)
    return any(each.get(AVOID_LABEL) == job for each in selectors)


def _make_marker(target: AppliedJob, pod: Document, wanted: AvoidedNode) -> dict[str, Any]:
    """The Job that makes the marker, like this pod of the job. It is deleted with the job."""
    job, spec = target.name, documents.mapping(pod, "spec")
    name = name_marker(job, wanted.node)
    labels = {AVOID_LABEL: job, MANAGED_BY: "kdist"}
    containers = documents.items(spec, "containers")
    container = {
        "name": "marker",
        "image": next(each["image"] for each in containers if each["name"] == container_of(pod)),
        "command": ["sleep", "infinity"],
        "resources": {  # a quota wants requests and limits to be named
            "requests": {"cpu": "0", "memory": "0"},
            "limits": {"cpu": "10m", "memory": "16Mi"},
        },
        "securityContext": _CONFINED,
    }
    template = {
        **{key: spec[key] for key in _TAKEN if key in spec},
        "nodeName": wanted.node,
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "tolerations": [{"operator": "Exists"}],
        "containers": [container],
    }
    uid = documents.uid(target.config_map)
    own = {"apiVersion": "v1", "kind": "ConfigMap", "name": job, "uid": uid}
    return {
        "apiVersion": _JOB[0],
        "kind": _JOB[1],
        "metadata": {
            "name": name,
            "namespace": target.namespace,
            # the pod has not the job's label: it counts neither for its budget nor its network
            "labels": {**labels, JOB_LABEL: job},
            "annotations": {
                OWNER: mark(job, _JOB[1], name),
                AVOIDED: _describe(wanted),
            },
            "ownerReferences": [dict(find_owning_resource(target.config_map) or own)],
        },
        "spec": {
            "activeDeadlineSeconds": max(1, round(wanted.until - time.time())),
            "ttlSecondsAfterFinished": 0,
            "backoffLimit": _RETRIES,
            "parallelism": 1,
            "template": {"metadata": {"labels": labels}, "spec": template},
        },
    }


def _wait_for_pod(target: AppliedJob, marker: str) -> None:
    """Return when the marker has its pod: the job's next pod could be scheduled before it."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while not documents.integer(target.cluster.get(*_JOB, marker), "status", "active"):
        if time.monotonic() > end:
            raise KdistError(
                f"job.batch/{marker} has made no pod for {_PATIENCE_SECONDS:.0f} s, for example "
                f"because of a quota, so no pod of {target.name} was deleted",
                next_command=f"kubectl describe job {marker} -n {target.namespace}",
                code=Code.TIMEOUT,
            )
        time.sleep(0.2)
