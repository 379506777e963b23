"""The interface of a workload: a model, its data and its loss, written by the user; and the
learning rate schedule. `docs/reference/workloads.md` has a complete example.

The training loop owns everything else: order of samples, gradient accumulation, precision,
all-reduce, checkpoints, metrics. A workload knows nothing about ranks, so the same file runs on one
process or a hundred.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import TensorDataset, default_collate

from kdist_trainer import config
from kdist_trainer.config import workload_options
from kdist_trainer.errors import ConfigError
from kdist_trainer.stream import Stream, StreamSamples

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def lr_factor(settings: config.Schedule, *, steps: int) -> Callable[[int], float]:
    """The function from a step (0 = first) to the fraction of the peak rate that this step uses.

    The first step of the warm-up uses 1/(warmupSteps + 1) of the peak, the last step of the run
    `finalRatio`. Cosine decay follows I. Loshchilov and F. Hutter, SGDR, ICLR 2017, without
    restarts.
    """
    warmup, final = settings.warmup_steps, settings.final_ratio
    decay_steps = max(1, steps - 1 - warmup)

    def fraction(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / decay_steps)
        match settings.name:  # mypy finds a name without its case
            case "constant":
                return 1.0
            case "linear":
                return final + (1 - final) * (1 - done)
            case "cosine":
                return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2

    return fraction


class LrSchedule(LambdaLR):
    """The learning rate that job.yaml asks for. It follows from the step alone, so that a run can
    resume at any step, with edited settings too.
    """

    def __init__(self, optimizer: Optimizer, settings: config.Schedule, *, steps: int) -> None:
        super().__init__(optimizer, lr_factor(settings, steps=steps))
        self.settings = settings

    def seek(self, step: int, *, steps: int) -> None:
        """Set the learning rates of a run of `steps` steps after `step` of them, from the initial
        rates of the optimizer's groups.
        """
        fraction = lr_factor(self.settings, steps=steps)
        self.lr_lambdas = [fraction for _ in self.optimizer.param_groups]
        self.base_lrs = [group["initial_lr"] for group in self.optimizer.param_groups]
        self.last_epoch = step
        self._last_lr = [base * fraction(step) for base in self.base_lrs]
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            set_lr(group, rate)

    def state_dict(self) -> dict[str, Any]:
        """The step; everything else follows from the job and the optimizer."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the step; `seek` sets the rates."""
        self.last_epoch = state_dict["last_epoch"]


def build_scheduler(
    optimizer: Optimizer, settings: config.Schedule, *, steps: int
) -> LRScheduler | None:
    """Build the scheduler that job.yaml asks for.

    Args:
        optimizer: The optimizer whose learning rates it sets.
        settings: `train.schedule`.
        steps: Steps of the run.

    Returns:
        The scheduler; None for a constant rate.
    """
    if settings.name == "constant" and settings.warmup_steps == 0:
        return None
    return LrSchedule(optimizer, settings, steps=steps)


def set_lr(group: dict[str, Any], rate: float | Tensor) -> None:
    """Set the learning rate of a parameter group; a tensor is filled in place, since a compiled
    step may hold it.
    """
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def apply_edits(
    optimizer: Optimizer,
    job_groups: Sequence[Mapping[str, Any]],
    edited: Collection[str],
    scheduler: Any = None,
) -> None:
    """Apply the edits of a job to the optimizer, after a checkpoint was restored.

    A scheduler of the workload's own continues from its saved state, with rates that are scaled as
    the job's learning rate was.

    Args:
        optimizer: The optimizer, with the groups of the checkpoint.
        job_groups: The groups as the present job makes them, with their `initial_lr`.
        edited: Fields of `spec.train` that were edited since the checkpoint was written.
        scheduler: The learning rate scheduler, if there is one.
    """
    for group, wanted in zip(optimizer.param_groups, job_groups, strict=True):
        for key, option in config.Optimizer.model_fields.items():  # torch has their names
            if key in wanted and f"optimizer.{option.alias}" in edited:
                group[key] = wanted[key]
        if "optimizer.learningRate" in edited:
            before, now = group["initial_lr"], wanted["initial_lr"]
            set_lr(group, group["lr"] * (now / before) if before else now)
            group["initial_lr"] = now
        if scheduler is None and any(
            field.startswith(("schedule.", "optimizer.learningRate")) for field in edited
        ):
            set_lr(group, group["initial_lr"])
    if "optimizer.learningRate" in edited and hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]


Split = Literal["train", "test"]
Sums = dict[str, tuple[Tensor | float, int]]
"""Name of a metric -> (sum, count): they add up exactly over batches and ranks, a mean would
not.
"""
OptionsT = TypeVar("OptionsT", bound=BaseModel)


class Samples(Protocol):
    """A data set: any object with a length and items. If it has a method `fetch(indices)`, that
    returns a whole batch at once, which is faster.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class WorkloadContext:
    """What a workload is built with: its options from job.yaml, the folders of its data, the seed
    and the device.
    """

    options: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Path] = field(default_factory=dict)
    """Mount path as written in job.yaml -> the folder where it is on this machine."""
    seed: int = 0
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable

    def parse(self, model: type[OptionsT]) -> OptionsT:
        """Parse the options with a pydantic model.

        Raises:
            ConfigError: If they are not valid, with every problem at once.
        """
        try:
            return model.model_validate(self.options)
        except ValidationError as error:
            problems = workload_options.explain(model, error)
            raise ConfigError("; ".join(map(": ".join, problems))) from None


class Workload(ABC):
    """A training task. Every process makes its own instance; only its model and optimizer are
    saved.
    """

    units_per_sample: int | None = 1
    """What one sample adds to the count that `loss` returns; None if it depends on the data (then
    override `count`).
    """
    tokens_per_sample: int = 0
    """Tokens in one sample, for the metric of tokens per second; 0 for samples without tokens."""

    def __init__(self, context: WorkloadContext) -> None:
        self.context = context

    @abstractmethod
    def model(self) -> nn.Module:
        """Make the model, on the CPU. The generators are seeded, so every process makes the same
        weights.
        """

    @abstractmethod
    def dataset(self, split: Split) -> Samples | Stream | None:
        """The samples of a split, the same in every process and every time; None if there is no
        test split.

        `train` may be a `Stream`: data that can only be read sequentially.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """Run the model on a batch.

        Returns:
            The loss *summed* over the batch (a scalar), and the number of terms in the sum.
        """

    def count(self, batch: Any) -> int:
        """Number of terms in the loss of this batch; called only if `units_per_sample` is None."""
        raise NotImplementedError(
            f"{type(self).__name__}.units_per_sample is None: it must have count(batch)"
        )

    def weights(self, samples: Samples) -> Tensor | None:  # noqa: ARG002 - for overrides
        """How often each sample of the training split is drawn (with replacement), in proportion:
        shape (samples,). None: each sample once an epoch.
        """
        return None

    def collate(self, samples: list[Any]) -> Any:
        """Combine single samples into one batch."""
        return default_collate(samples)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:  # noqa: ARG002 - for overrides
        """Modules that are computed one after the other, such as a transformer's layers; none by
        default.

        Sharded strategies gather one block at a time, and activation checkpointing recomputes a
        block in the backward pass.
        """
        return ()

    def chain(self, model: nn.Module) -> Sequence[nn.Module]:
        """Modules that make up the whole model when each is called with the output of the one
        before; strategy `pipeline` splits the model between them.

        Their weights are the model's own. By default the modules of an `nn.Sequential`, and none of
        another model.
        """
        return list(model) if isinstance(model, nn.Sequential) else ()

    def tensor_plan(self, model: nn.Module, ranks: int) -> dict[str, ParallelStyle] | None:  # noqa: ARG002
        """The plan of strategy `tensor`: how `ranks` ranks split the model's matrix products.

        Returns:
            torch's plan for `parallelize_module`: styles by module name, in which `*` stands for
            any number; None if the model cannot be split.

        Raises:
            ConfigError: If the model cannot be split over this number of ranks.
        """
        return None

    def optimizer(self, model: nn.Module, settings: config.Optimizer) -> Optimizer:
        """Make the optimizer of the model's parameters; by default as job.yaml asks."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        rate, decay = settings.learning_rate, settings.weight_decay
        match settings.name:
            case "sgd":
                return torch.optim.SGD(parameters, rate, settings.momentum, weight_decay=decay)
            case "adamw":
                return torch.optim.AdamW(parameters, rate, settings.betas, weight_decay=decay)

    def scheduler(
        self, optimizer: Optimizer, settings: config.Schedule, *, steps: int
    ) -> LRScheduler | None:
        """Make the learning rate scheduler of a run of `steps` steps; None for constant rates."""
        return build_scheduler(optimizer, settings, steps=steps)

    def evaluate(self, model: nn.Module, batch: Any) -> Sums:
        """Evaluate a batch of the test split; gradients are off and the model is in eval mode."""
        loss, count = self.loss(model, batch)
        return {"loss": (loss, count)}

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Finalize the metrics of a whole evaluation, for example to convert a unit."""
        return means

    def fingerprint(self, samples: Samples) -> str:
        """Identity of the data set: a checkpoint with another one is refused."""
        digest = hashlib.sha256(f"{type(samples).__qualname__} {len(samples)}".encode())
        if isinstance(samples, StreamSamples):
            digest.update("\n".join(samples.stream.files()).encode())
        if isinstance(samples, TensorDataset):
            for tensor in samples.tensors:
                spaced = tensor[:: max(1, len(tensor) // 4096)].contiguous()
                digest.update(
                    f"{tuple(tensor.shape)} {tensor.dtype}".encode()
                    + spaced.view(torch.uint8).numpy().tobytes()
                )
        return digest.hexdigest()[:32]

    def to_device(self, batch: Any) -> Any:
        """Move a batch to the rank's device."""
        return _move(batch, self.context.device)


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _move(item, device) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        moved = [_move(item, device) for item in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)  # type: ignore[call-arg]
    return value
