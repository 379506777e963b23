"""A process group that was left broken ends its waits, and goes once nothing waits in it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kdist_trainer.distributed import group_abort, left_groups
from kdist_trainer.distributed.checkpoint_group import CheckpointGroup
from kdist_trainer.distributed.left_groups import LeftGroup, left
from kdist_trainer.distributed.world import World, abandon
from kdist_trainer.errors import PeersLostError
from kdist_trainer.instrumentation.collective_hooks import PostHook, register_launch_hook
from kdist_trainer.parallel.ddp import all_reduce_abortably
from kdist_trainer.processes import threads
from kdist_trainer.torch_internals import GLOO_WORKER, all_groups
from kdist_trainer.worker import forget_frames
from tests.trainer.training.group import run_group

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what threads do"),
]
LONG = timedelta(hours=1)
PATIENCE_SECONDS = 60.0


def wait_until(condition: Callable[[], bool]) -> bool:
    """Whether the condition holds in time."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def workers() -> int:
    return len(threads.select_named(threads.thread_ids(), GLOO_WORKER))


def join() -> tuple[World, CheckpointGroup]:
    group_abort.enable()
    world = World.from_environment(timeout_seconds=LONG.total_seconds())
    own = CheckpointGroup(world)
    world.barrier()  # a rank that left would close connections which others still open
    return world, own


def take(timeout: timedelta = LONG) -> list[LeftGroup]:
    return [LeftGroup(one, group_abort.describe(one), timeout) for one in all_groups()]


def wait_in_vain(folder: Path) -> tuple[list[bool], list[bool], list[bool]]:
    """Whether the groups of rank 0 can go: before anything waits in them, while collectives wait
    for a rank that is there and takes no part, and after they were told to end.
    """
    world, own = join()
    if world.rank == 1:
        assert wait_until((folder / "done").exists)
        return [], [], []
    groups = take()
    assert wait_until(lambda: workers() == 4)
    assert wait_until(lambda: all(one.can_be_destroyed() for one in groups)), (
        "its threads may just start"
    )
    before = [one.can_be_destroyed() for one in groups]
    works = [
        dist.all_reduce(torch.ones(8), group=one, async_op=True)
        for one in (None, own.process_group)
    ]
    assert wait_until(lambda: not any(one.can_be_destroyed() for one in groups))
    waiting = [one.can_be_destroyed() for one in groups]
    for one in groups:
        one.close_connections()
    assert wait_until(lambda: all(work.is_completed() for work in works)), "within an hour"
    assert not any(work.is_success() for work in works)
    assert wait_until(lambda: all(one.can_be_destroyed() for one in groups))
    after = [one.can_be_destroyed() for one in groups]
    (folder / "done").touch()
    return before, waiting, after


def thread_names() -> set[str]:
    return {one.name for one in threading.enumerate()}


def leave() -> int:
    """The threads of gloo that are left of groups in which collectives waited."""
    world, own = join()
    if world.rank == 0:
        dist.all_reduce(torch.ones(8), async_op=True)
        dist.all_reduce(torch.ones(8), group=own.process_group, async_op=True)
    # what refers to the groups is in a cycle, as a training is
    cycle: list[object] = [dist.group.WORLD, own]
    cycle.append(cycle)
    del cycle, own
    abandon(LONG)
    assert wait_until(lambda: not left.count())
    assert wait_until(lambda: not workers()), "gloo's threads end with their groups"
    assert wait_until(lambda: "kdist-left-groups" not in thread_names()), "it is not needed"
    return workers()


class Patience:
    """An observer that lets a collective end before its launch returns, as a slow one may."""

    def begin(self, op: str, tensors: Sequence[torch.Tensor], group: object) -> PostHook:  # noqa: ARG002 - as hooks are called
        """See `LaunchHook`."""
        return lambda work: wait_until(lambda: work is None or work.is_completed())


def break_in_backward() -> int:
    """The threads of gloo that are left of a group that broke before a bucket of gradients was
    sent.
    """
    world, own = join()
    model = nn.Linear(4, 4)
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(world.size, lambda size, bucket: all_reduce_abortably(size, bucket))
    for _ in range(3):  # in the second, DDP lays its buckets again, by collectives of its own
        wrapped(torch.ones(1, 4)).sum().backward()
    del own
    if world.rank == 1:
        group_abort.abort()
    else:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(8))  # so that gloo knows it before the bucket comes
        register_launch_hook(Patience())
        with pytest.raises((RuntimeError, PeersLostError)) as caught:
            wrapped(torch.ones(1, 4)).sum().backward()
        forget_frames(caught.value)
        del caught
    del wrapped, model
    abandon(LONG)
    assert wait_until(lambda: not left.count())
    wait_until(lambda: not workers())
    return workers()


def know_nothing() -> tuple[bool, bool, int]:
    """Whether a group can go of which nothing is known: at first, and after its time-out."""
    join()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(left_groups, "wait_together", lambda _: False)  # as in a sandbox
        early = take()[0]
        is_free = early.can_be_destroyed()
        left.add([early])
        patch.setattr(left_groups, "_MARGIN_SECONDS", -LONG.total_seconds())
        late = LeftGroup(all_groups()[0], None, LONG)
        return is_free, late.can_be_destroyed(), left.count()


def test_waits_end_when_their_group_is_left_and_then_it_can_go(tmp_path: Path) -> None:
    before, waiting, after = run_group(wait_in_vain, 2, tmp_path)[0]
    assert (before, waiting, after) == ([True] * 2, [False] * 2, [True] * 2)


@pytest.mark.sampled
def test_a_group_that_was_left_leaves_no_thread_behind() -> None:
    assert run_group(leave, 2) == [0, 0]


def test_a_group_that_broke_in_a_backward_pass_is_held_by_nobody() -> None:
    assert run_group(break_in_backward, 2) == [0, 0]


def test_where_the_system_tells_nothing_a_group_is_kept_for_longer_than_its_timeout() -> None:
    for early, late, count in run_group(know_nothing, 2):
        assert (early, late, count) == (False, True, 1)


def test_only_threads_that_wait_at_one_place_without_a_timeout_have_no_work() -> None:
    events = [threading.Event() for _ in range(2)]
    started = [threading.Thread(target=event.wait) for event in events]
    patient = threading.Thread(target=events[0].wait, args=(LONG.total_seconds(),))
    started.append(patient)
    for thread in started:
        thread.start()
    try:
        ids = [thread.native_id or 0 for thread in started]
        assert wait_until(lambda: threads.wait_together(ids[:1] * 2))
        assert not threads.wait_together(ids[:2]), "each waits for another event"
        assert not threads.wait_together(ids[:1]), "one alone may wait for anything"
        assert not threads.wait_together([]), "nothing is known"
        assert not threads.wait_together(ids[2:] * 2), "it waits for a while only"
    finally:
        for event in events:
            event.set()
