"""The whole of a job.yaml: `TrainingJob`, its metadata and its spec.

Field rules: camelCase in the file, snake_case in Python; a description is a sentence; seconds are
integers with the unit in the name; enums are used where a boolean might grow; every list is
bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, JsonValue, ValidationInfo, model_validator

from kdist.spec.models import (
    Checkpoints,
    CodeSource,
    Data,
    EnvVar,
    FolderPath,
    ImageReference,
    Install,
    JobName,
    Label,
    LabelKey,
    LabelValue,
    ObjectName,
    Resources,
    Time,
    Toleration,
    Violation,
)
from kdist.spec.sources import list_sources
from kdist.spec.validators import CHECKPOINTS_MOUNT, check, check_job
from kdist_trainer.config import (
    DEFAULT_RESTARTS,
    SECRET_VARIABLES,
    ConfigModel,
    Logs,
    NodeCount,
    Nodes,
    PositiveSeconds,
    Preflight,
    Restart,
    Script,
    Seconds,
    TrainConfig,
    Training,
)
from kdist_trainer.config.base import CheckedModel
from kdist_trainer.formats import JOB_API_VERSION, RUN

API_VERSION: Final = JOB_API_VERSION
KIND: Final = "TrainingJob"
WRITTEN: Final = "written"
"""The context in which a job is validated that a user has written just now."""


def job_document(name: str, **spec: Any) -> dict[str, Any]:
    """The document of a job with these fields of its spec."""
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}


def _nodes_from_number(value: Any) -> Any:
    """`nodes: 2` means `{min: 2, max: 2}`."""
    return {"min": value, "max": value} if type(value) is int else value


def _code_from_path(value: Any) -> Any:
    """`code: ./src` means `{path: ./src}`."""
    return {"path": value} if isinstance(value, str) else value


def shared(name: str) -> Any:
    """The field of this name as the trainer's settings have it."""
    return TrainConfig.model_fields[name]


class Metadata(ConfigModel):
    """Name, namespace, labels and annotations of the job."""

    name: JobName = Field(description="Name of the job and of its objects.")
    namespace: Label | None = Field(
        None, description=("Namespace on the cluster; defaults to that of the kubeconfig.")
    )
    labels: dict[LabelKey, LabelValue] = Field(
        {}, max_length=64, description="Labels for every object of the job."
    )
    annotations: dict[LabelKey, Annotated[str, Field(max_length=65_536)]] = Field(
        {}, max_length=64, description="Annotations for every object of the job."
    )


class Spec(CheckedModel):
    """What the job runs, and where. Exactly one of train and script is required."""

    backend: Literal["auto", "job", "statefulset", "pytorchjob", "jobset", "trainjob"] = Field(
        "auto",
        description=(
            "Workload kind on a cluster; job is an Indexed Job, auto selects what the "
            "cluster supports."
        ),
    )
    image: ImageReference | None = Field(
        None, description="Container image of the pods; not used by `kdist run`."
    )
    install: Install | None = Field(
        None,
        description=(
            "Makes the pods install the trainer and packages, {packages: [NAME, …]}, before they "
            "start, so that any image with Python and torch will do; not used by `kdist run`."
        ),
    )
    nodes: Annotated[
        Nodes, BeforeValidator(_nodes_from_number, json_schema_input_type=NodeCount | Nodes)
    ] = Field(
        Nodes(min=1, max=1),
        description="Number of nodes, or {min, max} for an elastic job.",
    )
    replicas: NodeCount | None = Field(
        None,
        description=(
            "Nodes that the job has for now, between nodes.min and nodes.max, which is the "
            "default; `kubectl scale` writes it."
        ),
    )
    # A boolean, because Job, JobSet and TrainJob have the same field, and tools patch it.
    suspend: bool = Field(
        False, description="Whether the job is to save its state and release its nodes."
    )
    restarted_at: Time | None = Field(
        None,
        description=(
            "Time of the last requested restart; another value restarts all ranks, which takes up "
            "changes that need new pods."
        ),
    )
    procs_per_node: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = Field(
        "auto", description=shared("procs_per_node").description
    )
    threads_per_rank: int = shared("threads_per_rank")
    resources: Resources = Field(
        Resources(), description=("Requests and limits of each pod; not enforced by `kdist run`.")
    )
    code: (
        Annotated[
            CodeSource,
            BeforeValidator(_code_from_path, json_schema_input_type=FolderPath | CodeSource),
        ]
        | None
    ) = Field(
        None,
        description=(
            "Folder with your modules or script, relative to the job file, {configMap: NAME} or "
            "{claim: NAME} on the cluster, or {url: URL}; defaults to what the image contains."
        ),
    )
    data: list[Data] = Field([], max_length=64, description="Data sets that every rank can read.")
    checkpoints: Checkpoints | None = Field(
        None,
        description=(
            "Where checkpoints are stored; without it a lost pod loses all progress (`kdist "
            "run` always uses a folder)."
        ),
    )
    env: list[EnvVar] = Field(
        [], max_length=256, description="Environment variables of the training."
    )
    max_restarts: Annotated[int, Field(ge=0, le=100_000)] | None = shared("max_restarts")
    restart: Restart | None = shared("restart")
    queue: Label | None = Field(None, description="Kueue LocalQueue that admits the job.")
    rendezvous: Literal["auto", "file", "kubernetes", "c10d"] = Field(
        "auto",
        description=(
            "How nodes find each other; auto is file for `kdist run` and kubernetes on a "
            "cluster, with c10d as fallback."
        ),
    )
    node_selector: dict[LabelKey, LabelValue] = Field(
        {}, max_length=64, description="Labels that a node must have to run a pod."
    )
    tolerations: list[Toleration] = Field(
        [], max_length=64, description="Node taints that the pods tolerate."
    )
    image_pull_secrets: list[ObjectName] = Field(
        [], max_length=16, description="Names of Secrets for pulling the image."
    )
    priority_class: ObjectName | None = Field(None, description="PriorityClass of the pods.")
    service_account_name: ObjectName | None = Field(
        None,
        description=(
            "Existing service account, e.g. for cloud identities; without it the job gets "
            "one with no permissions beyond its rendezvous."
        ),
    )
    active_deadline_seconds: PositiveSeconds | None = shared("active_deadline_seconds")
    memory_snapshot: Literal["on", "off"] = shared("memory_snapshot")
    termination_grace_period_seconds: int = shared("termination_grace_period_seconds")
    ttl_seconds_after_finished: Seconds = Field(
        86_400, description=("Seconds after which the objects of a finished job are deleted.")
    )
    rendezvous_timeout_seconds: int = shared("rendezvous_timeout_seconds")
    join_window_seconds: int = shared("join_window_seconds")
    collective_timeout_seconds: int = shared("collective_timeout_seconds")
    hang_timeout_seconds: int = shared("hang_timeout_seconds")
    final_scrape_timeout_seconds: int = shared("final_scrape_timeout_seconds")
    logs: Logs = shared("logs")
    compile_cache: str = shared("compile_cache")
    pod_template: dict[str, JsonValue] = Field(
        {}, max_length=64, description="Overlay for the pod template, merged last."
    )
    preflight: Preflight | None = shared("preflight")
    train: Training | None = shared("train")
    script: Script | None = shared("script")

    @model_validator(mode="before")
    @classmethod
    def _drop_standby(cls, spec: Any, info: ValidationInfo) -> Any:
        """Ignore `standby`, which version 0.1.0 has written into each stored job: a job that runs
        must outlive the upgrade. Who writes `warm` today learns that it does nothing.
        """
        is_stored = info.context != WRITTEN
        if isinstance(spec, dict) and (is_stored or spec.get("standby") == "none"):
            return {name: value for name, value in spec.items() if name != "standby"}
        return spec

    def _violations(self) -> Iterator[Violation]:
        return check(self)


class TrainingJob(CheckedModel):
    """A distributed PyTorch training that runs on this machine and on any Kubernetes."""

    api_version: Literal["kdist.dev/v1alpha1"] = Field(
        description="API version of this file: kdist.dev/v1alpha1."
    )
    kind: Literal["TrainingJob"] = Field(description="Kind of this file: TrainingJob.")
    metadata: Metadata = Field(description="Name, namespace, labels and annotations.")
    spec: Spec = Field(description="What the job runs, and where.")

    def _violations(self) -> Iterator[Violation]:
        return check_job(self)

    @property
    def restart_limit(self) -> int:
        """Restarts without progress of a training that continues after one."""
        named = self.spec.max_restarts
        return DEFAULT_RESTARTS if named is None else named

    def with_replicas(self) -> TrainingJob:
        """The job as it is to run for now: `replicas`, if it is set, in place of `nodes.max`."""
        spec = self.spec
        if spec.replicas is None:
            return self
        nodes = spec.nodes.model_copy(update={"max": spec.replicas})
        changed = spec.model_copy(update={"nodes": nodes, "replicas": None})
        return self.model_copy(update={"spec": changed})

    @property
    def run(self) -> str | None:
        """The run's name from the annotation; None if kdist generates it."""
        return self.metadata.annotations.get(RUN)

    @property
    def checkpoint_folder(self) -> str:
        """Name of the checkpoint folder on a cluster. A named run has its own folder, so it never
        resumes from another run's checkpoints.
        """
        return self.metadata.name if self.run is None else f"{self.metadata.name}@{self.run}"

    @property
    def checkpoint_root(self) -> str:
        """Where that folder is: a path inside the pods, or a URL without a slash at its end."""
        checkpoints = self.spec.checkpoints
        bucket = None if checkpoints is None else checkpoints.bucket
        return CHECKPOINTS_MOUNT if bucket is None else bucket

    @property
    def checkpoint_claim(self) -> str | None:
        """The claim with the checkpoints; None if they are elsewhere."""
        found = self.spec.checkpoints
        if found is None or found.size is None:
            return None if found is None else found.claim
        return f"{self.metadata.name}-checkpoints"

    def to_train_config(self) -> TrainConfig:
        """The trainer's settings (`train.json`): the part of the job that does not depend on where
        it runs.
        """
        shared = {
            name: getattr(self.spec, name)
            for name in TrainConfig.model_fields
            if name in Spec.model_fields
        }
        secret = [variable.name for variable in self.spec.env if variable.secret is not None]
        if self.spec.checkpoints is not None:
            secret += SECRET_VARIABLES.get(self.spec.checkpoints.scheme, ())
        for source in list_sources(self.spec):
            secret += SECRET_VARIABLES.get(source.scheme, ())
        names = list(dict.fromkeys(secret))
        return TrainConfig(name=self.metadata.name, secret_variables=names, **shared)

    def to_document(self) -> dict[str, Any]:
        """The job as plain values in camelCase, with all defaults."""
        return self.model_dump(mode="json", by_alias=True)
