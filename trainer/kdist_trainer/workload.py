"""The interface of a workload: a model, its data and its loss, written by the user; and the
learning rate schedule. `docs/workloads.md` has a complete example.

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
from kdist_trainer.errors import ConfigError
from kdist_trainer.stream import Stream, StreamSamples

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def factor(settings: config.Schedule, *, steps: int) -> Callable[[int], float]:
    """The function from step (0 = first) to the share of the peak rate that this step uses.

    The warm-up's first step already moves: it takes 1/(warmupSteps + 1) of the peak. The last step
    takes `finalRatio`.
    """
    warmup, final = settings.warmup_steps, settings.final_ratio
    falling = max(1, steps - 1 - warmup)

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if settings.name == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / falling)
        if settings.name == "linear":
            return final + (1 - final) * (1 - done)
        return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2

    return share


class LrSchedule(LambdaLR):
    """The learning rate that job.yaml asks for. It follows from the step alone, so that any step
    can be gone on from.
    """

    def __init__(self, optimizer: Optimizer, settings: config.Schedule, *, steps: int) -> None:
        super().__init__(optimizer, factor(settings, steps=steps))
        self.settings = settings

    def place(self, step: int, *, steps: int) -> None:
        """Be where a run of `steps` steps is after `step` of them, at the rates that the
        optimizer's groups begin with.
        """
        share = factor(self.settings, steps=steps)
        self.lr_lambdas = [share for _ in self.optimizer.param_groups]
        self.base_lrs = [group["initial_lr"] for group in self.optimizer.param_groups]
        self.last_epoch = step
        self._last_lr = [base * share(step) for base in self.base_lrs]
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            set_rate(group, rate)

    def state_dict(self) -> dict[str, Any]:
        """The step. Everything else is the job's, or the optimizer's."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; `place` makes it count."""
        self.last_epoch = state_dict["last_epoch"]


def build(optimizer: Optimizer, settings: config.Schedule, *, steps: int) -> LRScheduler | None:
    """The scheduler that job.yaml asks for; None for a rate that never moves, which then costs
    nothing per step.
    """
    if settings.name == "constant" and settings.warmup_steps == 0:
        return None
    return LrSchedule(optimizer, settings, steps=steps)


def set_rate(group: dict[str, Any], rate: float | Tensor) -> None:
    """Give a group of parameters a learning rate, which may be a tensor that a compiled step holds
    on to.
    """
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


_FIELDS = {
    "optimizer.weightDecay": "weight_decay",
    "optimizer.momentum": "momentum",
    "optimizer.betas": "betas",
}


def take_over(
    optimizer: Optimizer,
    asked: Sequence[Mapping[str, Any]],
    edited: Collection[str],
    scheduler: Any = None,
) -> None:
    """Let `edited` fields of `spec.train` win over what a checkpoint brought into the optimizer's
    groups.

    `asked`: the groups as they were made from the present job, with their `initial_lr`. A scheduler
    of the workload's own goes on from its saved state, at rates that are scaled as the job's rate
    was.
    """
    for group, wanted in zip(optimizer.param_groups, asked, strict=True):
        for name, key in _FIELDS.items():
            if name in edited and key in wanted:
                group[key] = wanted[key]
        if "optimizer.learningRate" in edited:
            before, now = group["initial_lr"], wanted["initial_lr"]
            set_rate(group, group["lr"] * (now / before) if before else now)
            group["initial_lr"] = now
        if scheduler is None and any(
            field.startswith(("schedule.", "optimizer.learningRate")) for field in edited
        ):
            set_rate(group, group["initial_lr"])
    if "optimizer.learningRate" in edited and hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]


Split = Literal["train", "test"]
Sums = dict[str, tuple[Tensor | float, int]]
"""Name of a metric -> (sum, count): they add up exactly over batches and ranks, a mean would
not.
"""
OptionsT = TypeVar("OptionsT", bound=BaseModel)


class Samples(Protocol):
    """A data set: any object with a length and items. One with `fetch` gives a whole batch at once,
    which is faster.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class WorkloadContext:
    """What a workload is told: its options from job.yaml, where the data is mounted, the seed, the
    device.
    """

    options: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Path] = field(default_factory=dict)
    """Mount path as written in job.yaml -> the folder where it is on this machine."""
    seed: int = 0
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable

    def parse(self, model: type[OptionsT]) -> OptionsT:
        """Check the options against a pydantic model. Raises `ConfigError` with every problem at
        once.
        """
        try:
            return model.model_validate(self.options)
        except ValidationError as error:
            problems = "; ".join(
                f"train.options.{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
                for problem in error.errors()
            )
            raise ConfigError(problems) from None


class Workload(ABC):
    """A training task. Instances are made anew in every process; nothing in them is saved but model
    and optimizer.
    """

    units_per_sample: int | None = 1
    """What one sample adds to the count that `loss` returns; None where it depends on the data
    (then override `count`).
    """
    tokens_per_sample: int = 0
    """Tokens in one sample, for the metric of tokens per second; 0 where the word means nothing."""

    def __init__(self, context: WorkloadContext) -> None:
        self.context = context

    @abstractmethod
    def model(self) -> nn.Module:
        """The model, on the CPU. The generators are seeded: every process makes the same
        weights.
        """

    @abstractmethod
    def dataset(self, split: Split) -> Samples | Stream | None:
        """The samples of a split, the same in every process and every time; None where there is no
        test split.

        `train` may be a `Stream`, of data that can only be read from front to back.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """Run the model on a batch: the loss *summed* over the batch (a scalar) and how many terms
        it sums.
        """

    def count(self, batch: Any) -> int:
        """How many terms the loss of this batch sums; asked only where `units_per_sample` is
        None.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.units_per_sample is None: it must have count(batch)"
        )

    def weights(self, samples: Samples) -> Tensor | None:  # noqa: ARG002 - for those who override it
        """How often each sample of the training split is drawn, in proportion: with replacement.
        None: each once an epoch.
        """
        return None

    def collate(self, samples: list[Any]) -> Any:
        """Make one batch of single samples."""
        return default_collate(samples)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:  # noqa: ARG002 - for those who override it
        """Parts of the model that are computed one after the other, such as a transformer's layers;
        none by default.

        Sharded strategies gather one block at a time, and activation checkpointing computes a block
        again in the backward pass.
        """
        return ()

    def chain(self, model: nn.Module) -> Sequence[nn.Module]:
        """Modules that make up the whole model when each is called with what the one before gave;
        strategy `pipeline` cuts there.

        Their weights are the model's own. By default the parts of an `nn.Sequential`, and none of
        another model.
        """
        return list(model) if isinstance(model, nn.Sequential) else ()

    def tensor_plan(self, model: nn.Module, ranks: int) -> dict[str, ParallelStyle] | None:  # noqa: ARG002
        """How `ranks` ranks split the model's matrix products: torch's plan for
        `parallelize_module`; None where they cannot.

        Keys are names of parts, in which `*` stands for any number; strategy `tensor` asks for it.
        Raises `ConfigError` for a model that cannot be split so.
        """
        return None

    def optimizer(self, model: nn.Module, settings: config.Optimizer) -> Optimizer:
        """The optimizer over the model's parameters; by default the one that job.yaml asks for."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if settings.name == "sgd":
            return torch.optim.SGD(
                parameters,
                lr=settings.learning_rate,
                momentum=settings.momentum,
                weight_decay=settings.weight_decay,
            )
        return torch.optim.AdamW(
            parameters,
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
        )

    def scheduler(
        self, optimizer: Optimizer, settings: config.Schedule, *, steps: int
    ) -> LRScheduler | None:
        """What moves the learning rate after each of `steps` steps; None leaves it as it is."""
        return build(optimizer, settings, steps=steps)

    def evaluate(self, model: nn.Module, batch: Any) -> Sums:
        """Measure a batch of the test split; gradients are off and the model is in eval mode."""
        loss, count = self.loss(model, batch)
        return {"loss": (loss, count)}

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Last word on the metrics of a whole evaluation, for example to add a change of unit."""
        return means

    def fingerprint(self, samples: Samples) -> str:
        """Identity of the data set: a checkpoint made with another one is refused."""
        digest = hashlib.sha256(f"{type(samples).__qualname__} {len(samples)}".encode())
        if isinstance(samples, StreamSamples):
            digest.update("\n".join(samples.stream.files()).encode())
        if isinstance(samples, TensorDataset):
            for tensor in samples.tensors:
                digest.update(_sketch(tensor))
        return digest.hexdigest()[:32]

    def to_device(self, batch: Any) -> Any:
        """Move a batch to the rank's device."""
        return _move(batch, self.context.device)


def _sketch(tensor: Tensor, rows: int = 4096) -> bytes:
    """Shape, type and at most `rows` evenly spaced rows of a tensor."""
    spaced = tensor[:: max(1, len(tensor) // rows)].contiguous()
    return (
        f"{tuple(tensor.shape)} {tensor.dtype}".encode()
        + spaced.view(torch.uint8).numpy().tobytes()
    )


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _move(item, device) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        moved = [_move(item, device) for item in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)  # type: ignore[call-arg]
    return value
