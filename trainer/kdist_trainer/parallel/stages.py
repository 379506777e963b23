"""Cutting a model into a pipeline's stages: which of its parts each rank computes, and holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from kdist_trainer.failure import ConfigProblem


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


def cut(model: nn.Module, chain: Sequence[nn.Module], stages: int) -> list[Stage]:
    """The chain in `stages` pieces of about equal numbers of weights, each with a weight of its own.

    Raises `ConfigProblem` where the chain is too short, leaves weights out, or uses one weight in two stages.
    """
    loads = [sum(weight.numel() for weight in part.parameters()) for part in chain]
    able = sum(load > 0 for load in loads)
    if able < stages:
        raise ConfigProblem(
            f"train.strategy: the model's chain has {able} parts with weights, which cannot make {stages} stages: "
            "set a smaller modelParallel, or let Workload.chain name smaller parts"
            if chain
            else "train.strategy: pipeline needs a model that is an nn.Sequential, or a workload whose `chain` names its parts"
        )
    pieces = [Stage(chain[first:last]) for first, last in pairwise(borders(loads, stages))]
    check(model, pieces)
    return pieces


def borders(loads: Sequence[int], stages: int) -> list[int]:
    """Where to cut so that the heaviest stage is as light as can be and no stage weighs nothing: [0, …, len(loads)]."""
    sums = [0]
    for load in loads:
        sums.append(sums[-1] + load)
    nowhere = (math.inf, list[int]())
    best = [(0.0, [0]), *[nowhere] * len(loads)]  # the cuts that suit the parts up to each one, with so many stages
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
    """Each weight of the model belongs to one stage. Raises `ConfigProblem`."""
    homes: dict[int, set[int]] = {}
    for number, piece in enumerate(pieces):
        for weight in piece.parameters():
            homes.setdefault(id(weight), set()).add(number)
    for name, weight in model.named_parameters():
        stages = homes.get(id(weight), set())
        if not stages:
            raise ConfigProblem(f"train.strategy: {name} is in no part that Workload.chain names")
        if len(stages) > 1:
            raise ConfigProblem(f"train.strategy: {name} is used by two stages of the pipeline, which cannot share it")


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
