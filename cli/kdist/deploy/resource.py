"""A job as a TrainingJob, which kdist's controller turns into the job's objects: planned here, and
sent by server-side apply. Where the cluster serves TrainingJobs, `kdist apply` sends one.

A job is sent either so or as its objects themselves; `uses_resource` refuses to mix the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kdist import backends, rbac, render
from kdist.backends import Placement
from kdist.deploy.admission import check_names, check_pod_admission
from kdist.deploy.code import place_code
from kdist.deploy.code_upload import upload_code
from kdist.deploy.delete import is_active, is_used, undo
from kdist.deploy.package_lock import lock_packages
from kdist.deploy.plan import (
    ApplyResult,
    Plan,
    check_kind,
    choose_backend,
    find_config_map,
    objects_of,
    refuse_direct,
)
from kdist.errors import KdistError
from kdist.job_file.folder import CodeFolder
from kdist.manifest import (
    CODE_LABEL,
    MANAGED_BY,
    OWNER,
    TRAINING_JOB,
    JobOwner,
    Manifest,
    find_owner,
    job_selector,
    mark,
    refer_to,
)
from kdist.spec import CodeFile, CodeSource, TrainingJob
from kdist.status import BACKEND, find_owning_resource
from kdist.status.documents import mapping, text, uid

if TYPE_CHECKING:
    from kdist.cluster import Cluster

Document = dict[str, Any]

_KEY: Final = re.compile(r"[-._a-zA-Z0-9]+")  # of a ConfigMap


def uses_resource(cluster: Cluster, name: str, *, direct: bool) -> bool:
    """Whether the job is to be sent as a TrainingJob: if the cluster serves them and the user may
    create one, unless `direct` asks for the objects themselves.

    Raises:
        KdistError: the job exists, and was sent the other way.
    """
    api_version, kind = TRAINING_JOB
    named = Manifest({"apiVersion": api_version, "kind": kind, "metadata": {"name": name}})
    served = not direct and cluster.serves(*TRAINING_JOB)
    if served and not rbac.find_missing(cluster, rbac.to_send([named])):
        # what belongs to somebody else is found when the TrainingJob is sent
        found = cluster.look_up("v1", "ConfigMap", name) or {}
        if find_owner(found, "ConfigMap") == name and find_owning_resource(found) is None:
            raise _refuse_resource(cluster, name)
        return True
    if (served or direct) and cluster.find_readable(*TRAINING_JOB, name) is not None:
        raise refuse_direct(cluster, name)
    return False


def _refuse_resource(cluster: Cluster, name: str) -> KdistError:
    place = f"-n {cluster.namespace}"
    return KdistError(
        f"{name} in namespace {cluster.namespace} was applied without a TrainingJob, before the "
        "cluster had kdist's controller or with --direct",
        hint=f"`kdist apply --direct` changes it as it is; or `kdist delete {name} {place}` keeps "
        "the checkpoints, and applying it again continues from them as a TrainingJob",
        next_command=f"kdist status {name} {place}",
    )


@dataclass(frozen=True)
class ResourcePlan:
    """A TrainingJob as it would be sent.

    Attributes:
        job: the job, with the namespace that it goes to.
        resource: the TrainingJob, with the fields that the user has set.
        code: the ConfigMap with the files of `spec.code`; None if there is none to send, or if they
            go to a bucket or claim.
        objects: the objects that the controller is expected to create, for checks in advance.
        before: the TrainingJob as it is on the cluster; None for a new one.
        folder: what is sent of the code folder of this machine.
    """

    job: TrainingJob
    resource: Manifest
    code: Manifest | None
    objects: Plan
    before: Document | None
    folder: CodeFolder | None = None

    @property
    def exists(self) -> bool:
        """Whether the cluster has the TrainingJob already."""
        return self.before is not None

    @property
    def owner(self) -> JobOwner:
        """The TrainingJob as the owner of what the controller creates."""
        metadata = self.job.metadata
        return JobOwner(
            str(metadata.namespace),
            metadata.name,
            self.objects.placement.backend,
            uid(self.before),
        )

    @property
    def warnings(self) -> list[str]:
        """Warnings for the user."""
        return self.objects.warnings

    @property
    def manifests(self) -> list[Manifest]:
        """What is sent, in its order: pods wait for a ConfigMap that comes later."""
        return [*([] if self.code is None else [self.code]), self.resource]


def plan_resource(cluster: Cluster, job: TrainingJob, *, base: Path) -> ResourcePlan:
    """Make the TrainingJob of a job, and check in advance that the controller can run it.

    Args:
        cluster: the cluster that it goes to.
        job: the job.
        base: folder that its relative paths start from.

    Returns:
        The plan.

    Raises:
        KdistError: the job cannot run on the cluster as it is.
    """
    name = job.metadata.name
    before = cluster.find_readable(*TRAINING_JOB, name)
    metadata = job.metadata.model_copy(update={"namespace": cluster.namespace})
    job = job.model_copy(update={"metadata": metadata})
    code = None
    job, folder, files = place_code(job, base)
    if files is not None:
        code, named = _make_code(name, cluster.namespace, files, before)
        job = job.model_copy(update={"spec": job.spec.model_copy(update={"code": named})})
    job, unlocked = lock_packages(job, mapping(before, "spec", "install"))
    backend = text(before, "status", "backend")
    check_kind(cluster, job, backend)
    placement = Placement(
        choose_backend(cluster, job, {BACKEND: backend}), backends.choose_rendezvous(job), name
    )
    sized = job.with_replicas()
    warnings = [*unlocked, *render.warn(sized, placement)]
    objects = Plan(sized, placement, render.render(sized, placement), warnings)
    # only the fields that the user has set, so that others may own the rest
    document = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    document["metadata"]["namespace"] = job.metadata.namespace
    found: Document = _without_null(document)
    if "podTemplate" in document["spec"]:  # where null has a meaning
        found["spec"]["podTemplate"] = document["spec"]["podTemplate"]
    return ResourcePlan(job, Manifest(found), code, objects, before, folder)


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(each) for key, each in value.items() if each is not None}
    return value


def _make_code(
    name: str, namespace: str, files: Mapping[str, bytes], before: Document | None
) -> tuple[Manifest, CodeSource]:
    """The ConfigMap with these files, and `spec.code` that names it. Keys are the names of the
    files, as a person would choose them, unless files are in folders.
    """
    packed = render.pack(files)
    keys = {each["key"]: each["key"] for each in packed["items"]}
    items = [CodeFile(key=each["key"], path=each["path"]) for each in packed["items"]]
    if all(_KEY.fullmatch(path) for path in files):
        keys, items = {each["key"]: each["path"] for each in packed["items"]}, []
    metadata: Document = {
        "name": f"{name}-code-{packed['digest']}",
        "namespace": namespace,
        "labels": {MANAGED_BY: "kdist", CODE_LABEL: name},
    }
    metadata["annotations"] = {OWNER: mark(name, "ConfigMap", metadata["name"])}
    if before is not None:
        metadata["ownerReferences"] = [refer_to(before)]
    document: Document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    document["immutable"] = True
    for field, found in (("data", packed["data"]), ("binaryData", packed["binary"])):
        if found:
            document[field] = {keys[key]: value for key, value in found.items()}
    given: Document = {"config_map": metadata["name"], **({"items": items} if items else {})}
    return Manifest(document), CodeSource(**given)


def send_resource(
    cluster: Cluster,
    plan: ResourcePlan,
    *,
    notify: Callable[[str], None] = lambda _: None,
    dry_run: bool = False,
    force: bool = False,
) -> Iterator[ApplyResult]:
    """Apply a TrainingJob, and before it the ConfigMap with its code.

    A server-side dry run comes first, so nothing is applied if the API server rejects one of them.

    Args:
        cluster: the cluster to apply to.
        plan: the TrainingJob.
        notify: receives what takes long.
        dry_run: stop after the dry run.
        force: take over fields of other field managers.

    Yields:
        Each object with its result, as soon as it is applied.

    Raises:
        ForeignError: an object that the controller would create exists, and is somebody else's.
        KdistError: the API server rejects one, or the job's pods.
    """
    objects = objects_of(cluster, plan.job.metadata.name)
    if not dry_run:
        rbac.require(cluster, rbac.to_send(plan.manifests))
    check_names(cluster, plan.owner, plan.objects.manifests)
    for manifest in plan.manifests:
        result = ApplyResult(manifest, objects.apply(manifest, dry_run=True, force=force))
        if dry_run:
            yield result
    check_pod_admission(cluster, plan.objects, ())
    if dry_run:
        return
    created = upload_code(cluster, plan.objects, plan.folder, plan.before, notify)
    try:
        for manifest in plan.manifests:
            result = ApplyResult(manifest, objects.apply(manifest, force=force))
            if result.applied.verb == "created":
                created.append(result)
            yield result
    except KdistError as error:
        if created:
            raise undo(objects, created, error) from error
        raise
    if plan.code is not None and plan.before is None:
        body = {"metadata": {"ownerReferences": [refer_to(result.applied.document)]}}
        objects.change("v1", "ConfigMap", plan.code.name, body)


def prune_code(
    cluster: Cluster, plan: ResourcePlan, *, dry_run: bool = False
) -> Iterator[Manifest]:
    """Delete ConfigMaps with code that was sent before, and that neither the TrainingJob nor its
    pods use; yields each afterwards.
    """
    name = plan.job.metadata.name
    sent_before = text(plan.before, "spec", "code", "configMap").startswith(f"{name}-code-")
    if not sent_before:
        return
    used = "" if plan.code is None else plan.code.name
    listed = cluster.list("v1", "ConfigMap", selector=f"{CODE_LABEL}={name}", metadata_only=True)
    old = [
        Manifest({**each, "immutable": True})
        for each in listed
        if each["metadata"]["name"] != used and find_owner(each, "ConfigMap") == name
    ]
    if not old:
        return
    pods = [pod for pod in cluster.list("v1", "Pod", selector=job_selector(name)) if is_active(pod)]
    # what a pod that comes next is made from
    made_from = text(find_config_map(cluster, name), "data", "job.json")
    for each in old:
        if f'"{each.name}"' in made_from or is_used(pods, each):
            continue
        if objects_of(cluster, name).remove("v1", "ConfigMap", each.name, dry_run=dry_run):
            yield each
