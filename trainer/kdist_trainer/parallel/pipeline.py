"""`pipeline`: cuts the model into stages, one per rank of a copy of the model.

A batch is split into microbatches, which pass through the stages forward and backward in the order
of torch's pipeline schedules. Gradients are averaged over the copies of the model as with `ddp`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.optim import Optimizer

from kdist_trainer.errors import ConfigError
from kdist_trainer.parallel.ddp import Replicated
from kdist_trainer.parallel.pipeline_schedule import (
    Microbatch,
    StageHooks,
    StageRunner,
    Tensors,
    shapes,
)
from kdist_trainer.precision import Precision
from kdist_trainer.world import World


class Stage(nn.Module):
    """Neighbouring parts of a chain, computed one after the other."""

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
    """The chain in `stages` pieces of about equal numbers of weights, each with a weight of its
    own.

    Raises `ConfigError` where the chain is too short, leaves weights out, or uses one weight in two
    stages.
    """
    loads = [sum(weight.numel() for weight in part.parameters()) for part in chain]
    able = sum(load > 0 for load in loads)
    if able < stages:
        raise ConfigError(
            f"train.strategy: the model's chain has {able} parts with weights, which "
            f"cannot make {stages} stages: "
            "set a smaller modelParallel, or let Workload.chain name smaller parts"
            if chain
            else (
                "train.strategy: pipeline needs a model that is an nn.Sequential, or a "
                "workload whose `chain` names its parts"
            )
        )
    pieces = [Stage(chain[first:last]) for first, last in pairwise(balance_stages(loads, stages))]
    check(model, pieces)
    return pieces


def balance_stages(loads: Sequence[int], stages: int) -> list[int]:
    """Where to cut so that the heaviest stage is as light as can be and no stage weighs nothing:
    [0, …, len(loads)].
    """
    sums = [0]
    for load in loads:
        sums.append(sums[-1] + load)
    nowhere = (math.inf, list[int]())
    # the cuts that suit the parts up to each one, with so many stages
    best = [(0.0, [0]), *[nowhere] * len(loads)]
    for _ in range(stages):
        best = [
            min(
                (
                    (max(heaviest, sums[end] - sums[start]), [*cuts, end])
                    for start, (heaviest, cuts) in enumerate(best[:end])
                    if cuts and sums[end] > sums[start]
                ),
                default=nowhere,
            )
            for end in range(len(sums))
        ]
    return best[-1][1]


def check(model: nn.Module, pieces: Sequence[Stage]) -> None:
    """Each weight of the model belongs to one stage. Raises `ConfigError`."""
    homes: dict[int, set[int]] = {}
    for number, piece in enumerate(pieces):
        for weight in piece.parameters():
            homes.setdefault(id(weight), set()).add(number)
    for name, weight in model.named_parameters():
        stages = homes.get(id(weight), set())
        if not stages:
            raise ConfigError(f"train.strategy: {name} is in no part that Workload.chain names")
        if len(stages) > 1:
            raise ConfigError(
                f"train.strategy: {name} is used by two stages of the pipeline, which "
                "cannot share it"
            )


def keep(model: nn.Module, own: Stage, others: Sequence[Stage]) -> None:
    """Leave only a stage's tensors in the model, so that what is left is named as in the whole."""
    mine = {id(tensor) for tensor in tensors(own)}
    theirs = {id(tensor) for stage in others for tensor in tensors(stage)} - mine
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if id(tensor) in theirs:
                    slots[name] = None


def tensors(stage: nn.Module) -> Iterator[Tensor]:
    """Weights and buffers."""
    yield from stage.parameters()
    yield from stage.buffers()


BUCKET_BYTES: Final = 25 * 2**20


class MicroBatchTask(NamedTuple):
    """One microbatch as the loop sees it."""

    loss: Callable[[nn.Module], Tensor]
    """Calls the model on its samples; its share of the step's loss."""
    prepare: Callable[[int], object]
    """Sets the random generators as they are for a stage, given by its number."""


class Pipeline(Replicated):
    """The stages of one copy are the neighbouring ranks of `world.mesh()["model"]`."""

    sharded = True

    def __init__(self, world: World, *, schedule: str) -> None:
        self._world = world
        self._schedule = schedule
        self.counts = world.model_rank == world.model_parallel - 1
        """The last stage knows the loss."""
        self._answer: Callable[..., Any] = self._look
        self._groups: list[list[str]] | None = None

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Keep this rank's stage of the model only, in place; `blocks` is the chain of its parts,
        all of them.

        A call of the model is then collective over the stages. Raises `ConfigError` where the chain
        cannot be cut.
        """
        mesh, world = self._world.mesh(), self._world
        pieces = split_stages(model, blocks, world.model_parallel)
        own = pieces[world.model_rank]
        self._names = [name for name, _ in model.named_parameters()]
        keep(model, own, pieces)
        self.module, self.stage = model.to(world.device), own.to(world.device)
        self.copies = mesh["data"].get_group()
        self.stages = mesh["model"].get_group()
        self._line = StageRunner(own, self.stages, world.device)
        self._weights = [weight for weight in own.parameters() if weight.requires_grad]
        model.forward = lambda *inputs: self._answer(*inputs)
        return model

    def _look(self, *inputs: Any) -> Any:
        """A forward pass without gradients, the same output on every stage: what an evaluation
        calls.
        """
        return self._line.look(inputs)

    def learn(
        self, tasks: Sequence[MicroBatchTask], precision: Precision, watch: StageHooks
    ) -> Tensor:
        """Forward and backward over all microbatches; the gradients' mean over the copies is left,
        and the loss returned.

        The loss is this copy's share of the step's on the last stage, 0 on the others. Collective.
        Raises `ConfigError` for a loss that does not call the model once, and what the user's code
        raises.
        """
        shares: list[Tensor] = []
        for group in self._alike([self._microbatch(task, precision, shares) for task in tasks]):
            self._line.train(self._schedule, group, precision.autocast, watch)
        self._average()
        watch.waited()
        nothing = torch.zeros((), device=self._world.device)
        precision.scaled(nothing)  # so that stages without a loss have a scale too
        return torch.stack(shares).sum() if shares else nothing

    def _microbatch(
        self, task: MicroBatchTask, precision: Precision, shares: list[Tensor]
    ) -> Microbatch:
        task.prepare(0)
        with precision.autocast():
            inputs = self._inputs(task)

        def loss(output: Any) -> Tensor:
            with self._answering(lambda *_: output), precision.autocast():
                share = task.loss(self.module)
            shares.append(share.detach())
            return precision.scaled(share)

        return Microbatch(inputs, loss, lambda: task.prepare(self._line.index))

    def _inputs(self, task: MicroBatchTask) -> Tensors:
        """What the loss calls the model with."""

        def interrupt(*inputs: Any) -> Any:
            raise _Called(inputs)

        with self._answering(interrupt):
            try:
                task.loss(self.module)
            except _Called as call:
                if call.inputs and all(isinstance(one, Tensor) and one.ndim for one in call.inputs):
                    return call.inputs
                raise ConfigError(
                    "train.strategy: a pipeline needs a loss that calls the model with "
                    "tensors, the samples side by side in each"
                ) from None
        raise ConfigError("train.strategy: a pipeline needs a loss that calls the model")

    @contextmanager
    def _answering(self, answer: Callable[..., Any]) -> Iterator[None]:
        """A block in which calls of the model are answered so."""
        before, self._answer = self._answer, answer
        try:
            yield
        finally:
            self._answer = before

    @staticmethod
    def _alike(microbatches: Sequence[Microbatch]) -> list[list[Microbatch]]:
        """Those whose inputs have the same shape together: a pipeline's stages know what comes
        before it does.
        """
        groups: dict[Any, list[Microbatch]] = {}
        for one in microbatches:
            groups.setdefault(shapes(one.inputs), []).append(one)
        return list(groups.values())

    def _average(self) -> None:
        """The mean of the gradients over the copies of this stage, in buckets."""
        if self._world.data_size == 1:
            return
        share = 1 / self._world.data_size
        for weight in self._weights:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        for bucket in buckets([weight.grad for weight in self._weights if weight.grad is not None]):
            flat = torch.cat([one.reshape(-1) for one in bucket]).mul_(share)
            dist.all_reduce(flat, group=self.copies)
            for one, mean in zip(
                bucket, torch.split(flat, [one.numel() for one in bucket]), strict=True
            ):
                one.copy_(mean.view_as(one))

    def no_sync(self) -> AbstractContextManager[None]:
        """`learn` adds up by itself."""
        return nullcontext()

    def tensors(self, optimizer: Optimizer) -> dict[str, Any]:
        """This stage's part of model and optimizer by full names; the optimizer's groups name the
        weights of all stages.
        """
        own = super().tensors(optimizer)
        groups = own["optimizer"]["param_groups"]
        if self._groups is None:
            self._groups = self._whole_groups([group["params"] for group in groups])
        own["optimizer"]["param_groups"] = [
            {**group, "params": names} for group, names in zip(groups, self._groups, strict=True)
        ]
        return own

    def _whole_groups(self, own: list[list[str]]) -> list[list[str]]:
        """The names in each of the optimizer's groups, over all stages, in the model's order."""
        parts: list[Any] = [None] * self.stages.size()
        dist.all_gather_object(parts, own, group=self.stages)
        place = {name: number for number, name in enumerate(self._names)}
        return [
            sorted({name for part in same for name in part}, key=place.__getitem__)
            for same in zip(*parts, strict=True)
        ]

    def put(self, tensors: dict[str, Any], optimizer: Optimizer) -> None:
        """Load this stage's values back into module and optimizer."""
        own = {name for name, _ in self.module.named_parameters()}
        whole = tensors["optimizer"]
        groups = [
            {**group, "params": [one for one in group["params"] if one in own]}
            for group in whole["param_groups"]
        ]
        state = {"state": whole["state"], "param_groups": groups}
        set_state_dict(
            self.module, optimizer, model_state_dict=tensors["model"], optim_state_dict=state
        )

    def weights(self) -> dict[str, Any]:
        """The whole model on rank 0, nothing on the others."""
        parts: list[Any] = [None] * self.stages.size()
        first = dist.get_global_rank(self.stages, 0)
        if self._world.data_rank:
            return {}
        dist.gather_object(
            super().weights(),
            parts if self._world.rank == first else None,
            dst=first,
            group=self.stages,
        )
        return {name: value for part in parts if part for name, value in part.items()}


class _Called(BaseException):
    """The loss has called the model. No `Exception`, which the user's code might handle."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.inputs = inputs


def buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one type, about `BUCKET_BYTES` together."""
    bucket: list[Tensor] = []
    for one in gradients:
        if bucket and (
            one.dtype != bucket[0].dtype
            or sum(other.nbytes for other in bucket) + one.nbytes > BUCKET_BYTES
        ):
            yield bucket
            bucket = []
        bucket.append(one)
    if bucket:
        yield bucket
