"""Whoever listens is told of every collective on its way, gets its handle, and leaves no trace when
he goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.nn.parallel import DistributedDataParallel

from kdist_trainer.instrumentation import collective_hooks
from kdist_trainer.instrumentation.collective_hooks import Follow
from kdist_trainer.world import World
from tests.trainer.training.group import run_group


class Witness:
    """Writes down what it is told; follows to the end what it is asked to."""

    def __init__(self, name: str, lines: list[str], *, follows: bool = False) -> None:
        self._name = name
        self._lines = lines
        self._follows = follows

    def begin(self, op: str, tensors: Sequence[Tensor], group: ProcessGroup) -> Follow | None:
        """Note the call."""
        self._lines.append(
            f"{self._name}: {op} of {[tensor.numel() for tensor in tensors]} among {group.size()}"
        )
        return self._follow if self._follows else None

    def _follow(self, work: Work) -> None:
        work.wait()
        self._lines.append(f"{self._name}: done")


def listen_and_leave() -> dict[str, Any]:
    with World.from_environment(timeout_seconds=60):
        lines: list[str] = []
        early, late = Witness("early", lines), Witness("late", lines, follows=True)
        collective_hooks.listen(early)
        collective_hooks.listen(late)
        told = {"listeners": collective_hooks.listeners() == (early, late)}
        dist.all_reduce(torch.ones(3))
        both = lines[:]
        collective_hooks.ignore(late)
        collective_hooks.ignore(late)
        dist.barrier()
        collective_hooks.ignore(early)
        silent = len(lines)
        x = torch.ones(2)
        dist.all_reduce(x)
        return told | {
            "both": both,
            "one": lines[len(both) : silent],
            "none": lines[silent:],
            "sum": x.tolist(),
        }


@pytest.mark.processes
def test_listeners_are_told_the_last_first_and_of_nothing_once_they_are_gone() -> None:
    for told in run_group(listen_and_leave, 2):
        assert told["listeners"]
        assert told["both"] == [
            "late: all_reduce of [3] among 2",
            "early: all_reduce of [3] among 2",
            "late: done",
        ]
        assert told["one"] == ["early: barrier of [] among 2"]
        assert told["none"] == []
        assert told["sum"] == [2.0, 2.0]


def average_with_and_without() -> list[list[float]]:
    """Gradients of two models with the same weights, one trained under a listener."""
    found = []
    with World.from_environment(timeout_seconds=60) as world:
        for listener in (None, Witness("one", [], follows=True)):
            if listener is not None:
                collective_hooks.listen(listener)
            torch.manual_seed(0)
            model = DistributedDataParallel(nn.Linear(5, 3))
            torch.manual_seed(world.rank)
            model(torch.randn(7, 5)).square().sum().backward()
            grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
            found.append([float(value) for grad in grads for value in grad.flatten()])
    return found


@pytest.mark.processes
def test_a_listener_changes_no_bit_of_what_ddp_averages() -> None:
    for without, under in run_group(average_with_and_without, 3):
        assert without == under
