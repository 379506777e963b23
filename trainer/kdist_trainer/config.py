"""What a training is told: the document `train.json`, and the exit codes that everything agrees on.

`kdist` renders a job's `train` or `script` section and the agent's settings into one `train.json`; every agent and every
rank reads the same file. Nothing here imports torch, so the command line can share these models.

Field rules: camelCase in the file, snake_case in Python; a description opens with the field's name; seconds are integers
with the unit in the name; enums stand where a boolean might grow; every list is bounded.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic.alias_generators import to_camel


class Exit(IntEnum):
    """Exit codes of an agent: below 128 another try cannot help, from 128 on it can (Kubeflow's ExitCode rule)."""

    DONE = 0
    CONFIG = 64
    DATA = 65
    USER = 70
    DEVICE_OOM = 71
    HOST_OOM = 72
    MISMATCH = 73
    NONFINITE = 74
    BUDGET = 75
    STOPPED = 200
    PEERS_LOST = 201
    HANG = 202
    STORAGE = 203

    @property
    def retryable(self) -> bool:
        return self >= 128


class Cause(StrEnum):
    """Why a rank, an agent or a job ended: a bounded set, safe as a metric label."""

    USER_CODE = "user_code"
    OOM_HOST = "oom_host"
    OOM_DEVICE = "oom_device"
    HANG = "hang"
    COLLECTIVE_TIMEOUT = "collective_timeout"
    NAN = "nan"
    SIGNAL = "signal"
    NODE_LOST = "node_lost"
    PREEMPTED = "preempted"
    STORAGE = "storage"
    MISMATCH = "mismatch"
    RENDEZVOUS = "rendezvous"
    CONFIG = "config"
    DATA = "data"
    BUDGET = "budget"
    UNKNOWN = "unknown"


Seconds = Annotated[int, Field(ge=0, le=31_536_000)]
PositiveSeconds = Annotated[int, Field(ge=1, le=31_536_000)]
Count = Annotated[int, Field(ge=1, le=2**53)]
Name = Annotated[str, Field(min_length=1, max_length=253)]


class Model(BaseModel):
    """A strict, immutable section of a file: unknown keys are errors, `"3"` is no number, names are camelCase outside."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, extra="forbid", frozen=True, strict=True)


class Nodes(Model):
    """How many nodes the job may have; elastic when `min` is less than `max`."""

    min: Annotated[int, Field(ge=1, le=4096, description="min nodes needed to start and to go on after a loss.")]
    max: Annotated[int, Field(ge=1, le=4096, description="max nodes that the job will use.")]

    @model_validator(mode="after")
    def _ordered(self) -> Nodes:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is more than max ({self.max})")
        return self


class Optimizer(Model):
    """The optimizer that the managed loop builds, unless the workload brings its own."""

    name: Literal["adamw", "sgd"] = Field("adamw", description="name of the algorithm.")
    learning_rate: float = Field(1e-3, gt=0, le=1e3, description="learningRate at the schedule's peak.")
    weight_decay: float = Field(0.01, ge=0, le=1e3, description="weightDecay of all parameters.")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of sgd.")
    betas: tuple[float, float] = Field((0.9, 0.999), strict=False, description="betas of adamw.")

    @model_validator(mode="after")
    def _betas_in_range(self) -> Optimizer:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {list(self.betas)} must be at least 0 and less than 1")
        return self


class Schedule(Model):
    """How the learning rate moves with the step."""

    name: Literal["constant", "linear", "cosine"] = Field("constant", description="name of the curve after the warm-up.")
    warmup_steps: int = Field(0, ge=0, le=2**53, description="warmupSteps of linear rise from zero.")
    final_ratio: float = Field(0.0, ge=0, le=1, description="finalRatio of the peak rate at the last step (linear, cosine).")


class Every(Model):
    """An interval: by the clock, by steps, or whichever comes first."""

    seconds: PositiveSeconds | None = Field(None, description="seconds between two saves.")
    steps: Count | None = Field(None, description="steps between two saves.")

    @model_validator(mode="after")
    def _given(self) -> Every:
        if self.seconds is None and self.steps is None:
            raise ValueError("needs seconds, steps or both")
        return self


class Checkpointing(Model):
    """When and how the training's state is saved."""

    every: Every = Field(Every(seconds=300), description="every so many seconds or steps a checkpoint is saved.")
    mode: Literal["async", "blocking"] = Field("async", description="mode: async writes while the training goes on.")
    keep: int = Field(3, ge=1, le=1000, description="keep that many committed checkpoints.")


class Loader(Model):
    """How samples reach a rank."""

    workers: int = Field(
        0, ge=0, le=256, description="workers (processes) that fetch samples ahead; 0 fetches in the rank itself."
    )
    prefetch: int = Field(2, ge=1, le=1024, description="prefetch that many batches per worker.")


class Training(Model):
    """The managed loop: `spec.train`."""

    workload: Name = Field(description="workload to train: digits, gpt, or module:Class from the image or from code.")
    options: dict[str, JsonValue] = Field({}, max_length=256, description="options handed to the workload as they are.")
    epochs: Count | None = Field(None, description="epochs to train: passes over the data set. Either epochs or steps.")
    steps: Count | None = Field(None, description="steps to train: optimizer steps. Either epochs or steps.")
    global_batch: int = Field(256, ge=1, le=2**31, description="globalBatch: samples in one optimizer step, over all ranks.")
    micro_batch: int | None = Field(
        None, ge=1, le=2**31, description="microBatch: most samples in one forward pass; a larger shard accumulates gradients."
    )
    virtual_shards: int | None = Field(
        None,
        ge=1,
        le=65536,
        description="virtualShards that each batch is dealt to; at least the largest world size, which is the default.",
    )
    strategy: Literal["ddp"] = Field("ddp", description="strategy of parallel training.")
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="precision of the forward and backward pass.")
    seed: int = Field(
        0, ge=0, le=2**63 - 1, description="seed of the order of samples, of the weights and of each step's randomness."
    )
    optimizer: Optimizer = Field(Optimizer(), description="optimizer and its settings.")
    schedule: Schedule = Field(Schedule(), description="schedule of the learning rate.")
    clip_grad_norm: float | None = Field(None, gt=0, le=1e9, description="clipGradNorm: the gradient's largest total norm.")
    on_nonfinite: Literal["stop", "ignore"] = Field("stop", description="onNonfinite: what a loss of NaN or infinity leads to.")
    sync_every_steps: int = Field(
        10,
        ge=1,
        le=10_000,
        description="syncEverySteps: how often ranks share losses and flags; agreed actions follow within two.",
    )
    evaluate: Literal["end", "never"] = Field("end", description="evaluate the workload on its test split when training ends.")
    bucket_mib: int = Field(25, ge=1, le=4096, description="bucketMib: size of a gradient bucket of DDP in MiB.")
    comm_hook: Literal["timing", "none"] = Field(
        "timing", description="commHook: timing measures each all-reduce; none is bare DDP."
    )
    loader: Loader = Field(Loader(), description="loader of samples.")
    checkpoint: Checkpointing = Field(Checkpointing(), description="checkpoint: when and how state is saved.")

    @model_validator(mode="after")
    def _one_length(self) -> Training:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("needs exactly one of epochs and steps")
        return self


class Script(Model):
    """A torchrun script, run as it is: `spec.script`."""

    path: Name = Field(description="path of the script, relative to the job file or to code.")
    args: list[Annotated[str, Field(max_length=32_768)]] = Field([], max_length=1024, description="args of the script.")


class TrainConfig(Model):
    """The whole of `train.json`: what the agents and ranks of one job are told, the same bytes everywhere."""

    name: Name = Field(description="name of the job.")
    nodes: Nodes = Field(description="nodes of the job.")
    procs_per_node: int | Literal["auto"] = Field(
        "auto", description="procsPerNode: ranks on each node; auto is one per GPU, else 1."
    )
    threads_per_rank: int = Field(1, ge=1, le=1024, description="threadsPerRank: CPU threads of each rank.")
    max_restarts: int = Field(10, ge=0, le=100_000, description="maxRestarts without progress before the job gives up.")
    grace_seconds: PositiveSeconds = Field(60, description="graceSeconds from the request to stop to the end by force.")
    rendezvous_timeout_seconds: PositiveSeconds = Field(600, description="rendezvousTimeoutSeconds to wait for enough nodes.")
    join_window_seconds: Seconds = Field(10, description="joinWindowSeconds in which joining nodes are let in together.")
    collective_timeout_seconds: PositiveSeconds = Field(300, description="collectiveTimeoutSeconds a collective may take.")
    hang_timeout_seconds: PositiveSeconds = Field(300, description="hangTimeoutSeconds without progress before a rank is killed.")
    metrics_linger_seconds: Seconds = Field(0, description="metricsLingerSeconds that the exporter still answers after success.")
    train: Training | None = Field(None, description="train: the managed loop.")
    script: Script | None = Field(None, description="script: a torchrun script as it is.")

    @model_validator(mode="after")
    def _one_kind(self) -> TrainConfig:
        if (self.train is None) == (self.script is None):
            raise ValueError("needs exactly one of train and script")
        return self

    @classmethod
    def read(cls, path: Path) -> TrainConfig:
        """Read `train.json`. Raises `OSError`, or `pydantic.ValidationError` with every problem."""
        return cls.model_validate_json(path.read_bytes())

    def to_json(self) -> str:
        """Text of `train.json`, every default written out, keys in the order of this file."""
        return self.model_dump_json(by_alias=True, indent=2)

    def to_document(self) -> dict[str, Any]:
        """The same as plain values."""
        return self.model_dump(mode="json", by_alias=True)

    def max_world_size(self, procs_per_node: int) -> int:
        """Most ranks that the job can have when every node has `procs_per_node` of them."""
        return self.nodes.max * procs_per_node
