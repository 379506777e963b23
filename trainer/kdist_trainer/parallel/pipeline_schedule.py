"""Runs one stage of a pipeline: torch's schedules over micro-batches of one shape, and a forward
pass without gradients.

    runner = StageRunner(stage, model_group, device)
    runner.train("1f1b", micro_batches, autocast, hooks)  # forward and backward over all of them
    runner.forward_only(inputs)  # one forward pass, the model's output on every rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from kdist_trainer.errors import ConfigError

Tensors = tuple[Tensor, ...]
Autocast = Callable[[], AbstractContextManager[Any]]


class Shape(NamedTuple):
    """Size and type of a tensor that is to be received."""

    size: tuple[int, ...]
    dtype: torch.dtype


class _StageShapes(NamedTuple):
    """Shapes of this stage's inputs and outputs, and of the model's outputs."""

    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    model_outputs: tuple[Shape, ...]


@dataclass(frozen=True)
class StageMicroBatch:
    """One micro-batch as a stage computes it."""

    inputs: Tensors
    """The tensors that the model is called with; their first dimension is the batch."""
    loss: Callable[[Any], Tensor]
    """From the model's output to the scalar that `backward` starts with; called on the last stage
    only.
    """
    prepare: Callable[[], object]
    """Called just before this stage computes it."""


class StageHooks(NamedTuple):
    """Called when this rank has received its inputs or gradients, and when it has finished a
    forward or a backward pass.
    """

    waited: Callable[[], object]
    forward: Callable[[], object]
    backward: Callable[[], object]


class StageRunner:
    """Runs one rank's stage of a pipeline, whose stages are the ranks of `group` in their order."""

    def __init__(self, stage: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        self.stage = stage
        self.group = group
        self.device = device
        self.index = group.rank()
        self.count = group.size()
        self.is_first = self.index == 0
        self.is_last = self.index == self.count - 1
        self._shapes: dict[tuple[bool, tuple[Shape, ...]], _StageShapes] = {}
        self._schedules: dict[Any, _Schedule] = {}

    def train(
        self,
        name: str,
        micro_batches: Sequence[StageMicroBatch],
        autocast: Autocast,
        hooks: StageHooks,
    ) -> None:
        """Run micro-batches forward and backward. Collective over the group.

        Args:
            name: `train.pipeline.schedule`.
            micro_batches: Micro-batches whose inputs have one shape.
            autocast: Makes the context of a forward pass.
            hooks: Called after each part of the work.
        """
        key = (name, len(micro_batches), shapes(micro_batches[0].inputs))
        if key not in self._schedules:
            self._schedules[key] = self._schedule(name, micro_batches, autocast)
        self._schedules[key].run(micro_batches, hooks)

    def _schedule(
        self, name: str, micro_batches: Sequence[StageMicroBatch], autocast: Autocast
    ) -> _Schedule:
        inputs = micro_batches[0].inputs
        with autocast():
            if self._key(inputs) not in self._shapes:
                micro_batches[0].prepare()
                with preserve_buffers(self.stage):
                    self.forward_only(inputs)
            known = self._shapes[self._key(inputs)]
        return _Schedule(self, name, len(micro_batches), known, autocast)

    @torch.no_grad()
    def forward_only(self, inputs: Tensors) -> Any:
        """The model's output for `inputs`, on every rank of the group. Collective over the
        group.
        """
        # the inputs have the same shapes on every rank, so all know the shapes or none does
        known = self._shapes.get(self._key(inputs))
        if not self.is_first:
            inputs_here = self._receive(self.index - 1, known.inputs if known else None)
        else:
            inputs_here = inputs
        output = self.stage(*inputs_here)
        outputs = as_tuple(output)
        if not self.is_last:
            self._send(outputs, self.index + 1, shapes_known=known is not None)
        result = self._broadcast_result(outputs, known.model_outputs if known else None)
        self._shapes[self._key(inputs)] = _StageShapes(
            shapes(inputs_here), shapes(outputs), shapes(result)
        )
        if isinstance(output, tuple) and self.is_last:
            return result
        return result[0] if len(result) == 1 else result

    def _key(self, inputs: Tensors) -> tuple[bool, tuple[Shape, ...]]:
        return torch.is_autocast_enabled(self.device.type), shapes(inputs)

    def _rank(self, index: int) -> int:
        return dist.get_global_rank(self.group, index)

    def _send(self, values: Tensors, to: int, *, shapes_known: bool) -> None:
        if not shapes_known:
            dist.send_object_list(
                [shapes(values)], dst=self._rank(to), group=self.group, device=torch.device("cpu")
            )
        for value in values:
            dist.send(value.contiguous(), dst=self._rank(to), group=self.group)

    def _receive(self, source: int, known: tuple[Shape, ...] | None) -> Tensors:
        box: list[Any] = [known]
        if known is None:
            dist.recv_object_list(
                box, src=self._rank(source), group=self.group, device=torch.device("cpu")
            )
        values = tuple(empty(shape, self.device) for shape in box[0])
        for value in values:
            dist.recv(value, src=self._rank(source), group=self.group)
        return values

    def _broadcast_result(self, values: Tensors, known: tuple[Shape, ...] | None) -> Tensors:
        """The last stage's values on every rank."""
        last, box = self._rank(self.count - 1), [known or shapes(values)]
        if known is None:
            dist.broadcast_object_list(box, src=last, group=self.group, device=torch.device("cpu"))
        if self.is_last:
            result = tuple(value.contiguous() for value in values)
        else:
            result = tuple(empty(shape, self.device) for shape in box[0])
        for value in result:
            dist.broadcast(value, src=last, group=self.group)
        return result


class _Stage(PipelineStage):
    """torch's stage with hooks around each pass; exceptions of the user's code are raised as they
    are.
    """

    micro_batches: Sequence[StageMicroBatch] = ()
    hooks: StageHooks

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.hooks.waited()
        self.micro_batches[fwd_chunk_id].prepare()
        try:
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        except RuntimeError as error:
            raise (error.__cause__ or error) from None
        self.hooks.forward()
        return output

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        self.hooks.waited()
        super().backward_one_chunk(*args, **kwargs)
        self.hooks.backward()


class _Computed(nn.Module):
    """A stage with autocast around its forward pass only."""

    def __init__(self, stage: nn.Module, autocast: Autocast) -> None:
        super().__init__()
        self.stage = stage
        self._autocast = autocast

    def forward(self, *inputs: Tensor) -> Any:
        with self._autocast():
            return self.stage(*inputs)


class _Schedule:
    """torch's schedule for a number of micro-batches of one shape."""

    def __init__(
        self,
        runner: StageRunner,
        name: str,
        count: int,
        known: _StageShapes,
        autocast: Autocast,
    ) -> None:
        self._runner = runner
        self._stage = _Stage(
            _Computed(runner.stage, autocast),
            runner.index,
            runner.count,
            runner.device,
            # Given, since torch would find them by passes over uninitialized memory.
            input_args=tuple(
                empty(shape, runner.device, grad=not runner.is_first) for shape in known.inputs
            ),
            output_args=tuple(empty(shape, runner.device, grad=True) for shape in known.outputs),
            group=runner.group,
        )
        kind: type[PipelineScheduleSingle] = (
            Schedule1F1B if name == "1f1b" and count >= runner.count else ScheduleGPipe
        )
        self._schedule = kind(self._stage, count, loss_fn=self._loss, scale_grads=False)

    def run(self, micro_batches: Sequence[StageMicroBatch], hooks: StageHooks) -> None:
        self._stage.micro_batches = micro_batches
        self._stage.hooks = hooks
        inputs = (
            [
                torch.cat(values)
                for values in zip(*[one.inputs for one in micro_batches], strict=True)
            ]
            if self._runner.is_first
            else []
        )
        target = torch.arange(len(micro_batches)) if self._runner.is_last else None
        self._schedule.step(*inputs, target=target, return_outputs=False)
        self._stage.clear_runtime_states()
        self._stage.micro_batches = ()

    def _loss(self, output: Any, index: Tensor) -> Tensor:
        loss = self._stage.micro_batches[int(index)].loss(output)
        self._stage.hooks.forward()
        return loss


@contextmanager
def preserve_buffers(module: nn.Module) -> Iterator[None]:
    """Restore the module's buffers at the end of the `with` block."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    yield
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])


def shapes(values: Tensors) -> tuple[Shape, ...]:
    """Sizes and types of the tensors."""
    return tuple(Shape(tuple(value.shape), value.dtype) for value in values)


def empty(shape: Shape, device: torch.device, *, grad: bool = False) -> Tensor:
    """An uninitialized tensor of that shape."""
    return torch.empty(
        shape.size,
        dtype=shape.dtype,
        device=device,
        requires_grad=grad and shape.dtype.is_floating_point,
    )


def as_tuple(output: Any) -> Tensors:
    """The output of a module of the chain as a tuple.

    Raises:
        ConfigError: If it is not made of tensors, which alone can be sent.
    """
    values = output if isinstance(output, tuple) else (output,)
    if not all(isinstance(value, Tensor) for value in values):
        raise ConfigError(
            "train.strategy: the parts of a pipeline's chain must return tensors; one returns a "
            f"{type(output).__name__}"
        )
    return values
