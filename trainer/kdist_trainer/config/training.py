"""The models of `spec.train` and `spec.preflight`: the settings of the managed training loop, and
the requirements that each worker group must meet before it trains.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from kdist_trainer.config.base import ConfigModel, Count, Name, PositiveSeconds

_UNITS = {
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
QUANTITY = r"^[1-9][0-9]{0,14}(Ki|Mi|Gi|Ti|k|M|G|T)$"

Bytes = Annotated[str, Field(max_length=32, pattern=QUANTITY)]
"""A number of bytes as Kubernetes writes quantities: `64Mi`, `1G`."""


def count_bytes(quantity: str) -> int:
    """Bytes of a `Bytes`. Raises `ValueError` for anything else."""
    if re.match(QUANTITY, quantity) is None:
        raise ValueError(f"{quantity!r} is no quantity of bytes")
    number = quantity.rstrip("kKMGTi")
    return int(number) * _UNITS[quantity[len(number) :]]


class AllReduceCheck(ConfigModel):
    """An all-reduce that every group of ranks must do fast enough."""

    min_bus_bandwidth: Bytes = Field(
        description=(
            "minBusBandwidth that the ranks must reach: nccl-tests' busbw in bytes per "
            "second, such as 10G or 500Mi."
        )
    )
    size: Bytes = Field("64Mi", description="size of the buffer that is all-reduced.")


class Preflight(ConfigModel):
    """What is measured before the first step of every group of ranks; a group that is too slow ends
    the job.
    """

    all_reduce: AllReduceCheck | None = Field(
        None, description="allReduce: the bus bandwidth that is demanded."
    )


class Optimizer(ConfigModel):
    """The optimizer that the managed loop builds, unless the workload brings its own."""

    name: Literal["adamw", "sgd"] = Field("adamw", description="name of the algorithm.")
    learning_rate: float = Field(
        1e-3, gt=0, le=1e3, description="learningRate at the schedule's peak."
    )
    weight_decay: float = Field(0.01, ge=0, le=1e3, description="weightDecay of all parameters.")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of sgd.")
    betas: tuple[float, float] = Field((0.9, 0.999), strict=False, description="betas of adamw.")

    @model_validator(mode="after")
    def _betas_in_range(self) -> Optimizer:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {list(self.betas)} must be at least 0 and less than 1")
        return self


class Schedule(ConfigModel):
    """How the learning rate moves with the step."""

    name: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="name of the curve after the warm-up."
    )
    warmup_steps: int = Field(
        0, ge=0, le=2**53, description="warmupSteps of linear rise from zero."
    )
    final_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="finalRatio of the peak rate at the last step (linear, cosine).",
    )


class Every(ConfigModel):
    """An interval: by the clock, by steps, or whichever comes first."""

    seconds: PositiveSeconds | None = Field(None, description="seconds between two saves.")
    steps: Count | None = Field(None, description="steps between two saves.")

    @model_validator(mode="after")
    def _given(self) -> Every:
        if self.seconds is None and self.steps is None:
            raise ValueError("needs seconds, steps or both")
        return self


class Checkpointing(ConfigModel):
    """When and how the training's state is saved."""

    every: Every = Field(
        Every(seconds=300), description="every so many seconds or steps a checkpoint is saved."
    )
    mode: Literal["async", "blocking"] = Field(
        "async", description="mode: async writes while the training goes on."
    )
    keep: int = Field(3, ge=1, le=1000, description="keep that many committed checkpoints.")
    load: Literal["each", "broadcast"] = Field(
        "each",
        description=(
            "load: each rank reads what it holds, or with broadcast rank 0 reads and sends it."
        ),
    )


class Init(ConfigModel):
    """Weights to begin with instead of random ones; a checkpoint of the run itself comes first."""

    path: str = Field(
        pattern=r"^/[^\x00-\x1f]*$",
        max_length=4096,
        description=(
            "path of a safetensors file or a folder of checkpoints, as the pods see it: below "
            "the mountPath of data."
        ),
    )
    strict: Literal["on", "off"] = Field(
        "on",
        description=(
            "strict: refuse weights that are missing there or have another shape; off leaves "
            "those of the model as they are initialized."
        ),
    )


class EarlyStop(ConfigModel):
    """When training ends before its time: `evaluateEverySteps` says how often that is asked."""

    metric: Name = Field("loss", description="metric of the evaluation that is watched.")
    goal: Literal["min", "max"] = Field(
        "min", description="goal: min where less is better (loss), max where more is (accuracy)."
    )
    patience: int = Field(
        3,
        ge=1,
        le=10_000,
        description="patience: evaluations without progress before training ends.",
    )
    min_delta: float = Field(
        0.0, ge=0, le=1e9, description="minDelta: how much better counts as progress."
    )


class LoaderConfig(ConfigModel):
    """How samples reach a rank."""

    workers: int = Field(
        0,
        ge=0,
        le=256,
        description="workers (processes) that fetch samples ahead; 0 fetches in the rank itself.",
    )
    prefetch: int = Field(2, ge=1, le=1024, description="prefetch that many batches per worker.")


class Pipelining(ConfigModel):
    """How the stages of a pipeline are kept busy: `strategy: pipeline`."""

    schedule: Literal["1f1b", "gpipe"] = Field(
        "1f1b",
        description=(
            "schedule: 1f1b goes backward as soon as it can and so holds less; gpipe makes "
            "all forward passes first."
        ),
    )
    microbatches: int = Field(
        4,
        ge=1,
        le=65_536,
        description=(
            "microbatches that a copy's share of the batch is cut to; more leave stages less idle."
        ),
    )


class Training(ConfigModel):
    """The managed loop: `spec.train`."""

    workload: Name = Field(
        description="workload to train: digits, gpt, or module:Class from the image or from code."
    )
    options: dict[str, JsonValue] = Field(
        {}, max_length=256, description="options handed to the workload as they are."
    )
    epochs: Count | None = Field(
        None, description="epochs to train: passes over the data set. Either epochs or steps."
    )
    steps: Count | None = Field(
        None, description="steps to train: optimizer steps. Either epochs or steps."
    )
    global_batch: int = Field(
        256,
        ge=1,
        le=2**31,
        description="globalBatch: samples in one optimizer step, over all ranks.",
    )
    micro_batch: int | None = Field(
        None,
        ge=1,
        le=2**31,
        description=(
            "microBatch: most samples in one forward pass; a larger shard accumulates gradients."
        ),
    )
    virtual_shards: int | None = Field(
        None,
        ge=1,
        le=65536,
        description=(
            "virtualShards that each batch is dealt to; at least the largest world size, "
            "which is the default."
        ),
    )
    strategy: Literal["ddp", "fsdp", "hsdp", "tensor", "pipeline", "data_parallel"] = Field(
        "ddp", description="strategy of parallel training; docs/strategies.md compares them."
    )
    model_parallel: int | None = Field(
        None,
        ge=1,
        le=1024,
        description=(
            "modelParallel: ranks that share one copy of the model; strategies tensor and "
            "pipeline need it."
        ),
    )
    offload: Literal["none", "cpu"] = Field(
        "none",
        description=(
            "offload: cpu keeps the shards of fsdp and hsdp, and the optimizer's work, in the "
            "CPU's memory."
        ),
    )
    pipeline: Pipelining = Field(
        Pipelining(), description="pipeline: how strategy pipeline keeps its stages busy."
    )
    precision: Literal["fp32", "tf32", "bf16", "fp16", "bf16-params"] = Field(
        "fp32",
        description=(
            "precision of the forward and backward pass; bf16-params keeps the weights in it too."
        ),
    )
    seed: int = Field(
        0,
        ge=0,
        le=2**63 - 1,
        description="seed of the order of samples, of the weights and of each step's randomness.",
    )
    optimizer: Optimizer = Field(Optimizer(), description="optimizer and its settings.")
    schedule: Schedule = Field(Schedule(), description="schedule of the learning rate.")
    clip_grad_norm: float | None = Field(
        None, gt=0, le=1e9, description="clipGradNorm: the gradient's largest total norm."
    )
    on_nonfinite: Literal["stop", "ignore", "skip", "rollback"] = Field(
        "stop",
        description=(
            "onNonfinite: what a NaN or infinity leads to; skip leaves the step's update out, "
            "rollback goes back too."
        ),
    )
    grad_spike_factor: float | None = Field(
        None,
        gt=1,
        le=1e6,
        description=(
            "gradSpikeFactor: a gradient so many times larger than usual counts as not finite."
        ),
    )
    sync_every_steps: int = Field(
        10,
        ge=1,
        le=10_000,
        description=(
            "syncEverySteps: how often ranks share losses and flags; agreed actions follow "
            "within two."
        ),
    )
    evaluate: Literal["end", "never"] = Field(
        "end", description="evaluate the workload on its test split when training ends."
    )
    evaluate_every_steps: Count | None = Field(
        None, description="evaluateEverySteps: measure the test split this often too."
    )
    early_stop: EarlyStop | None = Field(
        None, description="earlyStop: end when evaluations get no better."
    )
    ema_decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="emaDecay: evaluate and export a moving average of the weights, such as 0.999.",
    )
    activation_checkpointing: Literal["none", "blocks"] = Field(
        "none",
        description=(
            "activationCheckpointing: blocks computes each block again in the backward pass, "
            "to save memory."
        ),
    )
    compile: Literal["off", "inductor", "aot_eager"] = Field(
        "off",
        description=(
            "compile the model by torch.compile with this backend; inductor needs a C++ "
            "compiler in the image."
        ),
    )
    bucket_mib: int = Field(
        25, ge=1, le=4096, description="bucketMib: size of a gradient bucket of DDP in MiB."
    )
    collective_timing: Literal["on", "off"] = Field(
        "on",
        description=(
            "collectiveTiming: whether the collectives of each step are counted and timed."
        ),
    )
    tensorboard: Literal["scalars", "off"] = Field(
        "scalars",
        description=(
            "tensorboard: scalars writes its event files beside the checkpoints (loss, "
            "throughput, step times)."
        ),
    )
    init: Init | None = Field(None, description="init: pretrained weights to begin with.")
    loader: LoaderConfig = Field(LoaderConfig(), description="loader of samples.")
    checkpoint: Checkpointing = Field(
        Checkpointing(), description="checkpoint: when and how state is saved."
    )

    @model_validator(mode="after")
    def _one_length(self) -> Training:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("needs exactly one of epochs and steps")
        return self

    @model_validator(mode="after")
    def _agreeing(self) -> Training:
        if self.early_stop is not None and self.evaluate_every_steps is None:
            raise ValueError("earlyStop needs evaluateEverySteps")
        if self.offload == "cpu" and self.strategy not in ("fsdp", "hsdp"):
            raise ValueError(
                f"offload: cpu needs strategy fsdp or hsdp, and {self.strategy} keeps no shards"
            )
        if self.strategy == "pipeline" and self.checkpoint.load == "broadcast":
            raise ValueError(
                "checkpoint.load: broadcast cannot be with strategy pipeline, whose ranks "
                "hold different weights"
            )
        if self.grad_spike_factor is not None and not self.leaves_out:
            raise ValueError("gradSpikeFactor needs onNonfinite: skip or rollback")
        return self

    @property
    def leaves_out(self) -> bool:
        """Whether a step's update may be left out."""
        return self.on_nonfinite in ("skip", "rollback")
