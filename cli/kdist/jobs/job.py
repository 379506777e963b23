"""A job in the cluster, read from its ConfigMap, which every verb starts from. Its objects can be
rendered again from that ConfigMap, and those that have changed are sent.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kdist import backends, deploy, render
from kdist.backends import Backend, Placement, WorkloadState
from kdist.cluster import Cluster, check_owner
from kdist.errors import KdistError, NotFoundError
from kdist.manifest import Manifest
from kdist.rbac import Right
from kdist.spec import TrainingJob
from kdist.status import ASKED, BACKEND, RENDEZVOUS, RUN_ID, Pod, read_pod
from kdist.status.documents import annotation

Document = dict[str, Any]


@dataclass(frozen=True)
class ClusterJob:
    """One job of one cluster. `config_map` is as it was when the command began."""

    cluster: Cluster
    config_map: Mapping[str, Any]
    job: TrainingJob
    backend: Backend
    placement: Placement

    @property
    def name(self) -> str:
        return self.job.metadata.name

    @property
    def namespace(self) -> str:
        return self.cluster.namespace

    def command(self, verb: str, *options: str) -> str:
        """A command of ours about this job, as it may be typed anywhere."""
        return " ".join(["kdist", verb, self.name, "-n", self.namespace, *options])

    @property
    def checkpoints(self) -> str:
        """Folder of the run's checkpoints in its pods."""
        return f"/checkpoints/{self.job.checkpoint_folder}"

    def workload(self) -> Document:
        """The object that makes the pods. Raises `NotFoundError` where it is gone, by its TTL for
        instance, and `ForeignError` where one of that name is somebody else's.
        """
        found = self.cluster.get(self.backend.api_version, self.backend.kind, self.name)
        check_owner(found, self.name, api_version=self.backend.api_version, kind=self.backend.kind)
        return found

    def state(self) -> WorkloadState:
        """What the workload says of itself. Raises `NotFoundError` where it is gone."""
        return self.backend.read(self.workload())

    def pods(self) -> list[Pod]:
        """The job's pods, in the order of their indices."""
        found = self.cluster.list("v1", "Pod", selector=self.backend.pod_selector(self.name))
        own = (read_pod(pod) for pod in found if backends.is_made_for(pod, self.name))
        return sorted(own, key=lambda pod: (pod.index or 0, pod.name))

    def ask(self, word: str | None, *, dry_run: bool = False) -> None:
        """Note in the ConfigMap what the user asked for: suspended, stopped, or None, which is to
        run.
        """
        self.annotate({ASKED: word}, dry_run=dry_run)

    def annotate(self, annotations: Mapping[str, str | None], *, dry_run: bool = False) -> None:
        """Change annotations of the job's ConfigMap; None takes one away."""
        body = {"metadata": {"annotations": dict(annotations)}}
        self.cluster.change("v1", "ConfigMap", self.name, body, job=self.name, dry_run=dry_run)

    def patch_workload(self, body: Mapping[str, Any], *, dry_run: bool = False) -> Document:
        """Change fields of the workload."""
        kind = self.backend
        return self.cluster.change(
            kind.api_version, kind.kind, self.name, body, job=self.name, dry_run=dry_run
        )

    def patch_rights(self) -> list[Right]:
        """What it takes to change the workload and what was asked for it."""
        kinds = (("v1", "ConfigMap"), (self.backend.api_version, self.backend.kind))
        return [Right("patch", api_version, kind, name=self.name) for api_version, kind in kinds]

    def with_nodes(self, least: int, most: int) -> ClusterJob:
        """The same job with other nodes. Raises `KdistError` where its own rules forbid them."""
        document = self.job.to_document()
        document["spec"]["nodes"] = {"min": least, "max": most}
        return replace(self, job=_read(document, self.name))

    def without_code(self) -> ClusterJob:
        """The same job as if all its code were in the image."""
        spec = self.job.spec.model_copy(update={"code": None})
        return replace(self, job=self.job.model_copy(update={"spec": spec}))


def find(cluster: Cluster, name: str) -> ClusterJob:
    """The job NAME of the cluster's namespace.

    Raises `NotFoundError`, `ForeignError` for a ConfigMap that is somebody else's, `KdistError` for
    one that holds no job.
    """
    try:
        config_map = cluster.get("v1", "ConfigMap", name)
    except NotFoundError as error:
        raise NotFoundError(
            f"there is no job {name} in namespace {cluster.namespace}",
            next_command="kdist get -A",
            hint=error.hint,
        ) from error
    check_owner(config_map, name, api_version="v1", kind="ConfigMap")
    job = render.read_job(config_map)
    backend, rendezvous = annotation(config_map, BACKEND), annotation(config_map, RENDEZVOUS)
    placement = Placement(
        backend=backend,
        rendezvous="c10d" if rendezvous == "c10d" else "kubernetes",
        run_id=annotation(config_map, RUN_ID),
    )
    return ClusterJob(cluster, config_map, job, backends.get(backend), placement)


def _read(document: Document, name: str) -> TrainingJob:
    from pydantic import ValidationError

    try:
        return TrainingJob.model_validate(document, by_alias=True, by_name=False)
    except ValidationError as error:
        reasons = "; ".join(
            str(each["msg"]).removeprefix("Value error, ") for each in error.errors()[:3]
        )
        raise KdistError(f"{name} cannot have these nodes: {reasons}") from error


def render_anew(target: ClusterJob, *, suspended: bool = False) -> list[Manifest]:
    """All objects of the target's job; the files of `spec.code` are those that it was sent with
    last.
    """
    code = read_code(target) if target.job.spec.code is not None else None
    rendered = render.render(target.job, replace(target.placement, suspended=suspended, code=code))
    # The code that was read back is there already, and its ConfigMap is immutable.
    return [
        one
        for one in rendered
        if not (one.kind == "ConfigMap" and one.name.startswith(f"{target.name}-code-"))
    ]


def fit(
    target: ClusterJob, manifests: Iterable[Manifest], workload: Mapping[str, Any]
) -> list[Manifest]:
    """The same objects for a job that is at work: what its workload cannot change, and what its
    agents were told, stays.

    The ConfigMap with its `train.json` is the one that it has: this kdist may be of another
    version, and know other fields.
    """
    told = f"{target.name}-train-"
    has = {
        str(each["name"])
        for each in _find_all(workload, "configMap")
        if str(each.get("name")).startswith(told)
    }
    found = []
    for one in manifests:
        document = one.document
        if is_workload(target, one):
            document = target.backend.keep(document, workload)
            if len(has) == 1:
                document = json.loads(
                    re.sub(rf'"{told}[0-9a-f]+"', f'"{has.copy().pop()}"', json.dumps(document))
                )
        elif one.kind == "ConfigMap" and one.name.startswith(told):
            continue
        found.append(Manifest(document))
    return found


def read_code(target: ClusterJob) -> dict[str, bytes]:
    """The files of `spec.code` by their path, from the ConfigMap that holds them. Raises
    `KdistError` where it is gone.
    """
    try:
        return _read_files(target, json.loads(target.config_map["data"]["code.json"]))
    except (KeyError, ValueError) as error:
        raise KdistError(
            f"ConfigMap {target.name} does not say where the code of {target.name} is",
            next_command="kdist apply with the job file sends it again",
        ) from error


def _read_files(target: ClusterJob, volume: Mapping[str, Any]) -> dict[str, bytes]:
    try:
        found = target.cluster.get("v1", "ConfigMap", volume["name"])
    except NotFoundError as error:
        raise KdistError(
            f"ConfigMap {volume['name']} with the code of {target.name} is gone",
            next_command="kdist apply with the job file sends it again",
        ) from error
    text, binary = found.get("data") or {}, found.get("binaryData") or {}
    files = {}
    for item in volume.get("items") or []:
        key = item["key"]
        files[item["path"]] = text[key].encode() if key in text else b64decode(binary.get(key, ""))
    return files


def _find_all(document: Any, key: str) -> Iterator[Mapping[str, Any]]:
    """Every object that stands under `key`, wherever in the document."""
    if isinstance(document, Mapping):
        for name, value in document.items():
            if name == key and isinstance(value, Mapping):
                yield value
            yield from _find_all(value, key)
    elif isinstance(document, list):
        for value in document:
            yield from _find_all(value, key)


def is_workload(target: ClusterJob, manifest: Manifest) -> bool:
    """Whether this is the object that makes the pods."""
    return (manifest.kind, manifest.name) == (target.backend.kind, target.name)


def send(target: ClusterJob, manifests: Iterable[Manifest], *, dry_run: bool = False) -> None:
    """Send objects by server-side apply, in their order; what the server refuses leaves no half of
    them behind.
    """
    known = dict(target.config_map)
    plan = deploy.Plan(target.job, target.placement, list(manifests), [], known)
    for _ in deploy.send(target.cluster, plan, dry_run=dry_run):
        pass
