"""The small sections of a job.yaml: data, checkpoints, environment, resources, tolerations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from kdist.spec.rules import Violation, check_mount, check_variable, refuse
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

CoreCount = Annotated[float, Field(gt=0, le=4096)]


def _text_of_cores(value: Any) -> Any:
    """`cpu: 2` means `cpu: "2"`, as Kubernetes reads it."""
    return str(value) if type(value) in (int, float) else value


class Resources(Model):
    """What each pod asks for, as requests and as limits."""

    cpu: Annotated[CpuText, BeforeValidator(_text_of_cores, json_schema_input_type=CoreCount | CpuText)] = Field(
        "1", description="cpu cores of each pod: a number, or millicores such as 500m."
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
        refuse(self._violations())
        return self

    def _violations(self) -> Iterator[Violation]:
        if self.claim is None and self.path is None:
            yield Violation("needs a claim (on a cluster), a path (on this machine), or both", "", ("claim", "path"))
        yield from check_mount(self.mount_path)


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
        refuse(self._violations())
        return self

    def _violations(self) -> Iterator[Violation]:
        forms = ("claim", "size", "path")
        given = [name for name in forms if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            yield Violation(f"needs exactly one of claim, size and path, found {found}", "", forms)
        if self.size is None:
            for value, name in ((self.class_, "class"), (self.access_mode, "accessMode")):
                if value is not None:
                    yield Violation("belongs to a claim that is made for the job: it needs size", name, ("size", name))


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
        refuse(self._violations())
        return self

    def _violations(self) -> Iterator[Violation]:
        if (self.value is None) == (self.secret is None):
            yield Violation("needs exactly one of value and secret", "", ("value", "secret"))
        yield from check_variable(self.name)


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
        refuse(self._violations())
        return self

    def _violations(self) -> Iterator[Violation]:
        if self.key is None and self.operator != "Exists":
            yield Violation("must be Exists where no key is given", "operator", ("key", "operator"))
        if self.operator == "Exists" and self.value is not None:
            yield Violation("cannot be compared by the operator Exists", "value", ("operator", "value"))
