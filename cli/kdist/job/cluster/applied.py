"""A job as it was applied, read from its ConfigMap or TrainingJob: every change starts from it. The
job's objects can be rendered again from that ConfigMap, and those that have changed are applied.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kdist import backends, deploy, render
from kdist.backends import Backend, Placement, WorkloadState
from kdist.cluster import Cluster, JobObjects, JobOwner, find_makers
from kdist.deploy.live_workload import find_live_workload, refuse_without
from kdist.deploy.plan import find_config_map
from kdist.errors import JobNotFoundError, KdistError, NotFoundError
from kdist.job.cluster.wait import refuse
from kdist.job.job import SILENT, Dialog
from kdist.manifest import TRAINING_JOB, Manifest
from kdist.spec import RUN, TrainingJob
from kdist.status import (
    BACKEND,
    RENDEZVOUS,
    RUN_ID,
    Pod,
    documents,
    find_owning_resource,
    read_job,
    read_pod,
    read_resource,
)
from kdist.status.documents import annotation
from kdist_trainer.formats import NewerFormatError, take_format
from kdist_trainer.formats.untrusted_text import parse_json

if TYPE_CHECKING:
    from kdist.job.cluster.changes import ControllerChanges, DirectChanges

Document = dict[str, Any]


@dataclass(frozen=True)
class AppliedJob:
    """A job as it was applied to a cluster.

    Attributes:
        cluster: a connection to the cluster, with the job's namespace.
        config_map: the job's own ConfigMap, as it was when the job was found.
        job: the job: of a TrainingJob what that says, else read from the ConfigMap. Its name and
            namespace are those of the object.
        backend: its workload kind.
        placement: how it was placed on the cluster.
        dialog: receives messages, and asks before anything is sent that only the ConfigMap
            vouches for.
    """

    cluster: Cluster
    config_map: Mapping[str, Any]
    job: TrainingJob
    backend: Backend
    placement: Placement
    dialog: Dialog = SILENT

    @classmethod
    def find(cls, cluster: Cluster, name: str, *, dialog: Dialog = SILENT) -> AppliedJob:
        """Read the job `name` of the cluster's namespace.

        Args:
            cluster: the cluster, with the job's namespace.
            name: of the job.
            dialog: see the attribute; it is warned if the ConfigMap names another namespace, which
                is ignored.

        Raises:
            JobNotFoundError: there is no such job.
            ForeignError: the ConfigMap of this name belongs to something else.
            KdistError: the ConfigMap is gone while the workload exists, or does not hold a job of
                this version, or another job.
        """
        config_map = find_config_map(cluster, name)
        owner = find_owning_resource(config_map)
        if config_map is None or owner is not None:
            return cls._find_resource(cluster, name, config_map or {}, owner or {}, dialog)
        backend = annotation(config_map, BACKEND)
        placement = Placement(
            backend=backend,
            rendezvous="c10d" if annotation(config_map, RENDEZVOUS) == "c10d" else "kubernetes",
            run_id=annotation(config_map, RUN_ID),
        )
        job = render.read_job(config_map)
        stored = documents.text(read_job(config_map), "metadata", "namespace")
        if stored not in ("", cluster.namespace):
            dialog.warn(
                f"ConfigMap {name} in namespace {cluster.namespace} names the namespace {stored}, "
                "which is ignored"
            )
        own = job.metadata.model_copy(update={"namespace": cluster.namespace})
        job = job.model_copy(update={"metadata": own})
        return cls(cluster, config_map, job, backends.get(backend), placement, dialog)

    @classmethod
    def _find_resource(
        cls,
        cluster: Cluster,
        name: str,
        config_map: Document,
        owner: Mapping[str, Any],
        dialog: Dialog,
    ) -> AppliedJob:
        """The job of a TrainingJob: what its spec says, whatever its ConfigMap contains."""
        read = cluster.get if owner else cluster.find_readable
        resource = read(*TRAINING_JOB, name)
        if resource is None:
            if (live := find_live_workload(cluster, name)) is not None:
                raise refuse_without(cluster, name, live)
            raise JobNotFoundError((name, cluster.namespace))
        if owner and owner.get("uid") != documents.uid(resource):
            raise KdistError(
                f"ConfigMap {name} in namespace {cluster.namespace} belongs to a TrainingJob "
                f"{name} that was deleted; the one that exists is another one",
                hint="the controller creates its objects once those of the other one are gone",
                next_command=f"kdist status {name} -n {cluster.namespace}",
            )
        state = read_resource(resource)
        if state.refusal and not config_map:
            raise refuse(cluster, name, state)  # it has nothing that a command could act on
        run = documents.annotation(resource, RUN)
        document = {
            "apiVersion": resource["apiVersion"],
            "kind": resource["kind"],
            "metadata": {
                "name": name,
                "namespace": cluster.namespace,
                "annotations": {RUN: run} if run else {},
            },
            "spec": resource.get("spec") or {},
        }
        try:
            job = _validate(document, name, "run").with_replicas()
        except KdistError as error:
            raise (refuse(cluster, name, state) if state.refusal else error) from error
        status = documents.mapping(resource, "status")
        backend = (
            documents.text(status, "backend")
            or annotation(config_map, BACKEND)
            or backends.choose(cluster.kinds(), job)
        )
        rendezvous = (
            "c10d"
            if annotation(config_map, RENDEZVOUS) == "c10d"
            else backends.choose_rendezvous(job)
        )
        run_id = documents.text(status, "runId") or annotation(config_map, RUN_ID)
        placement = Placement(backend, rendezvous, run_id)
        return cls(cluster, config_map, job, backends.get(backend), placement, dialog)

    @property
    def is_resource(self) -> bool:
        """Whether the job is a TrainingJob, whose objects the controller creates and changes."""
        return not self.config_map or find_owning_resource(self.config_map) is not None

    @cached_property
    def changes(self) -> DirectChanges | ControllerChanges:
        """How it is changed."""
        from kdist.job.cluster.changes import ControllerChanges, DirectChanges

        return ControllerChanges(self) if self.is_resource else DirectChanges(self)

    def resource(self) -> Document:
        """The TrainingJob. Raises `NotFoundError` if it does not exist."""
        return self.cluster.get(*TRAINING_JOB, self.name)

    @property
    def name(self) -> str:
        return self.job.metadata.name

    @property
    def namespace(self) -> str:
        return self.cluster.namespace

    def command(self, verb: str, *options: str) -> str:
        """The command line of `kdist VERB` for this job, valid in any directory."""
        return " ".join(["kdist", verb, self.name, "-n", self.namespace, *options])

    @property
    def checkpoints(self) -> str:
        """The run's checkpoint folder: a path inside its pods, or a URL in a bucket."""
        return f"{self.job.checkpoint_root}/{self.job.checkpoint_folder}"

    @property
    def uses_bucket(self) -> bool:
        """Whether the checkpoints are in a bucket, which no pod mounts."""
        checkpoints = self.job.spec.checkpoints
        return checkpoints is not None and checkpoints.bucket is not None

    @property
    def owner(self) -> JobOwner:
        """The job as the owner of its objects."""
        uid = documents.text(find_owning_resource(self.config_map) or {}, "uid")
        return JobOwner(self.namespace, self.name, backend=self.backend.name, uid=uid)

    @property
    def objects(self) -> JobObjects:
        """What changes its objects; its pods are none of them."""
        return JobObjects(self.cluster, self.owner)

    def pod_objects(self) -> JobObjects:
        """What changes its pods, and its Workload of Kueue. Raises as `workload` does."""
        makers = find_makers(self.cluster, self.backend, self.workload())
        return JobObjects(self.cluster, replace(self.owner, makers=makers))

    def workload(self) -> Document:
        """The workload, which creates the pods.

        Raises:
            NotFoundError: it does not exist; it may have been deleted after its TTL.
            ForeignError: the object of this name belongs to something else.
        """
        found = self.cluster.get(self.backend.api_version, self.backend.kind, self.name)
        self.owner.check(found, api_version=self.backend.api_version, kind=self.backend.kind)
        return found

    def state(self) -> WorkloadState:
        """State of the workload, or of a TrainingJob that has none. Raises as `workload` does."""
        try:
            return self.backend.read(self.workload())
        except NotFoundError:
            if not self.is_resource:
                raise
            known = read_resource(self.resource())
            return WorkloadState(suspended=known.suspended, finished=known.finished)

    def pods(self) -> list[Pod]:
        """The job's pods, in the order of their indices."""
        found = self.cluster.list("v1", "Pod", selector=self.backend.pod_selector(self.name))
        own = (read_pod(pod) for pod in found if backends.is_made_for(pod, self.name))
        return sorted(own, key=lambda pod: (pod.index or 0, pod.name))

    def annotate(self, annotations: Mapping[str, str | None], *, dry_run: bool = False) -> None:
        """Change annotations of the job's ConfigMap; the value None removes one."""
        body = {"metadata": {"annotations": dict(annotations)}}
        self.objects.change("v1", "ConfigMap", self.name, body, dry_run=dry_run)

    def patch_workload(self, body: Mapping[str, Any], *, dry_run: bool = False) -> Document:
        """Change fields of the workload."""
        kind = self.backend
        return self.objects.change(kind.api_version, kind.kind, self.name, body, dry_run=dry_run)

    def with_nodes(self, least: int, most: int) -> AppliedJob:
        """A copy of the job with these limits on its number of nodes. Raises `KdistError` if the
        job is not valid with them.
        """
        document = self.job.to_document()
        document["spec"]["nodes"] = {**document["spec"]["nodes"], "min": least, "max": most}
        return replace(self, job=_validate(document, self.name, "have these nodes"))

    def without_code(self) -> AppliedJob:
        """A copy of the job without `spec.code`."""
        spec = self.job.spec.model_copy(update={"code": None})
        return replace(self, job=self.job.model_copy(update={"spec": spec}))


def _validate(document: Document, name: str, verb: str) -> TrainingJob:
    from pydantic import ValidationError

    try:
        return TrainingJob.model_validate(document, by_alias=True, by_name=False)
    except ValidationError as error:
        reasons = "; ".join(
            str(each["msg"]).removeprefix("Value error, ") for each in error.errors()[:3]
        )
        raise KdistError(f"{name} cannot {verb}: {reasons}") from error


def render_objects(target: AppliedJob, *, suspended: bool = False) -> list[Manifest]:
    """Render all objects of the job again, with the files of `spec.code` that were applied last."""
    sent = target.job.spec.code is not None and target.job.spec.code.path is not None
    code = read_code(target) if sent else None
    rendered = render.render(target.job, replace(target.placement, suspended=suspended, code=code))
    # The ConfigMap that the code was read from exists, and is immutable.
    return [
        one
        for one in rendered
        if not (one.kind == "ConfigMap" and one.name.startswith(f"{target.name}-code-"))
    ]


def read_code(target: AppliedJob) -> dict[str, bytes]:
    """The files of `spec.code` by their path, from the ConfigMap that holds them. Raises
    `KdistError` if the ConfigMap does not exist or cannot be read.
    """
    try:
        document = parse_json(target.config_map["data"]["code.json"])
        volume = take_format("code.json", document)
        found = target.cluster.get("v1", "ConfigMap", volume["name"])
        text, binary = found.get("data") or {}, found.get("binaryData") or {}
        files = {}
        for item in volume.get("items") or []:
            key = item["key"]
            files[item["path"]] = (
                text[key].encode() if key in text else b64decode(binary.get(key, ""))
            )
        return files
    except NotFoundError as error:
        raise KdistError(
            f"ConfigMap {volume['name']} with the code of {target.name} is gone",
            next_command="run `kdist apply` with the job file to send it again",
        ) from error
    except NewerFormatError as error:
        raise KdistError(f"ConfigMap {target.name}: {error}") from None
    except (KeyError, ValueError, TypeError) as error:
        raise KdistError(
            f"ConfigMap {target.name} does not say where the code of {target.name} is",
            next_command="run `kdist apply` with the job file to send it again",
        ) from error


def is_workload(target: AppliedJob, manifest: Manifest) -> bool:
    """Whether this is the job's workload."""
    return (manifest.kind, manifest.name) == (target.backend.kind, target.name)


def apply_objects(
    target: AppliedJob, manifests: Iterable[Manifest], *, dry_run: bool = False
) -> None:
    """Send objects by server-side apply, in their order. If the server rejects one, those created
    before it are deleted again.
    """
    known = dict(target.config_map)
    plan = deploy.Plan(target.job, target.placement, list(manifests), [], known)
    for _ in deploy.send(target.cluster, plan, dry_run=dry_run):
        pass
