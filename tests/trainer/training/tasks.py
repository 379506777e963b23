"""Small workloads with everything that makes equal bits hard: dropout, momentum, a schedule,
clipping, several buckets.
"""

from __future__ import annotations

import math
import os
import random
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from kdist_trainer import config, worker
from kdist_trainer.checkpoint import interval
from kdist_trainer.checkpoint.ledger import read_lines
from kdist_trainer.checkpoint.lock import Lock
from kdist_trainer.checkpoint.manifest import CheckpointDirectory
from kdist_trainer.config import TrainConfig
from kdist_trainer.formats import LEDGER, STEPS_FILE
from kdist_trainer.metrics.transport import Reporter
from kdist_trainer.processes.liveness import Heartbeat
from kdist_trainer.training import sync, trainer
from kdist_trainer.training.context import TrainContext
from kdist_trainer.workload import Split, Workload, WorkloadContext
from tests.trainer.checkpoint.exported import assert_each_done_tells_what_is_kept
from tests.trainer.training.group import PATIENCE, run_group

FEATURES = 16


class Small(Workload):
    """A little perceptron on made-up numbers. Options: width, depth, dropout, length, pause
    (seconds in each loss).
    """

    def model(self) -> nn.Module:
        width = self.context.options.get("width", 24)
        dropout = self.context.options.get("dropout", 0.2)
        hidden = [
            nn.Sequential(nn.Linear(width, width), nn.Tanh())
            for _ in range(self.context.options.get("depth", 1))
        ]
        return nn.Sequential(
            nn.Linear(FEATURES, width), nn.Tanh(), nn.Dropout(dropout), *hidden, nn.Linear(width, 3)
        )

    def dataset(self, split: Split) -> TensorDataset:
        draw = torch.Generator().manual_seed(7)
        length = self.context.options.get("length", 50) if split == "train" else 20
        return TensorDataset(
            torch.randn(length, FEATURES, generator=draw),
            torch.randint(0, 3, (length,), generator=draw),
            torch.arange(length),
        )

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        inputs, labels, _ = batch
        time.sleep(self.context.options.get("pause", 0))
        return functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)


class OftenSaved(Small):
    """Has a run that saves by itself do so at short intervals. Options: least (seconds)."""

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        interval._LEAST_SECONDS = self.context.options["least"]  # type: ignore[misc]


class Interrupted(Small):
    """Sends itself SIGTERM while it computes the loss. Options: at_loss (how many losses before),
    on_rank, react_within (seconds; slow steps shorten no interval if there are enough of them).
    """

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self.losses = 0
        if seconds := self.context.options.get("react_within"):
            sync.REACT_WITHIN_SECONDS = seconds  # type: ignore[misc]

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        self.losses += torch.is_grad_enabled()
        if (
            self.losses == self.context.options["at_loss"]
            and int(os.environ["RANK"]) == self.context.options["on_rank"]
        ):
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(model, batch)


class Exploding(Small):
    """Its loss is NaN from some sample on. Options: at_sample."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        loss, count = super().loss(model, batch)
        wild = (batch[2] == self.context.options["at_sample"]).any()
        return torch.where(wild, loss * torch.nan, loss), count


class Wild(Small):
    """The loss and the gradient of one sample are NaN, all others are as they should be. Options:
    at_sample.
    """

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        loss, count = super().loss(model, batch)
        return loss * torch.where(
            (batch[2] == self.context.options["at_sample"]).any(), torch.nan, 1.0
        ), count


class Poisoned(Small):
    """One sample is NaN, and its batch goes into running statistics before anything tells. Options:
    at_sample.
    """

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 24), nn.BatchNorm1d(24), nn.Linear(24, 3))

    def dataset(self, split: Split) -> TensorDataset:
        samples = super().dataset(split)
        if split == "train":
            samples.tensors[0][self.context.options["at_sample"]] = torch.nan
        return samples


class Unseeded(Small):
    """Each rank has samples of its own, as by a shuffle without a seed."""

    def dataset(self, split: Split) -> TensorDataset:
        samples = super().dataset(split)
        samples.tensors[0][0] = int(os.environ["RANK"])
        return samples


class Creeping(Small):
    """Its loss stays finite while, from some sample on, its gradient is NaN. Options: at_sample."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        loss, count = super().loss(model, batch)
        wild = (batch[2] == self.context.options["at_sample"]).any()
        return loss + torch.where(wild, (loss * 0).sqrt(), loss * 0), count


class Late(Small):
    """Rank 1 comes late to one step: not before rank 0's heartbeat shows the collective that it
    waits in.
    """

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self.losses = 0

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        self.losses += torch.is_grad_enabled()
        if self.losses == 6 and os.environ["RANK"] == "1":
            folder = Path(os.environ["KDIST_SCRATCH"]).parent
            other = Heartbeat(folder / "scratch-0/rank-0.heartbeat")
            end = time.monotonic() + PATIENCE
            while (
                (beat := other.read()).collective is None or beat.step < 4
            ) and time.monotonic() < end:
                time.sleep(0.001)
            (folder / "waits").write_text(f"{beat.phase} {beat.step} {beat.collective}")
        return super().loss(model, batch)


WAITED = [math.inf]
"""When `Dawdling` had waited; no state of the training."""


class Dawdling(Small):
    """One rank waits before each loss as long as its step has taken, on a busy machine too, or at
    least some seconds. Options: rank, seconds.
    """

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        if os.environ["RANK"] == str(self.context.options["rank"]):
            took = time.monotonic() - WAITED[-1]
            time.sleep(max(took, self.context.options["seconds"]))
            WAITED.append(time.monotonic())
        return super().loss(model, batch)


class Whimsical(Small):
    """Draws from NumPy's and Python's generators while it computes the loss."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        loss, count = super().loss(model, batch)
        return loss * float(0.5 + np.random.rand() + random.random()), count


class Adaptive(Small):
    """Trains by Adagrad, whose state is there before its first step."""

    def optimizer(self, model: nn.Module, settings: config.Optimizer) -> Optimizer:
        return torch.optim.Adagrad(model.parameters(), lr=settings.learning_rate)


class Padded(Small):
    """Counts only some of its samples, which ones depends on the data."""

    units_per_sample = None

    def count(self, batch: Any) -> int:
        return int((batch[2] % 3 > 0).sum())

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        inputs, labels, numbers = batch
        each = functional.cross_entropy(model(inputs), labels, reduction="none")
        return (each * (numbers % 3 > 0)).sum(), Padded.count(self, batch)


class SlowToCount(Padded):
    """Rank 1 takes longer to count. Options: seconds."""

    def count(self, batch: Any) -> int:
        if os.environ["RANK"] == "1":
            time.sleep(self.context.options["seconds"])
        return super().count(batch)


def describe(**train: Any) -> dict[str, Any]:
    """A `train.json` for `Small`: 50 samples in batches of 12, so that epochs end inside of steps
    and the last step is short.
    """
    section = {
        "workload": f"{__name__}:Small",
        "epochs": 2,
        "globalBatch": 12,
        "seed": 3,
        "evaluate": "never",
        "optimizer": {"name": "adamw", "learningRate": 0.01},
        "schedule": {"name": "cosine", "warmupSteps": 3},
        "clipGradNorm": 1.0,
        "bucketMib": 1,
        "checkpoint": {"every": {"steps": 1_000_000}, "mode": "blocking", "keep": 1000},
        **train,
    }
    return {"name": "test", "nodes": {"min": 1, "max": 4}, "procsPerNode": 1, "train": section}


WIDE = {"width": 520, "depth": 3}
"""Options that make three buckets of a MiB: the order in which they are reduced begins to
matter.
"""


def train(document: dict[str, Any], folder: Path) -> str:
    """What a rank of an agent does, with its files in `folder`."""
    path = folder / f"train-{os.environ['RANK']}.json"
    path.write_text(TrainConfig.model_validate(document, by_alias=True, strict=False).to_json())
    os.environ["KDIST_CONFIG"] = str(path)
    os.environ["KDIST_SCRATCH"] = str(folder / f"scratch-{os.environ['RANK']}")
    Path(os.environ["KDIST_SCRATCH"]).mkdir(exist_ok=True)
    return worker.main()


def train_watched(
    document: dict[str, Any],
    folder: Path,
    *,
    steps: list[float] | None = None,
    sent: list[int] | None = None,
) -> TrainContext:
    """The same; returns the context of the training. `steps` gets the seconds of each step, `sent`
    each step at which the reporter was flushed.
    """
    contexts: list[TrainContext] = []
    original = trainer.setup

    def setup(ctx: TrainContext) -> None:
        contexts.append(ctx)
        ctx.reporter = Watched(ctx, steps, sent)
        original(ctx)

    trainer.setup = setup
    train(document, folder)
    return contexts[0]


class Watched(Reporter):
    """Notes what the training reports, instead of sending it."""

    def __init__(
        self, ctx: TrainContext, steps: list[float] | None, sent: list[int] | None
    ) -> None:
        super().__init__(ctx.stats)
        self._ctx = ctx
        self._steps = steps
        self._sent = sent

    def send(self) -> None:
        if self._steps is not None:
            self._steps.append(self._ctx.step_records[-1].seconds)

    def flush(self) -> None:
        if self._sent is not None:
            self._sent.append(int(self._ctx.stats.last_step or 0))


def train_here(
    document: dict[str, Any], folder: Path, size: int, *, generation: int = 1
) -> list[str]:
    """Start `size` ranks that train with checkpoints in `folder`; what each returned. DONE tells
    what was kept.
    """
    folder.mkdir(exist_ok=True)
    environment = {
        "KDIST_CHECKPOINTS": str(folder / "checkpoints"),
        "KDIST_GENERATION": str(generation),
    }
    returned = run_group(train, size, document, folder, environment=environment)
    assert_each_done_tells_what_is_kept(folder)
    return returned


def done(folder: Path) -> dict[str, Any]:
    """The DONE document of a training in `folder`."""
    document = CheckpointDirectory(folder / "checkpoints").done()
    assert document is not None, "the training has not ended"
    assert_each_done_tells_what_is_kept(folder)
    return document


def losses(folder: Path, *, generation: int = 1) -> dict[int, str]:
    """Loss of each step of a generation, in hexadecimal: equal means bitwise identical."""
    lines = read_lines(folder / "checkpoints" / LEDGER / STEPS_FILE)
    return {line["step"]: line["loss"] for line in lines if line["generation"] == generation}


def weights(folder: Path) -> dict[str, Tensor]:
    """The model in the newest checkpoint."""
    newest = Lock(folder / "checkpoints").find_newest()
    assert newest is not None, "there is no checkpoint"
    model = Small(WorkloadContext(_options(folder))).model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.distributed is not initialised here
        load({"model": model.state_dict()}, checkpoint_id=newest.path, no_dist=True)
    return model.state_dict()


def _options(folder: Path) -> dict[str, Any]:
    train = TrainConfig.read(folder / "train-0.json").train
    assert train is not None
    return dict(train.options)
