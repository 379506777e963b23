"""The status of a TrainingJob on a cluster, which the controller writes: what `kubectl get` shows
of a job, and the conditions that `kubectl wait` and GitOps tools read.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kdist.spec.models import Time
from kdist_trainer.config import ConfigModel

Counter = Annotated[int, Field(ge=0, le=2**53)]
Line = Annotated[str, Field(max_length=1024)]
Sentence = Annotated[str, Field(max_length=32_768)]
ConditionType = Literal[
    "Accepted",
    "QuotaReserved",
    "Running",
    "Suspended",
    "Outdated",
    "VolumeAttached",
    "Complete",
    "Failed",
    "Reconciling",
    "Stalled",
]
"""Conditions of a TrainingJob; the last two are those that kstatus knows for objects of any
kind.
"""


class Condition(ConfigModel):
    """One aspect of the job's state, as in every Kubernetes API."""

    type: ConditionType = Field(description="The aspect, in CamelCase.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it is so.")
    reason: Annotated[
        str,
        Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"),
    ] = Field(description="Cause of the last change, in CamelCase.")
    message: Sentence = Field(description="The same in a sentence.")
    last_transition_time: Time = Field(description="Time of the last change of the status.")
    observed_generation: Counter | None = Field(
        None, description="Generation of the job that the condition is about."
    )


class LastCheckpoint(ConfigModel):
    """The newest checkpoint that is committed."""

    step: Counter = Field(description="Step after which it was saved.")
    time: Time | None = Field(None, description="Time at which it was committed.")


class ResourceStatus(ConfigModel):
    """What the controller last saw of the job. Numbers with a fraction are text, as API servers
    recommend it.
    """

    observed_generation: Counter | None = Field(
        None, description="Generation of the job that the controller has acted on."
    )
    conditions: list[Condition] = Field(
        [], max_length=16, description="Conditions, one of each type."
    )
    phase: Line | None = Field(
        None, description="What the job is doing, such as Queued, Running or Recovering."
    )
    message: Sentence | None = Field(None, description="A sentence about the phase.")
    backend: Line | None = Field(None, description="Workload kind that was chosen for the job.")
    rendezvous: Line | None = Field(None, description="Rendezvous that was chosen for the job.")
    applied_digests: list[Line] = Field(
        [],
        max_length=2,
        description="Digests of the specs that the job's objects are made from, the newest last.",
    )
    run_id: Line | None = Field(None, description="Run that the job belongs to.")
    nodes: Line | None = Field(
        None, description="Nodes that run, of those that the job has for now, such as 3/4."
    )
    replicas: Counter | None = Field(None, description="Nodes that run, for the scale subresource.")
    selector: Line | None = Field(
        None, description="Label selector of the job's pods, for the scale subresource."
    )
    world_size: Counter | None = Field(None, description="Ranks that train together.")
    step: Counter | None = Field(None, description="Step that the training has reached.")
    target_steps: Counter | None = Field(None, description="Step at which the training ends.")
    progress: Line | None = Field(None, description="Steps done, of all, in percent, such as 62%.")
    samples_seen: Counter | None = Field(
        None, description="Samples that the model has been trained with."
    )
    loss: Line | None = Field(None, description="Loss of the last steps, such as 0.2541.")
    last_checkpoint: LastCheckpoint | None = Field(
        None, description="The newest checkpoint that is committed."
    )
    restarts: Counter | None = Field(None, description="Restarts of the ranks since the start.")
    restarted_at: Time | None = Field(
        None, description="The `restartedAt` of the spec that has been acted on."
    )
    goodput: Line | None = Field(
        None, description="Share of the time that made lasting progress, such as 97%."
    )
    eta: Time | None = Field(None, description="Time at which the training is expected to end.")
    diagnosis: Sentence | None = Field(
        None, description="What is wrong and what to do, as `kdist why` says it."
    )
