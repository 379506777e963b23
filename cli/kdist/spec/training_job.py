"""The whole of a job.yaml: `TrainingJob`, its metadata and its spec.

Field rules: camelCase in the file, snake_case in Python; a description begins with the field's
name; seconds are integers with the unit in the name; enums are used where a boolean might grow;
every list is bounded.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from kdist.spec.models import (
    Checkpoints,
    Data,
    EnvVar,
    FolderPath,
    ImageReference,
    JobName,
    Label,
    LabelKey,
    LabelValue,
    ObjectName,
    Resources,
    Toleration,
)
from kdist.spec.validators import RUN, check, check_job
from kdist.spec.violations import refuse
from kdist_trainer.config import (
    ConfigModel,
    Nodes,
    PositiveSeconds,
    Preflight,
    Script,
    Seconds,
    TrainConfig,
    Training,
)

API_VERSION: Final = "kdist.dev/v1alpha1"
KIND: Final = "TrainingJob"


def _nodes_from_number(value: Any) -> Any:
    """`nodes: 2` means `{min: 2, max: 2}`."""
    return {"min": value, "max": value} if type(value) is int else value


NodeCount = Annotated[int, Field(ge=1, le=4096)]


class Metadata(ConfigModel):
    """What the job is called, and where it lives."""

    name: JobName = Field(description="name of the job; its objects are named after it.")
    namespace: Label | None = Field(
        None, description="namespace of the cluster; without it the one of the kubeconfig."
    )
    labels: dict[LabelKey, LabelValue] = Field(
        {}, max_length=64, description="labels put on every object of the job."
    )
    annotations: dict[LabelKey, Annotated[str, Field(max_length=65_536)]] = Field(
        {}, max_length=64, description="annotations put on every object of the job."
    )


class Spec(ConfigModel):
    """What the job runs, and on what. Exactly one of train and script is given."""

    backend: Literal["auto", "job", "statefulset", "pytorchjob", "jobset", "trainjob"] = Field(
        "auto",
        description=(
            "backend: the workload kind on a cluster; job is an Indexed Job, auto asks the cluster."
        ),
    )
    image: ImageReference | None = Field(
        None, description="image of the pods; `kdist run` needs none."
    )
    nodes: Annotated[
        Nodes, BeforeValidator(_nodes_from_number, json_schema_input_type=NodeCount | Nodes)
    ] = Field(
        Nodes(min=1, max=1),
        description="nodes of the job: a number, or {min, max} for an elastic job.",
    )
    procs_per_node: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = Field(
        "auto", description="procsPerNode: ranks on each node; auto is one per GPU, else 1."
    )
    threads_per_rank: int = Field(
        1, ge=1, le=1024, description="threadsPerRank: CPU threads of each rank."
    )
    resources: Resources = Field(
        Resources(), description="resources of each pod; `kdist run` does not limit any."
    )
    code: FolderPath | None = Field(
        None,
        description=(
            "code: a folder with your modules or script, relative to the job file; without it "
            "they are in the image."
        ),
    )
    data: list[Data] = Field([], max_length=64, description="data sets that every rank can read.")
    checkpoints: Checkpoints | None = Field(
        None,
        description=(
            "checkpoints: where state is kept; without it a lost pod loses all (`kdist run` "
            "keeps a folder)."
        ),
    )
    env: list[EnvVar] = Field(
        [], max_length=256, description="env: variables of the training's environment."
    )
    max_restarts: int = Field(
        10,
        ge=0,
        le=100_000,
        description="maxRestarts without progress before the job gives up; progress refills it.",
    )
    queue: Label | None = Field(None, description="queue: Kueue's LocalQueue that admits the job.")
    rendezvous: Literal["auto", "file", "kubernetes", "c10d"] = Field(
        "auto",
        description=(
            "rendezvous: how nodes find each other; auto is file here, kubernetes on a "
            "cluster, else c10d."
        ),
    )
    node_selector: dict[LabelKey, LabelValue] = Field(
        {}, max_length=64, description="nodeSelector: labels a node must have."
    )
    tolerations: list[Toleration] = Field(
        [], max_length=64, description="tolerations: taints of nodes that the pods accept."
    )
    image_pull_secrets: list[ObjectName] = Field(
        [], max_length=16, description="imagePullSecrets: names of registry Secrets."
    )
    priority_class: ObjectName | None = Field(None, description="priorityClass of the pods.")
    service_account_name: ObjectName | None = Field(
        None,
        description=(
            "serviceAccountName: an account that is there, for cloud identities; without it "
            "one that may do nothing."
        ),
    )
    termination_grace_period_seconds: PositiveSeconds = Field(
        60,
        description="terminationGracePeriodSeconds from the request to stop to the end by force.",
    )
    ttl_seconds_after_finished: Seconds = Field(
        86_400, description="ttlSecondsAfterFinished that the objects of an ended job stay."
    )
    rendezvous_timeout_seconds: PositiveSeconds = Field(
        600, description="rendezvousTimeoutSeconds to wait for enough nodes."
    )
    join_window_seconds: Seconds = Field(
        10, description="joinWindowSeconds in which joining nodes are let in together."
    )
    collective_timeout_seconds: PositiveSeconds = Field(
        300, description="collectiveTimeoutSeconds a collective may take."
    )
    hang_timeout_seconds: PositiveSeconds = Field(
        300, description="hangTimeoutSeconds without progress before a rank is killed."
    )
    final_scrape_timeout_seconds: Seconds = Field(
        30,
        description=(
            "finalScrapeTimeoutSeconds at most that a scraped agent whose work is over waits for a "
            "last scrape."
        ),
    )
    pod_template: dict[str, JsonValue] = Field(
        {}, max_length=64, description="podTemplate: an overlay for the pod template, merged last."
    )
    preflight: Preflight | None = Field(
        None,
        description=(
            "preflight: what is measured between the ranks before they train; too slow a "
            "group ends the job."
        ),
    )
    train: Training | None = Field(None, description="train: the managed loop.")
    script: Script | None = Field(None, description="script: a torchrun script as it is.")

    @model_validator(mode="after")
    def _rules(self) -> Spec:
        refuse(check(self))
        return self


class TrainingJob(ConfigModel):
    """A distributed PyTorch training: one file that runs on this machine and on any Kubernetes."""

    api_version: Literal["kdist.dev/v1alpha1"] = Field(
        description="apiVersion of this file: kdist.dev/v1alpha1."
    )
    kind: Literal["TrainingJob"] = Field(description="kind of this file: TrainingJob.")
    metadata: Metadata = Field(description="metadata: name and namespace.")
    spec: Spec = Field(description="spec: what the job runs, and on what.")

    @model_validator(mode="after")
    def _rules(self) -> TrainingJob:
        refuse(check_job(self))
        return self

    @property
    def run(self) -> str | None:
        """What the job calls its run, None where it leaves that to kdist."""
        return self.metadata.annotations.get(RUN)

    @property
    def checkpoint_folder(self) -> str:
        """Name of its folder of checkpoints on a cluster: a run that has a name begins with none of
        another run's.
        """
        return self.metadata.name if self.run is None else f"{self.metadata.name}@{self.run}"

    def to_train_config(self) -> TrainConfig:
        """What the trainer is told (`train.json`): the part of the job that does not depend on
        where it runs.
        """
        shared = {
            name: getattr(self.spec, name)
            for name in TrainConfig.model_fields
            if name in Spec.model_fields
        }
        return TrainConfig(name=self.metadata.name, **shared)

    def to_document(self) -> dict[str, Any]:
        """The job as plain values, camelCase, every default written out."""
        return self.model_dump(mode="json", by_alias=True)
