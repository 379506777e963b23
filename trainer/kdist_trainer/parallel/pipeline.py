"""`pipeline`: splits the model into stages, one per rank of a model replica.

A batch is split into micro-batches, which pass through the stages forward and backward in the order
of torch's pipeline schedules. Gradients are averaged over the replicas as with `ddp`.

`StageRunner` runs one stage: torch's schedules over micro-batches of one shape, and a forward pass
without gradients.

    runner = StageRunner(stage, model_group, device)
    runner.train("1f1b", micro_batches, autocast, hooks)  # forward and backward over all of them
    runner.forward_only(inputs)  # one forward pass, the model's output on every rank
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.optim import Optimizer

from kdist_trainer.distributed.world import World
from kdist_trainer.errors import ConfigError
from kdist_trainer.numerics.precision import Precision
from kdist_trainer.parallel.ddp import Replicated
from kdist_trainer.state import AS_NEW, BufferNames, ValueKind, read_module
from kdist_trainer.torch_internals import own_buffers, own_parameters


class Stage(nn.Module):
    """Consecutive modules of a chain, computed one after the other."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *inputs: Any) -> Any:
        first, *others = self.parts
        value = first(*inputs)
        for part in others:
            value = part(*value) if isinstance(value, tuple) else part(value)
        return value


def split_stages(model: nn.Module, chain: Sequence[nn.Module], stages: int) -> list[Stage]:
    """Split the chain, modules that make up the model when each is called with the output of the
    one before, into stages of about equal numbers of weights; each gets at least one module with
    some. Raises `ConfigError` if the chain is too short, lacks weights of the model, or uses one
    weight in two stages.
    """
    sizes = [sum(weight.numel() for weight in part.parameters()) for part in chain]
    with_weights = sum(size > 0 for size in sizes)
    if with_weights < stages:
        raise ConfigError(
            f"train.strategy: the model's chain has {with_weights} parts with weights, which "
            f"cannot make {stages} stages: "
            "set a smaller modelParallel, or let Workload.chain name smaller parts"
            if chain
            else (
                "train.strategy: pipeline needs a model that is an nn.Sequential, or a "
                "workload whose `chain` names its parts"
            )
        )
    cuts = balance_stages(sizes, stages)
    split = [Stage(chain[first:last]) for first, last in pairwise(cuts)]
    check_stages(model, split)
    return split


def balance_stages(sizes: Sequence[int], stages: int) -> list[int]:
    """Where to cut a chain of modules with these numbers of weights so that the largest stage is as
    small as possible and none is empty: [0, ..., len(sizes)]. Dynamic programming over the number
    of stages (the linear partition problem).
    """
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    impossible = (math.inf, list[int]())
    # best[end]: the largest stage and the cuts of the first `end` modules
    best = [(0.0, [0]), *[impossible] * len(sizes)]
    for _ in range(stages):
        best = [
            min(
                (
                    (max(largest, sums[end] - sums[start]), [*cuts, end])
                    for start, (largest, cuts) in enumerate(best[:end])
                    if cuts and sums[end] > sums[start]
                ),
                default=impossible,
            )
            for end in range(len(sums))
        ]
    return best[-1][1]


def check_stages(model: nn.Module, stages: Sequence[Stage]) -> None:
    """Raise `ConfigError` if a weight of the model belongs to no stage or to two."""
    owners: dict[int, set[int]] = {}
    for number, stage in enumerate(stages):
        for weight in stage.parameters():
            owners.setdefault(id(weight), set()).add(number)
    for name, weight in model.named_parameters():
        found = owners.get(id(weight), set())
        if not found:
            raise ConfigError(f"train.strategy: {name} is in no part that Workload.chain names")
        if len(found) > 1:
            raise ConfigError(
                f"train.strategy: {name} is used by two stages of the pipeline, which "
                "cannot share it"
            )


def keep_stage(model: nn.Module, own: Stage, stages: Sequence[Stage]) -> None:
    """Remove all other stages' tensors from the model, so that the remaining ones keep their
    names.
    """
    held = {stage: {id(one) for one in (*stage.parameters(), *stage.buffers())} for stage in stages}
    removed = set[int]().union(*held.values()) - held[own]
    for module in model.modules():
        for slots in (own_parameters(module), own_buffers(module)):
            for name, tensor in slots.items():
                if id(tensor) in removed:
                    slots[name] = None


BUCKET_BYTES: Final = 25 * 2**20


class MicroBatchTask(NamedTuple):
    """One micro-batch as the loop sees it."""

    loss: Callable[[nn.Module], Tensor]
    """Calls the model on its samples; returns its part of the step's loss (a scalar)."""
    prepare: Callable[[int], object]
    """Seeds the random generators for a stage, given by its number."""


class Pipeline(Replicated):
    """A pipeline for each model replica, over the neighboring ranks of `world.mesh()["model"]`."""

    sharded = True

    def __init__(self, world: World, *, schedule: str) -> None:
        self._world = world
        self._schedule = schedule
        self.is_counted = world.model_rank == world.model_parallel - 1
        """The last stage computes the loss."""
        self._forward: Callable[..., Any] = lambda *inputs: self._runner.forward_only(inputs)
        """What calling the model does at the moment. Here, as an evaluation does: a forward pass
        without gradients, with the same output on every stage.
        """
        self._groups: list[list[str]] | None = None
        """Names of the weights in each of the optimizer's groups, over all stages."""

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Keep only this rank's stage of the model, which is on the CPU, in place; `blocks` is the
        chain of modules that makes up the whole model. Calling the model is then collective over
        the stages. Raises `ConfigError` if the chain cannot be split.
        """
        mesh, world = self._world.mesh(), self._world
        stages = split_stages(model, blocks, world.model_parallel)
        own = stages[world.model_rank]
        self._names = [name for name, _ in model.named_parameters()]
        whole = set(read_module(model))
        keep_stage(model, own, stages)
        self._elsewhere = whole - set(read_module(model))
        self.module = model.to(world.device)
        self.stage = own.to(world.device)
        self.replica_group = mesh["data"].get_group()
        self.stages = mesh["model"].get_group()
        self._runner = StageRunner(own, self.stages, world.device)
        self._weights = [weight for weight in own.parameters() if weight.requires_grad]
        model.forward = lambda *inputs: self._forward(*inputs)
        return model

    def forward_backward(
        self, tasks: Sequence[MicroBatchTask], precision: Precision, hooks: StageHooks
    ) -> Tensor:
        """Run all micro-batches forward and backward; leaves the gradients' mean over the replicas.
        Returns this replica's part of the step's loss (a scalar) on the last stage, 0 on the
        others. Collective. Raises `ConfigError` if the loss does not call the model once.
        """
        losses: list[Tensor] = []
        micro_batches = [self._micro_batch(task, precision, losses) for task in tasks]
        groups: dict[Any, list[StageMicroBatch]] = {}  # a schedule must know the shapes of inputs
        for micro_batch in micro_batches:
            groups.setdefault(shapes(micro_batch.inputs), []).append(micro_batch)
        for group in groups.values():
            self._runner.train(self._schedule, group, precision.autocast, hooks)
        self._average_gradients()
        hooks.waited()
        zero = torch.zeros((), device=self._world.device)
        precision.scale(zero)  # creates the loss scale on stages without a loss too
        return torch.stack(losses).sum() if losses else zero

    def _micro_batch(
        self, task: MicroBatchTask, precision: Precision, losses: list[Tensor]
    ) -> StageMicroBatch:
        task.prepare(0)
        with precision.autocast():
            inputs = self._model_inputs(task)

        def loss(output: Any) -> Tensor:
            with self._replace_forward(lambda *_: output), precision.autocast():
                partial_loss = task.loss(self.module)
            losses.append(partial_loss.detach())
            return precision.scale(partial_loss)

        return StageMicroBatch(inputs, loss, lambda: task.prepare(self._runner.index))

    def _model_inputs(self, task: MicroBatchTask) -> Tensors:
        """The tensors that the loss calls the model with."""

        def interrupt(*inputs: Any) -> Any:
            raise _ModelCalled(inputs)

        with self._replace_forward(interrupt):
            try:
                task.loss(self.module)
            except _ModelCalled as call:
                if call.inputs and all(
                    isinstance(value, Tensor) and value.ndim for value in call.inputs
                ):
                    return call.inputs
                raise ConfigError(
                    "train.strategy: a pipeline needs a loss that calls the model with "
                    "tensors whose first dimension is the batch"
                ) from None
        raise ConfigError("train.strategy: a pipeline needs a loss that calls the model")

    @contextmanager
    def _replace_forward(self, forward: Callable[..., Any]) -> Iterator[None]:
        before = self._forward
        self._forward = forward
        try:
            yield
        finally:
            self._forward = before

    def _average_gradients(self) -> None:
        """Average the gradients over the replicas of this stage, in buckets."""
        if self._world.data_size == 1:
            return
        share = 1 / self._world.data_size
        for weight in self._weights:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        for bucket in buckets([weight.grad for weight in self._weights if weight.grad is not None]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).mul_(share)
            dist.all_reduce(flat, group=self.replica_group)
            means = torch.split(flat, [gradient.numel() for gradient in bucket])
            for gradient, mean in zip(bucket, means, strict=True):
                gradient.copy_(mean.view_as(gradient))

    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """This stage's part of model and optimizer by full names; the optimizer's groups name the
        weights of all stages.
        """
        own = super().state_dict(optimizer)
        groups = own["optimizer"]["param_groups"]
        if self._groups is None:
            self._groups = self._merge_groups([group["params"] for group in groups])
        own["optimizer"]["param_groups"] = [
            {**group, "params": names} for group, names in zip(groups, self._groups, strict=True)
        ]
        return own

    def _merge_groups(self, own: list[list[str]]) -> list[list[str]]:
        """The names in each of the optimizer's groups, over all stages, in the model's order."""
        every: list[Any] = [None] * self.stages.size()
        dist.all_gather_object(every, own, group=self.stages)
        position = {name: number for number, name in enumerate(self._names)}
        return [
            sorted({name for names in group for name in names}, key=position.__getitem__)
            for group in zip(*every, strict=True)
        ]

    def template(
        self, saved: Mapping[str, ValueKind], optimizer: Optimizer, *, buffers: BufferNames = AS_NEW
    ) -> dict[str, Any]:
        """This stage's part: buffers of other stages are not made here."""
        elsewhere = {f"model.{name}" for name in self._elsewhere}
        own = {name: kind for name, kind in saved.items() if name not in elsewhere}
        return super().template(own, optimizer, buffers=buffers)

    def load_state_dict(
        self, values: dict[str, Any], optimizer: Optimizer, *, buffers: BufferNames = AS_NEW
    ) -> None:
        own = {name for name, _ in self.module.named_parameters()}
        groups = [
            {**group, "params": [name for name in group["params"] if name in own]}
            for group in values["optimizer"]["param_groups"]
        ]
        part = {**values, "optimizer": {**values["optimizer"], "param_groups": groups}}
        buffers = buffers._replace(absent={*buffers.absent, *self._elsewhere})
        super().load_state_dict(part, optimizer, buffers=buffers)

    def full_state_dict(self) -> dict[str, Any]:
        parts: list[Any] = [None] * self.stages.size()
        first = dist.get_global_rank(self.stages, 0)
        if self._world.data_rank:
            return {}
        dist.gather_object(
            super().full_state_dict(),
            parts if self._world.rank == first else None,
            dst=first,
            group=self.stages,
        )
        return {name: value for part in parts if part for name, value in part.items()}


class _ModelCalled(BaseException):
    """The loss has called the model. No `Exception`, which the user's code might handle."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.inputs = inputs


def buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group consecutive gradients of one type into buckets of at most `BUCKET_BYTES`."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        if bucket and (
            gradient.dtype != bucket[0].dtype
            or sum(other.nbytes for other in bucket) + gradient.nbytes > BUCKET_BYTES
        ):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


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
        """Run micro-batches whose inputs have one shape forward and backward, by the schedule of
        this name. Collective over the group.
        """
        inputs = micro_batches[0].inputs
        key = (name, len(micro_batches), shapes(inputs))
        if key not in self._schedules:
            with autocast():
                if self._key(inputs) not in self._shapes:
                    micro_batches[0].prepare()
                    with preserve_buffers(self.stage):
                        self.forward_only(inputs)
                known = self._shapes[self._key(inputs)]
            self._schedules[key] = _Schedule(self, name, len(micro_batches), known, autocast)
        self._schedules[key].run(micro_batches, hooks)

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
        outputs = output if isinstance(output, tuple) else (output,)
        if not all(isinstance(value, Tensor) for value in outputs):  # which alone can be sent
            raise ConfigError(
                "train.strategy: the parts of a pipeline's chain must return tensors; one returns "
                f"a {type(output).__name__}"
            )
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
