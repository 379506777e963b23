"""A workload with what other people's models have and `digits` has not, for recovery in place.

Layers that are used in another order than that of their registration, in several buckets of
gradients; batch norms, and a buffer that is in no state dict and that the forward pass changes and
uses; a schedule of the workload's own; samples from a stream; everything as the options say.

Its ranks also kill themselves where a test wants it, within kdist's own recovery too. Option
`orders` is a folder in which the test puts two orders:

    split.json   {"step": 20, "victim": 0, "behind": [2]}    in the last collective of that step
                 the victim kills itself, and the ranks behind fail: others finish the step;
                 without a step, rank 0 chooses its next one
    crash.json   {"role": "behind", "point": "keep:5"}       the first rank in that role that comes
                 to that line kills itself before it runs, and leaves the file `crashed`

A rank that has finished the split step is `ahead`; one that was started since is a `newcomer`; all
others have the role "".
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR
from torch.utils.data import TensorDataset

from kdist_trainer import config
from kdist_trainer.distributed.world import World
from kdist_trainer.errors import PeersLostError
from kdist_trainer.parallel.buffers import Buffers
from kdist_trainer.stream import Stream
from kdist_trainer.training import evaluation, regroup, trainer
from kdist_trainer.training.checkpointing import TrainerCheckpointing
from kdist_trainer.training.step_log import StepLog
from kdist_trainer.workload import Samples, Split, Workload, WorkloadContext

FEATURES, CLASSES, FILE_SAMPLES = 16, 3, 32


def draw_samples(length: int, seed: int) -> TensorDataset:
    """Made-up samples of three classes."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (length,), generator=draw)
    return TensorDataset(torch.randn(length, FEATURES, generator=draw) + labels[:, None], labels)


class Files(Stream):
    """The same samples as files that can only be read from their start."""

    def __init__(self, length: int) -> None:
        self._length = length

    def files(self) -> Sequence[str]:
        """One name for each `FILE_SAMPLES` samples."""
        return [str(first) for first in range(0, self._length, FILE_SAMPLES)]

    def read(self, file: str) -> Iterator[Any]:
        """The samples of a file."""
        samples = draw_samples(self._length, 7)
        for index in range(int(file), min(int(file) + FILE_SAMPLES, self._length)):
            yield samples[index]


class Net(nn.Module):
    """Registered as last, first, middle; used as first, middle, last."""

    calls: Tensor
    phase: Tensor

    def __init__(self, width: int, *, norms: bool, late: int | None) -> None:
        super().__init__()
        self.last = nn.Linear(width, CLASSES)
        self.first = nn.Linear(FEATURES, width)
        self.middle = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width) if norms else nn.Identity()
        self.dropout = nn.Dropout(0.1)
        self.counts = norms
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.passes, self.late = 0, late
        if late is not None:
            self.register_buffer("phase", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Any:
        """Input [n, FEATURES], output [n, CLASSES]."""
        if self.training and self.counts:
            self.calls += 1
        if self.training and self.late is not None:
            self.passes += 1
            self.phase += self.passes > self.late
        hidden = self.norm(functional.relu(self.first(inputs)))
        hidden = self.dropout(functional.relu(self.middle(hidden)))
        return self.last(hidden) / (1 + 0.01 * self.calls)


FUNCTIONS = [
    regroup.keep,
    regroup.plan_handover,
    regroup.take_over,
    regroup.describe_own_state,
    regroup.receive_state,
    regroup.make_room,
    regroup.load_values,
    regroup.record_losses,
    trainer.setup,
    trainer.seek_data,
    StepLog.complete,
    TrainerCheckpointing.skip_load,
    TrainerCheckpointing.continue_from,
]
"""What ranks run to leave a group and to join the next one."""
OTHERS = [evaluation.evaluate, TrainerCheckpointing.restore, trainer.save, World._open]
CODES = {function.__code__: function.__name__ for function in (*FUNCTIONS, *OTHERS)}


def lines_of(code: CodeType) -> list[int]:
    """The lines of a function, counted from its first one, without that."""
    lines = {line for _, _, line in code.co_lines() if line is not None}
    return sorted(line - code.co_firstlineno for line in lines if line > code.co_firstlineno)


def find_point(function: Any, text: str) -> str:
    """The first line of a function that has the text, as `NAME:LINE`."""
    lines, _ = inspect.getsourcelines(function)
    return f"{function.__name__}:{next(n for n, line in enumerate(lines) if text in line)}"


POINTS = [
    f"{function.__name__}:{line}" for function in FUNCTIONS for line in lines_of(function.__code__)
]
"""Every line of `FUNCTIONS`."""


class Orders:
    """This rank's part in what the test has ordered."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._role = "newcomer"

    def read(self, name: str) -> dict[str, Any]:
        """An order; empty if there is none."""
        try:
            return dict(json.loads((self._folder / name).read_text()))
        except FileNotFoundError:
            return {}

    def write(self, name: str, order: dict[str, Any]) -> None:
        """Put an order in place of another one, in one write."""
        new = self._folder / f"{name}.new"
        new.write_text(json.dumps(order))
        new.replace(self._folder / name)

    def end_collective(self) -> None:
        """Called after the last collective of a step."""
        caller = sys._getframe(2)
        if caller.f_code is not trainer.train_step.__code__:
            return
        ctx = caller.f_locals["ctx"]
        split = self.read("split.json")
        self._role = ""
        step = ctx.state.step + 1
        if split and "step" not in split and ctx.world.rank == 0:
            self.write("split.json", {**split, "step": step + 1})
        if split.get("step") != step:
            return
        time.sleep(0.1)  # until all have what this rank has sent them in the collective
        self._role = "behind" if ctx.world.rank in split["behind"] else "ahead"
        if split["victim"] == ctx.world.rank:
            # taken back, so that the step is not split again when it is done again
            with contextlib.suppress(FileNotFoundError):
                (self._folder / "split.json").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if self._role == "behind":
            raise PeersLostError("a connection broke in the last collective of the step")

    def trace(self, frame: FrameType, _event: str, _: Any) -> Any:
        """The trace function: follows the calls of the functions."""
        name = CODES.get(frame.f_code)
        if name is None:
            return None
        crash = self.read("crash.json")
        if crash.get("role") != self._role:
            return None

        def follow(frame: FrameType, event: str, _: Any) -> Any:
            line = frame.f_lineno - frame.f_code.co_firstlineno
            if event == "line" and f"{name}:{line}" == crash["point"]:
                with contextlib.suppress(FileExistsError):
                    (self._folder / "crashed").touch(exist_ok=False)
                    if "until" not in crash:
                        os.kill(os.getpid(), signal.SIGKILL)
                    while not (self._folder / crash["until"]).exists():
                        time.sleep(0.01)
            return follow

        return follow


def follow_orders(folder: Path) -> None:
    """Have this process look for orders from now on."""
    orders = Orders(folder)
    synchronize = Buffers.synchronize

    def synchronize_and_crash(buffers: Buffers) -> bool:
        was_sent = synchronize(buffers)
        orders.end_collective()
        return was_sent

    Buffers.synchronize = synchronize_and_crash  # type: ignore[method-assign, assignment]
    sys.settrace(orders.trace)


class Varied(Workload):
    """Options: width, norms, stream, length, poison (a sample whose loss is NaN), pause (seconds in
    each loss), late (the pass after which a buffer begins to change), orders.
    """

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        if "orders" in context.options:
            follow_orders(Path(context.options["orders"]))

    def model(self) -> nn.Module:
        options = self.context.options
        norms, late = options.get("norms", False), options.get("late")
        return Net(options.get("width", 32), norms=norms, late=late)

    def dataset(self, split: Split) -> Samples | Stream:
        length = self.context.options.get("length", 300)
        if split == "test":
            return draw_samples(40, 8)
        if self.context.options.get("stream"):
            return Files(length)
        samples = draw_samples(length, 7)
        order = torch.randperm(length)  # by the generator that the model has drawn from
        samples = TensorDataset(*[tensor[order] for tensor in samples.tensors])
        if "poison" in self.context.options:
            samples.tensors[0][self.context.options["poison"]] = torch.nan
        return samples

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        inputs, labels = batch
        time.sleep(self.context.options.get("pause", 0) * model.training)
        return functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)

    def scheduler(
        self, optimizer: Optimizer, settings: config.Schedule, *, steps: int
    ) -> LRScheduler | None:
        if settings.name != "constant":
            return super().scheduler(optimizer, settings, steps=steps)
        return MultiStepLR(optimizer, [steps // 3, 2 * steps // 3], gamma=0.3)
