"""The small sections of a job.yaml: data, checkpoints, environment, resources, tolerations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kdist.spec.rules import refuse
from kdist.spec.words import (
    CpuText,
    EnvName,
    EnvValue,
    FolderPath,
    LabelKey,
    LabelValue,
    MountPath,
    ObjectName,
    SecretKeyName,
    Storage,
)
from kdist_trainer.config import Model, Seconds


class Resources(Model):
    """What each pod asks for, as requests and as limits."""

    cpu: Annotated[int, Field(ge=1, le=4096)] | Annotated[float, Field(gt=0, le=4096)] | CpuText = Field(
        1, description="cpu cores of each pod: a number, or millicores such as 500m."
    )
    memory: Storage = Field("4Gi", description="memory of each pod, with a unit such as Gi; shared memory counts too.")
    gpu: int = Field(0, ge=0, le=1024, description="gpu: GPUs of each pod.")


class Data(Model):
    """One data set that every rank can read."""

    claim: ObjectName | None = Field(None, description="claim: PersistentVolumeClaim that holds the data on a cluster.")
    path: FolderPath | None = Field(None, description="path of the same data on this machine, for `kdist run`.")
    mount_path: MountPath = Field(description="mountPath where the training finds the data on a cluster.")

    @model_validator(mode="after")
    def _somewhere(self) -> Data:
        if self.claim is None and self.path is None:
            refuse("needs a claim (on a cluster), a path (on this machine), or both", "claim", "path")
        return self


class Checkpoints(Model):
    """Where the training's state is kept: in a claim that exists, a claim to be made, or a folder of this machine."""

    claim: ObjectName | None = Field(None, description="claim: PersistentVolumeClaim that exists.")
    size: Storage | None = Field(None, description="size of a PersistentVolumeClaim that is made for the job.")
    class_: ObjectName | None = Field(None, alias="class", description="class of storage of the claim that is made.")
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"] | None = Field(
        None, description="accessMode of the claim that is made; with size the default is ReadWriteMany."
    )
    path: FolderPath | None = Field(None, description="path of a folder on this machine, for `kdist run`.")

    @model_validator(mode="after")
    def _one_form(self) -> Checkpoints:
        given = [name for name in ("claim", "size", "path") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            refuse(f"needs exactly one of claim, size and path, found {found}", "claim", "size", "path")
        if self.size is None:
            for name, alias in (("class_", "class"), ("access_mode", "accessMode")):
                if getattr(self, name) is not None:
                    refuse(f"{alias} belongs to a claim that is made: it needs size", alias, "size")
        return self


class SecretKey(Model):
    """A key of a Secret."""

    name: ObjectName = Field(description="name of the Secret.")
    key: SecretKeyName = Field(description="key in the Secret.")


class EnvVar(Model):
    """One variable of the training's environment."""

    name: EnvName = Field(description="name of the variable.")
    value: EnvValue | None = Field(None, description="value as text; quote numbers.")
    secret: SecretKey | None = Field(
        None, description="secret that holds the value on a cluster; `kdist run` takes it from its own environment."
    )

    @model_validator(mode="after")
    def _one_origin(self) -> EnvVar:
        if (self.value is None) == (self.secret is None):
            refuse("needs exactly one of value and secret", "value", "secret")
        return self


class Toleration(Model):
    """A taint of nodes that the pods accept, as in a pod's `tolerations`."""

    key: LabelKey | None = Field(None, description="key of the taint; without it every taint is accepted.")
    operator: Literal["Equal", "Exists"] = Field("Equal", description="operator: Equal compares the value, Exists does not.")
    value: LabelValue | None = Field(None, description="value of the taint, for Equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="effect of the taint; without it every effect is accepted."
    )
    toleration_seconds: Seconds | None = Field(None, description="tolerationSeconds before a NoExecute taint evicts the pod.")

    @model_validator(mode="after")
    def _sensible(self) -> Toleration:
        if self.key is None and self.operator != "Exists":
            refuse("without a key the operator must be Exists", "key", "operator")
        if self.operator == "Exists" and self.value is not None:
            refuse("operator Exists takes no value", "operator", "value")
        return self
