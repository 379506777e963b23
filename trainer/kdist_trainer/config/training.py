"""The models of `spec.train`, including `spec.train.checkpoint`, and of `spec.preflight`: the
settings of the managed training loop, when and how its state is saved, and the requirements that
each worker group must meet before it trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BeforeValidator,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from kdist_trainer.config.base import (
    Argument,
    Bytes,
    ConfigModel,
    Count,
    Name,
    PositiveSeconds,
    later,
)
from kdist_trainer.config.sources import Init

DEFAULT_KEEP: Final = 3
"""Committed checkpoints that are kept, also by scripts and integrations."""
SECONDS_APART: Final = 300.0
"""A run that saves every few seconds keeps more than its last minute."""
NO_REPLICA: Final = "no rank holds the whole state"


def _only_true(value: Any) -> Any:
    """1, which equals True, is none of it."""
    if value is not None and type(value) is not bool:
        raise ValueError("must be true")
    return value


class Every(ConfigModel):
    """The interval between two saves: one that the run finds itself, in seconds, in steps,
    or whichever of steps and one of the others comes first.
    """

    auto: Annotated[Literal[True] | None, BeforeValidator(_only_true)] = Field(
        None,
        description=(
            "The interval that loses the least training time: it follows from what a save costs "
            "and how far apart the failures are that go back to a checkpoint, and is between 60 s "
            "(10 s after the first of them) and an hour. `kdist status` shows it. It excludes "
            "seconds."
        ),
    )
    seconds: PositiveSeconds | None = Field(None, description="Seconds between two checkpoints.")
    steps: Count | None = Field(None, description="Steps between two checkpoints.")

    @classmethod
    def of(cls, seconds: int | Literal["auto"]) -> Every:
        """The interval that a script names."""
        return cls(auto=True) if seconds == "auto" else cls(seconds=seconds)

    @model_validator(mode="after")
    def _given(self) -> Every:
        if self.auto is None and self.seconds is None and self.steps is None:
            raise ValueError("needs auto, seconds, steps, or steps with one of the others")
        if self.auto is not None and self.seconds is not None:
            raise ValueError("auto and seconds exclude each other; keep one")
        return self

    @model_serializer(mode="wrap")
    def _write(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `auto` if it is not given: earlier trainers do not know it."""
        document: dict[str, Any] = handler(self)
        return {name: value for name, value in document.items() if name != "auto" or value}


def _every_from_word(value: Any) -> Any:
    """`every: auto` means `{auto: true}`."""
    return {"auto": True} if value == "auto" else value


class Best(ConfigModel):
    """The evaluation whose checkpoint is kept."""

    metric: Name = Field("loss", description="Metric of the evaluation to compare.")
    goal: Literal["min", "max"] = Field(
        "min", description=("min if lower is better (loss), max if higher is better (accuracy).")
    )


class Keep(ConfigModel):
    """Which committed checkpoints are kept; each field adds some to those of the others."""

    last: int = Field(
        DEFAULT_KEEP,
        ge=1,
        le=1000,
        description=(
            "Number of the last checkpoints. If the interval is auto, these are the newest one "
            "and older ones that are at least five minutes apart."
        ),
    )
    best: Best | None = Field(
        None,
        description=(
            "The first checkpoint at or after the best evaluation so far; needs evaluateEverySteps."
        ),
    )
    every: Count | None = Field(
        None,
        description="For ever, the first checkpoint at or after each multiple of this many steps.",
    )

    @classmethod
    def of(cls, kept: int | Mapping[str, int]) -> Keep:
        """What a script names."""
        return cls.model_validate(_keep_from_number(kept))

    @property
    def is_number(self) -> bool:
        """Whether a number says all."""
        return self == type(self)(last=self.last)

    @model_serializer(mode="wrap")
    def _write(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any] | int:
        """A number if it says all, as earlier trainers know it."""
        return self.last if self.is_number else handler(self)


def _keep_from_number(value: Any) -> Any:
    """`keep: 3` means `{last: 3}`."""
    return {"last": value} if type(value) is int else value


class Checkpointing(ConfigModel):
    """When and how the state of the training is saved."""

    every: Annotated[Every, BeforeValidator(_every_from_word)] = Field(
        Every(auto=True),
        description=(
            "Interval between checkpoints: {auto: true}, or auto for short, the one that loses the "
            "least training time; in seconds; in steps; or steps with one of the others."
        ),
    )
    mode: Literal["async", "blocking"] = Field(
        "async",
        description="async writes in the background; blocking pauses training for the write.",
    )
    keep: Annotated[
        Keep,
        BeforeValidator(
            _keep_from_number, json_schema_input_type=Annotated[int, Field(ge=1, le=1000)] | Keep
        ),
    ] = Field(
        Keep(),
        description=(
            "Committed checkpoints to keep: the number of the last ones, or {last, best, every}."
        ),
    )
    load: Literal["each", "broadcast"] = Field(
        "each",
        description=(
            "each: every rank reads its own part; broadcast: rank 0 reads and sends it to "
            "the others."
        ),
    )

    @property
    def seconds_apart(self) -> float:
        """Seconds that lie between the checkpoints that are kept besides the newest one."""
        return SECONDS_APART if self.every.auto else 0.0

    @model_serializer(mode="wrap")
    def _write(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out an interval that nobody has given: each trainer has its own default, and an
        earlier one knows no `auto`.
        """
        document: dict[str, Any] = handler(self)
        given = "every" in self.model_fields_set
        return {name: value for name, value in document.items() if name != "every" or given}


class AllReduceCheck(ConfigModel):
    """The all-reduce bandwidth that every worker group must reach."""

    min_bus_bandwidth: Bytes = Field(
        description=(
            "Bus bandwidth that the ranks must reach, as nccl-tests' busbw in bytes per "
            "second, such as 10G or 500Mi."
        )
    )
    size: Bytes = Field("64Mi", description="Size of the buffer to all-reduce.")


class Preflight(ConfigModel):
    """Checks of nodes before they join, and of every worker group before its first step."""

    all_reduce: AllReduceCheck | None = Field(
        None,
        description="Required bandwidth of an all-reduce; a group that is too slow ends the job.",
    )
    command: (
        Annotated[
            list[Annotated[Argument, Field(min_length=1)]],
            Field(min_length=1, max_length=256),
        ]
        | None
    ) = later(
        None,
        description=(
            "Health check that each node runs before it joins; where it fails, the node is left "
            "out. By default matrix products for 1 s on nodes with GPUs."
        ),
    )
    timeout_seconds: PositiveSeconds = later(
        60,
        description="Maximum duration of the health check, in seconds.",
    )


class Optimizer(ConfigModel):
    """The optimizer of the managed loop, unless the workload defines its own."""

    name: Literal["adamw", "sgd"] = Field("adamw", description="Name of the algorithm.")
    learning_rate: float = Field(
        1e-3, gt=0, le=1e3, description="Learning rate at the peak of the schedule."
    )
    weight_decay: float = Field(0.01, ge=0, le=1e3, description="Weight decay of all parameters.")
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum, for sgd.")
    betas: tuple[float, float] = Field((0.9, 0.999), strict=False, description="Betas, for adamw.")

    @model_validator(mode="after")
    def _betas_in_range(self) -> Optimizer:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {list(self.betas)} must be at least 0 and less than 1")
        return self


class Schedule(ConfigModel):
    """How the learning rate depends on the step."""

    name: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Shape of the schedule after the warm-up."
    )
    warmup_steps: int = Field(
        0, ge=0, le=2**53, description="Number of steps of linear warm-up to the peak."
    )
    final_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description=("Learning rate at the last step, as a fraction of the peak (linear, cosine)."),
    )


class EarlyStop(ConfigModel):
    """When training ends early; checked every `evaluateEverySteps` steps."""

    metric: Name = Field("loss", description="Metric of the evaluation to watch.")
    goal: Literal["min", "max"] = Field(
        "min", description=("min if lower is better (loss), max if higher is better (accuracy).")
    )
    patience: int = Field(
        3,
        ge=1,
        le=10_000,
        description="Evaluations without improvement before training ends.",
    )
    min_delta: float = Field(
        0.0, ge=0, le=1e9, description="Smallest change that counts as an improvement."
    )


class LoaderConfig(ConfigModel):
    """How a rank loads samples."""

    workers: int = Field(
        0,
        ge=0,
        le=256,
        description=("Worker processes that load samples ahead; 0 loads in the rank itself."),
    )
    prefetch: int = Field(2, ge=1, le=1024, description="Batches to prefetch per worker.")


class Pipelining(ConfigModel):
    """The pipeline schedule of `strategy: pipeline`."""

    schedule: Literal["1f1b", "gpipe"] = Field(
        "1f1b",
        description=(
            "1f1b runs backward passes as early as possible and so needs less memory; gpipe "
            "runs all forward passes first."
        ),
    )
    microbatches: int = Field(
        4,
        ge=1,
        le=65_536,
        description=(
            "Number of microbatches per replica and step; more of them leave stages less idle."
        ),
    )


class Training(ConfigModel):
    """The settings of the managed training loop: `spec.train`."""

    workload: Name = Field(
        description=("Workload to train: digits, gpt, or module:Class from the image or from code.")
    )
    options: dict[str, JsonValue] = Field(
        {},
        max_length=256,
        description=(
            "Options passed to the workload unchanged. digits has width and dropout; gpt has "
            "layers, width, heads, block, dropout and corpusBytes."
        ),
    )
    epochs: Count | None = Field(
        None,
        description="Number of epochs (passes over the data set) to train; excludes steps.",
    )
    steps: Count | None = Field(
        None, description="Number of optimizer steps to train; excludes epochs."
    )
    global_batch: int = Field(
        256,
        ge=1,
        le=2**31,
        description="Samples per optimizer step, over all ranks.",
    )
    micro_batch: int | None = Field(
        None,
        ge=1,
        le=2**31,
        description=(
            "Maximum number of samples per forward pass; a larger shard accumulates gradients."
        ),
    )
    virtual_shards: int | None = Field(
        None,
        ge=1,
        le=65536,
        description=(
            "Number of shards that each batch is split into, independent of the world size; "
            "at least the largest world size, which is the default."
        ),
    )
    strategy: Literal["ddp", "fsdp", "hsdp", "tensor", "pipeline", "data_parallel"] = Field(
        "ddp", description="Parallel strategy; docs/explanation/strategies.md compares them."
    )
    model_parallel: int | None = Field(
        None,
        ge=1,
        le=1024,
        description=(
            "Ranks that share one replica of the model; required by the strategies tensor "
            "and pipeline."
        ),
    )
    offload: Literal["none", "cpu"] = Field(
        "none",
        description=(
            "cpu keeps the shards of fsdp and hsdp in CPU memory, and runs the optimizer there."
        ),
    )
    pipeline: Pipelining = Field(Pipelining(), description="Settings of the strategy pipeline.")
    precision: Literal["fp32", "tf32", "bf16", "fp16", "bf16-params"] = Field(
        "fp32",
        description=(
            "Precision of the forward and backward pass; bf16-params keeps the weights in bf16 too."
        ),
    )
    seed: int = Field(
        0,
        ge=0,
        le=2**63 - 1,
        description=(
            "Seed for the sample order, the initial weights and the randomness of each step."
        ),
    )
    optimizer: Optimizer = Field(Optimizer(), description="Optimizer and its settings.")
    schedule: Schedule = Field(Schedule(), description="Learning rate schedule.")
    clip_grad_norm: float | None = Field(
        None, gt=0, le=1e9, description="Maximum total norm of the gradient."
    )
    on_nonfinite: Literal["stop", "ignore", "skip", "rollback"] = Field(
        "stop",
        description=(
            "Action on a NaN or infinite loss or gradient; skip drops the step's update, "
            "rollback also returns to the last checkpoint."
        ),
    )
    grad_spike_factor: float | None = Field(
        None,
        gt=1,
        le=1e6,
        description=("A gradient norm larger than usual by this factor is treated as non-finite."),
    )
    sync_every_steps: int = Field(
        10,
        ge=1,
        le=10_000,
        description=(
            "Steps between two exchanges of losses and flags among ranks; what they agree on, "
            "such as a stop, takes effect within two exchanges."
        ),
    )
    evaluate: Literal["end", "never"] = Field(
        "end", description="Whether to evaluate on the test split when training ends."
    )
    evaluate_every_steps: Count | None = Field(
        None, description="Steps between two evaluations on the test split during training."
    )
    early_stop: EarlyStop | None = Field(
        None, description="End training early when evaluations stop improving."
    )
    ema_decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description=(
            "Decay of a moving average of the weights, such as 0.999, which is evaluated "
            "and exported."
        ),
    )
    activation_checkpointing: Literal["none", "blocks"] = Field(
        "none",
        description=("blocks recomputes each block in the backward pass, to save memory."),
    )
    compile: Literal["off", "inductor", "aot_eager"] = Field(
        "off",
        description=("Backend for torch.compile; inductor needs a C++ compiler in the image."),
    )
    recovery: Literal["auto", "inPlace", "restart"] = Field(
        "auto",
        description=(
            "How ranks recover when others fail: inPlace, the survivors keep their process and "
            "continue with the next step (strategy ddp, on CPUs); restart, all start again from "
            "the newest checkpoint; auto, in place where possible."
        ),
    )
    bucket_mib: int = Field(
        25, ge=1, le=4096, description="Size of DDP's gradient buckets, in MiB."
    )
    collective_timing: Literal["on", "off"] = Field(
        "on",
        description=("Whether the collectives of each step are counted and timed."),
    )
    tensorboard: Literal["scalars", "off"] = Field(
        "scalars",
        description=(
            "scalars writes TensorBoard event files next to the checkpoints (loss, learning rate, "
            "gradient norm, throughput, step times, evaluations)."
        ),
    )
    tracker: Literal["wandb", "mlflow"] | None = later(
        None,
        description=(
            "Tracker of experiments that is given each step which a checkpoint holds, with its "
            "loss and metrics."
        ),
    )
    init: Init | None = Field(None, description="Pretrained weights to start from.")
    loader: LoaderConfig = Field(LoaderConfig(), description="Loading of samples.")
    checkpoint: Checkpointing = Field(
        Checkpointing(), description="When and how checkpoints are saved."
    )

    @model_validator(mode="after")
    def _one_length(self) -> Training:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("needs exactly one of epochs and steps")
        return self

    @model_validator(mode="after")
    def _compatible_settings(self) -> Training:
        if self.early_stop is not None and self.evaluate_every_steps is None:
            raise ValueError("earlyStop needs evaluateEverySteps")
        if self.checkpoint.keep.best is not None and self.evaluate_every_steps is None:
            raise ValueError("checkpoint.keep.best needs evaluateEverySteps")
        if self.offload == "cpu" and self.strategy not in ("fsdp", "hsdp"):
            raise ValueError(
                f"offload: cpu needs strategy fsdp or hsdp, but {self.strategy} has no shards"
            )
        if self.strategy == "pipeline" and self.checkpoint.load == "broadcast":
            raise ValueError(
                "checkpoint.load: broadcast cannot be used with strategy pipeline, whose ranks "
                "have different weights"
            )
        if self.recovery == "inPlace" and self.strategy != "ddp":
            raise ValueError(
                f"recovery: inPlace needs strategy ddp, but with {self.strategy} {NO_REPLICA}"
            )
        if self.grad_spike_factor is not None and not self.guards_gradients:
            raise ValueError("gradSpikeFactor needs onNonfinite: skip or rollback")
        return self

    @property
    def guards_gradients(self) -> bool:
        """Whether a step's update may be skipped because of its gradient."""
        return self.on_nonfinite in ("skip", "rollback")
