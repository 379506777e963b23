"""One stage of a pipeline at work: torch's schedules over microbatches of one shape, and a pass
without gradients.

work = StageRunner(stage, model_group, device)
work.train("1f1b", microbatches)      # forward and backward over all of them
work.look(inputs)                     # one forward pass, the model's output on every rank
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
    """What is known of a tensor before it arrives."""

    size: tuple[int, ...]
    dtype: torch.dtype


class _Known(NamedTuple):
    """What this stage takes and gives, and what the whole model gives."""

    taken: tuple[Shape, ...]
    given: tuple[Shape, ...]
    whole: tuple[Shape, ...]


@dataclass(frozen=True)
class Microbatch:
    """One forward pass."""

    inputs: Tensors
    """What the model is called with."""
    loss: Callable[[Any], Tensor]
    """The model's output -> what `backward` begins with; asked on the last stage only."""
    prepare: Callable[[], object]
    """Called just before this stage computes it."""


class StageHooks(NamedTuple):
    """Told when this rank begins to wait no longer, has gone forward, has gone backward."""

    waited: Callable[[], object]
    forward: Callable[[], object]
    backward: Callable[[], object]


class StageRunner:
    """One rank's place in a pipeline: `stage` of the ranks of `group`, in their order."""

    def __init__(self, stage: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        self.stage = stage
        self.group = group
        self.device = device
        self.index = group.rank()
        self.count = group.size()
        self.is_first = self.index == 0
        self.is_last = self.index == self.count - 1
        self._shapes: dict[tuple[bool, tuple[Shape, ...]], _Known] = {}
        self._schedules: dict[Any, _Schedule] = {}

    def train(
        self, name: str, microbatches: Sequence[Microbatch], autocast: Autocast, watch: StageHooks
    ) -> None:
        """Forward and backward over microbatches whose inputs have one shape. Collective over the
        group.
        """
        key = (name, len(microbatches), shapes(microbatches[0].inputs))
        if key not in self._schedules:
            self._schedules[key] = self._schedule(name, microbatches, autocast)
        self._schedules[key].run(microbatches, watch)

    def _schedule(
        self, name: str, microbatches: Sequence[Microbatch], autocast: Autocast
    ) -> _Schedule:
        inputs = microbatches[0].inputs
        with autocast():
            if self._key(inputs) not in self._shapes:
                microbatches[0].prepare()
                with preserve_buffers(self.stage):
                    self.look(inputs)
            known = self._shapes[self._key(inputs)]
        return _Schedule(self, name, len(microbatches), known, autocast)

    @torch.no_grad()
    def look(self, inputs: Tensors) -> Any:
        """The model's output for `inputs`, on every rank of the group. Collective over the
        group.
        """
        # the inputs are the same on every rank, and so is whether they are known
        known = self._shapes.get(self._key(inputs))
        taken = (
            inputs
            if self.is_first
            else self._receive(self.index - 1, known.taken if known else None)
        )
        output = self.stage(*taken)
        given = as_tuple(output)
        if not self.is_last:
            self._send(given, self.index + 1, announced=known is not None)
        whole = self._spread(given, known.whole if known else None)
        self._shapes[self._key(inputs)] = _Known(shapes(taken), shapes(given), shapes(whole))
        return (
            whole
            if isinstance(output, tuple) and self.is_last
            else whole[0]
            if len(whole) == 1
            else whole
        )

    def _key(self, inputs: Tensors) -> tuple[bool, tuple[Shape, ...]]:
        return torch.is_autocast_enabled(self.device.type), shapes(inputs)

    def _rank(self, index: int) -> int:
        return dist.get_global_rank(self.group, index)

    def _send(self, values: Tensors, to: int, *, announced: bool) -> None:
        if not announced:
            dist.send_object_list(
                [shapes(values)], dst=self._rank(to), group=self.group, device=torch.device("cpu")
            )
        for value in values:
            dist.send(value.contiguous(), dst=self._rank(to), group=self.group)

    def _receive(self, source: int, announced: tuple[Shape, ...] | None) -> Tensors:
        box: list[Any] = [announced]
        if announced is None:
            dist.recv_object_list(
                box, src=self._rank(source), group=self.group, device=torch.device("cpu")
            )
        values = tuple(empty(shape, self.device) for shape in box[0])
        for value in values:
            dist.recv(value, src=self._rank(source), group=self.group)
        return values

    def _spread(self, values: Tensors, announced: tuple[Shape, ...] | None) -> Tensors:
        """The last stage's values on every rank."""
        last, box = self._rank(self.count - 1), [announced or shapes(values)]
        if announced is None:
            dist.broadcast_object_list(box, src=last, group=self.group, device=torch.device("cpu"))
        found = (
            tuple(value.contiguous() for value in values)
            if self.is_last
            else tuple(empty(one, self.device) for one in box[0])
        )
        for value in found:
            dist.broadcast(value, src=last, group=self.group)
        return found


class _Stage(PipelineStage):
    """torch's stage, with our hooks around each pass; what the user's code raises comes out as it
    is.
    """

    microbatches: Sequence[Microbatch] = ()
    watch: StageHooks

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.watch.waited()
        self.microbatches[fwd_chunk_id].prepare()
        try:
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        except RuntimeError as error:
            raise (error.__cause__ or error) from None
        self.watch.forward()
        return output

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        self.watch.waited()
        super().backward_one_chunk(*args, **kwargs)
        self.watch.backward()


class _Computed(nn.Module):
    """A stage inside of the autocast block, which must not reach over backward passes."""

    def __init__(self, stage: nn.Module, autocast: Autocast) -> None:
        super().__init__()
        self.stage = stage
        self._autocast = autocast

    def forward(self, *inputs: Tensor) -> Any:
        with self._autocast():
            return self.stage(*inputs)


class _Schedule:
    """torch's schedule for a number of microbatches of one shape."""

    def __init__(
        self, line: StageRunner, name: str, count: int, known: _Known, autocast: Autocast
    ) -> None:
        self._line = line
        self._stage = _Stage(
            _Computed(line.stage, autocast),
            line.index,
            line.count,
            line.device,
            # Said beforehand, or torch would find them out by passes over uninitialised memory.
            input_args=tuple(
                empty(one, line.device, grad=not line.is_first) for one in known.taken
            ),
            output_args=tuple(empty(one, line.device, grad=True) for one in known.given),
            group=line.group,
        )
        kind: type[PipelineScheduleSingle] = (
            Schedule1F1B if name == "1f1b" and count >= line.count else ScheduleGPipe
        )
        self._schedule = kind(self._stage, count, loss_fn=self._loss, scale_grads=False)

    def run(self, microbatches: Sequence[Microbatch], watch: StageHooks) -> None:
        self._stage.microbatches, self._stage.watch = microbatches, watch
        inputs = (
            [torch.cat(same) for same in zip(*[one.inputs for one in microbatches], strict=True)]
            if self._line.is_first
            else []
        )
        target = torch.arange(len(microbatches)) if self._line.is_last else None
        self._schedule.step(*inputs, target=target, return_outputs=False)
        self._stage.clear_runtime_states()
        self._stage.microbatches = ()

    def _loss(self, output: Any, index: Tensor) -> Tensor:
        loss = self._stage.microbatches[int(index)].loss(output)
        self._stage.watch.forward()
        return loss


@contextmanager
def preserve_buffers(module: nn.Module) -> Iterator[None]:
    """A block after which the module's buffers are what they were before."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    yield
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])


def shapes(values: Tensors) -> tuple[Shape, ...]:
    """Sizes and types."""
    return tuple(Shape(tuple(value.shape), value.dtype) for value in values)


def empty(shape: Shape, device: torch.device, *, grad: bool = False) -> Tensor:
    """A tensor of that shape with anything in it."""
    return torch.empty(
        shape.size,
        dtype=shape.dtype,
        device=device,
        requires_grad=grad and shape.dtype.is_floating_point,
    )


def as_tuple(output: Any) -> Tensors:
    """What a part of the chain gave. Raises `ConfigError` for what cannot be sent."""
    values = output if isinstance(output, tuple) else (output,)
    if not all(isinstance(value, Tensor) for value in values):
        raise ConfigError(
            "train.strategy: pipeline passes tensors on, and a part of the chain gives a "
            f"{type(output).__name__}"
        )
    return values
