"""Launch hooks are called for every collective, get its handle, and leave no trace when they go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work
from torch.nn.parallel import DistributedDataParallel

from kdist_trainer.distributed import group_abort
from kdist_trainer.distributed.world import World
from kdist_trainer.instrumentation import collective_hooks
from kdist_trainer.instrumentation.collective_hooks import PostHook
from kdist_trainer.instrumentation.step_timer import GlooAllReduceTimer
from kdist_trainer.instrumentation.torch_internals import count_bytes
from kdist_trainer.metrics.rank_metrics import StepStats
from tests.trainer.training.group import run_group


class Hook:
    """Records its calls; with `follows`, also the end of each collective."""

    def __init__(self, name: str, lines: list[str], *, follows: bool = False) -> None:
        self._name = name
        self._lines = lines
        self._follows = follows

    def begin(self, op: str, tensors: Sequence[Tensor], group: ProcessGroup) -> PostHook | None:
        """Record the call."""
        self._lines.append(
            f"{self._name}: {op} of {[tensor.numel() for tensor in tensors]} among {group.size()}"
        )
        return self._follow if self._follows else None

    def _follow(self, work: Work | None) -> None:
        assert work is not None, "gloo gives a handle"
        work.wait()
        self._lines.append(f"{self._name}: done")


def listen_and_leave() -> dict[str, Any]:
    with World.from_environment(timeout_seconds=60):
        lines: list[str] = []
        early, late = Hook("early", lines), Hook("late", lines, follows=True)
        collective_hooks.register_launch_hook(early)
        collective_hooks.register_launch_hook(late)
        found = {"hooks": collective_hooks.launch_hooks == [late, early]}
        dist.all_reduce(torch.ones(3))
        both = lines[:]
        lines.clear()
        direct, group = torch.ones(3), dist.group.WORLD
        assert group is not None
        collective_hooks.all_reduce(direct, group).wait()
        found |= {"direct": lines == both and direct.tolist() == [2.0, 2.0, 2.0]}
        collective_hooks.unregister_launch_hook(late)
        collective_hooks.unregister_launch_hook(late)
        dist.barrier()
        collective_hooks.unregister_launch_hook(early)
        silent = len(lines)
        x = torch.ones(2)
        dist.all_reduce(x)
        return found | {
            "both": both,
            "one": lines[len(both) : silent],
            "none": lines[silent:],
            "sum": x.tolist(),
        }


@pytest.mark.processes
def test_hooks_are_called_last_first_and_never_once_they_are_unregistered() -> None:
    for found in run_group(listen_and_leave, 2):
        assert found["hooks"]
        assert found["direct"]
        assert found["both"] == [
            "late: all_reduce of [3] among 2",
            "early: all_reduce of [3] among 2",
            "late: done",
        ]
        assert found["one"] == ["early: barrier of [] among 2"]
        assert found["none"] == []
        assert found["sum"] == [2.0, 2.0]


def average_with_and_without() -> list[list[float]]:
    """Gradients of two models with the same weights, one trained under a hook."""
    found = []
    with World.from_environment(timeout_seconds=60) as world:
        for hook in (None, Hook("one", [], follows=True)):
            if hook is not None:
                collective_hooks.register_launch_hook(hook)
            torch.manual_seed(0)
            model = DistributedDataParallel(nn.Linear(5, 3))
            torch.manual_seed(world.rank)
            model(torch.randn(7, 5)).square().sum().backward()
            grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
            found.append([float(value) for grad in grads for value in grad.flatten()])
    return found


@pytest.mark.processes
def test_a_hook_changes_no_bit_of_what_ddp_averages() -> None:
    for without, under in run_group(average_with_and_without, 3):
        assert without == under


class PlainWait:
    """Waits as if it were not there."""

    def wait(self, wait: Callable[[], Any], _: Work | Tensor) -> Any:
        return wait()


def wait_for_a_late_peer() -> list[float]:
    """What this rank has got from its peer, which comes later than waits are interrupted."""
    group_abort.enable()
    collective_hooks.register_wait_hook(PlainWait())
    with World.from_environment(timeout_seconds=60) as world:
        peer, found = 1 - world.rank, torch.zeros(1)
        late = threading.Event()
        for sender in (0, 1):
            if world.rank == sender:
                late.wait(0.3)
                dist.send(torch.ones(1), peer)
            else:
                dist.recv(found, peer)
        got = [float(found)]
        for source in (None, peer):
            if world.rank == 1:
                late.wait(0.3)
                dist.send(torch.full((1,), 2.0), peer)
            else:
                dist.recv(found, source)
        total = torch.ones(1)
        if world.rank == 1:
            late.wait(0.3)
        work = dist.all_reduce(total, async_op=True)
        assert work is not None
        work.wait()
        return [*got, float(found), float(total)]


@pytest.mark.processes
def test_a_wait_for_a_late_peer_ends_with_its_message_and_closes_no_connection() -> None:
    assert run_group(wait_for_a_late_peer, 2) == [[1.0, 2.0, 2.0], [1.0, 1.0, 2.0]]


class Broken:
    """Fails in each of its calls, or only after what it observes."""

    def __init__(self, *, late: bool) -> None:
        self._late = late

    def begin(self, op: str, tensors: Sequence[Tensor], group: ProcessGroup) -> PostHook | None:  # noqa: ARG002
        if self._late:
            return self._fail
        raise ValueError("a tensor has no size")

    def wait(self, wait: Callable[[], Any], awaited: Work | Tensor) -> Any:  # noqa: ARG002
        if self._late:
            wait()
        raise ValueError("nothing to wait for")

    def _fail(self, work: Work | None) -> None:  # noqa: ARG002
        raise ValueError("too late")


def train_sparse_under_observers() -> list[float]:
    """The sum of sparse gradients, under hooks that fail and one that counts bytes."""
    stats = StepStats(rank=0)
    with World.from_environment(timeout_seconds=60) as world:
        timer = GlooAllReduceTimer(stats)
        for late in (False, True):
            collective_hooks.register_launch_hook(Broken(late=late))
            collective_hooks.register_wait_hook(Broken(late=late))
        timer.start()
        model = DistributedDataParallel(nn.Embedding(10, 2, sparse=True))
        model(torch.tensor([world.rank, 3])).sum().backward()
        (weight,) = model.parameters()
        assert weight.grad is not None
        found = weight.grad.to_dense()[:, 0].tolist()
        return [float(value) for value in found]


@pytest.mark.processes
def test_observers_that_fail_end_no_training_also_not_one_with_sparse_gradients() -> None:
    for found in run_group(train_sparse_under_observers, 2):
        assert found == [0.5, 0.5, 0, 1.0, 0, 0, 0, 0, 0, 0]


def test_a_sparse_tensor_has_the_bytes_of_its_indices_and_values() -> None:
    sparse = torch.eye(3).to_sparse()
    assert count_bytes([sparse]) == 2 * 3 * 8 + 3 * 4
    assert count_bytes([torch.ones(3), torch.ones(2)]) == 20
