"""Buffers: after a step they are the first copy's on every rank, for one broadcast, or none where
nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from kdist_trainer.distributed.world import World
from kdist_trainer.instrumentation import collective_hooks
from kdist_trainer.parallel.buffers import Buffers
from tests.trainer.training.group import run_group

pytestmark = pytest.mark.processes
KINDS = (
    torch.float32,
    torch.bool,
    torch.int64,
    torch.bfloat16,
    torch.complex64,
    torch.uint8,
    torch.float64,
)


class Odd(nn.Module):
    """Buffers of all kinds: each training pass draws them again, except for a mask."""

    def __init__(self) -> None:
        super().__init__()
        for number, kind in enumerate(KINDS):
            self.register_buffer(f"b{number}", torch.zeros(3, 2 * number + 1).to(kind).T)
        self.register_buffer("scalar", torch.tensor(0))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("replaced", torch.zeros(2), persistent=False)
        self.register_buffer("mask", torch.full((4,), -torch.inf))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, inputs: Tensor) -> Any:
        for number, kind in enumerate(KINDS):
            self.get_buffer(f"b{number}").copy_((torch.rand(2 * number + 1, 3) * 100).to(kind))
        self.get_buffer("scalar").add_(7)
        self.replaced = torch.rand(2)
        return self.norm(inputs)


class Sends:
    """Counts broadcasts."""

    count = 0

    def begin(self, op: str, tensors: Sequence[Tensor], group: Any) -> None:  # noqa: ARG002
        self.count += op == "broadcast"


def in_group(work: Callable[[int, Sends], Any]) -> Any:
    """What `work(rank, sends)` returns on a rank of a group."""
    with World.from_environment(timeout_seconds=60) as world:
        sends = Sends()
        collective_hooks.register_launch_hook(sends)
        torch.default_generator.manual_seed(world.rank)
        return work(world.rank, sends)


def values(module: nn.Module) -> list[bytes]:
    """Each buffer's bytes."""
    return [
        bytes(one.reshape(-1).contiguous().view(torch.uint8).numpy().data)
        for _, one in sorted(module.named_buffers())
    ]


def agree_on_all_kinds() -> Any:
    """Whether the warm-up left no trace; buffers before and after ranks agreed, by how many
    broadcasts, and put back.
    """

    def work(rank: int, sends: Sends) -> Any:
        module = Odd()
        buffers = Buffers(module, dist.group.WORLD, keep_previous=True)
        before = values(module)
        with buffers.detect_changes():
            module(torch.randn(5, 4))
        restored = values(module) == before
        module(torch.randn(5, 4))
        sends.count, own = 0, values(module)
        assert buffers.synchronize() == (dist.get_world_size() > 1)
        agreed, count = values(module), sends.count
        buffers.accept()
        module(torch.full((5, 4), torch.nan))
        buffers.restore()
        return restored, own, agreed, count, values(module)

    return in_group(work)


def test_buffers_of_all_kinds_become_those_of_rank_0_in_one_broadcast() -> None:
    first, second, third = run_group(agree_on_all_kinds, 3)
    assert first[0]
    assert second[1] != first[1] != third[1]
    assert first[1] == first[2] == second[2] == third[2]
    assert [one[3] for one in (first, second, third)] == [1, 1, 1]
    assert first[4] == second[4] == third[4] == first[2], (
        "a step that was left out leaves none of its own"
    )


def test_a_rank_alone_has_its_buffers_back_and_sends_nothing() -> None:
    ((restored, own, agreed, count, back),) = run_group(agree_on_all_kinds, 1)
    assert restored
    assert own == agreed == back
    assert count == 0


class Tardy(nn.Module):
    """A table that training leaves alone, until it is told to change it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(4))
        self.register_buffer("count", torch.zeros(2))
        self.linear = nn.Linear(2, 2)


def agree_late() -> Any:
    """Whether anything was sent, by how many broadcasts; buffers after a late change; whether they
    are sent by now, and which.
    """

    def work(rank: int, sends: Sends) -> Any:
        module = Tardy()
        module.get_buffer("table").fill_(rank)  # as another kind of machine may compute it
        buffers = Buffers(module, dist.group.WORLD)
        with buffers.detect_changes():
            module.linear(torch.ones(2))
        buffers.track_constants()
        sends.count = 0
        sent, before = buffers.synchronize(), sends.count
        if rank == 1:
            module.get_buffer("count").add_(1)
        buffers.synchronize_late()
        return sent, before, values(module), buffers.synchronize(), buffers.state_dict()["known"]

    return in_group(work)


def test_constants_are_not_sent_until_one_changes_on_some_rank_before_a_save() -> None:
    first, second = run_group(agree_late, 2)
    assert first[:2] == second[:2] == (False, 0)
    assert first[2] == second[2], "what rank 1 changed is rank 0's again"
    assert first[3:] == second[3:] == (True, ["count"])
