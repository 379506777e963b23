"""Leaving the group of ranks: nothing of it can hold up the end of a rank."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import io
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.nn.parallel import DistributedDataParallel

from kdist_trainer.config import Cause
from kdist_trainer.distributed import group_abort
from kdist_trainer.distributed import world as world_module
from kdist_trainer.distributed.checkpoint_group import CheckpointGroup
from kdist_trainer.distributed.world import World, abandon, wait_for_ranks
from kdist_trainer.errors import PeersLostError, classify
from kdist_trainer.instrumentation import collective_hooks
from kdist_trainer.processes.liveness import Heartbeat
from kdist_trainer.torch_internals import HashStore
from tests.trainer.training.group import RankFailed, run_group

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the names of threads"),
]


def count_threads_of_gloo() -> int:
    """Threads that work off collectives; who destroys their group joins them."""
    return sum(
        task.read_text().startswith("pt_gloo_runloop")
        for task in Path("/proc/self/task").glob("*/comm")
    )


def train_and_leave() -> tuple[int, int]:
    with World.from_environment(timeout_seconds=60):
        model = DistributedDataParallel(nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
        before = count_threads_of_gloo()
    del model
    gc.collect()
    return before, count_threads_of_gloo()


def join_after_a_group_that_was_not_formed() -> int:
    if os.environ["RANK"] == "0":
        store = PrefixStore("not formed", HashStore())
        with pytest.raises(dist.DistError):
            dist.init_process_group(
                "gloo", rank=0, world_size=2, store=store, timeout=timedelta(seconds=0.1)
            )
        abandon(timedelta(seconds=1))
    with World.from_environment(timeout_seconds=20) as world:
        return len(world.all_gather_object(None))


def leave_while_rank_0_is_not_there() -> float:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        os.environ |= {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": str(unused.getsockname()[1])}
    began = time.monotonic()
    threading.Timer(0.2, group_abort.abort).start()
    with pytest.raises(PeersLostError):
        World.from_environment(timeout_seconds=60)
    abandon(timedelta(seconds=1))
    return time.monotonic() - began


def leave_while_rank_0_hangs_up() -> float:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            with contextlib.suppress(OSError):  # the test has ended
                while True:
                    server.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        os.environ |= {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": str(server.getsockname()[1])}
        began = time.monotonic()
        threading.Timer(0.2, group_abort.abort).start()
        with pytest.raises(PeersLostError):
            World.from_environment(timeout_seconds=60)
        server.shutdown(socket.SHUT_RDWR)
    abandon(timedelta(seconds=1))
    return time.monotonic() - began


class StoreOfADyingRank(Store):
    """The store as a rank uses it that is killed once it has told the others its address."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        return self._store.compare_set(key, expected, wanted)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        if not keys[0].startswith("kdist/"):  # the address of another rank
            os.kill(os.getpid(), signal.SIGKILL)
        self._store.wait(keys, *timeout)


def join_with_a_rank_that_dies(folder: Path) -> None:
    group_abort.enable()
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            lock = (folder / "lock").open("w")
            fcntl.flock(lock, fcntl.LOCK_EX)
            open_store = World._open_store
            patch.setattr(
                World, "_open_store", lambda *given: StoreOfADyingRank(open_store(*given))
            )
            World.from_environment(timeout_seconds=60)

        def wait_until_it_has_died(*given: Any) -> None:
            wait_for_ranks(*given)
            with (folder / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)

        patch.setattr(world_module, "wait_for_ranks", wait_until_it_has_died)
        patch.setattr(group_abort, "_CONNECT_TIMEOUT", timedelta(seconds=0.2))
        began = time.monotonic()
        with pytest.raises(RuntimeError) as raised:
            World.from_environment(timeout_seconds=60)
    seconds, cause = time.monotonic() - began, classify(raised.value)[0]
    abandon(timedelta(seconds=1))
    os.environ["WORLD_SIZE"] = "1"
    with World.from_environment(timeout_seconds=60) as world:
        told = f"{cause} {seconds:.1f} {world.all_gather_object(None)}"
    (folder / "told").write_text(told)


def communicate_late() -> None:
    group_abort.enable()
    limit = timedelta(seconds=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_abort, "_CONNECT_TIMEOUT", limit)
        with World.from_environment(timeout_seconds=60) as world:
            own = CheckpointGroup(world).process_group
            for group in (dist.group.WORLD, own):
                if world.rank == 0:
                    time.sleep(1.5 * limit.total_seconds())
                dist.all_reduce(torch.ones(1), group=group)


def leave_as_a_script_does(folder: Path) -> tuple[int, int]:
    heartbeat = Heartbeat.create(folder / f"beat-{os.environ['RANK']}")
    collective_hooks.install_recorder(heartbeat)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    before = count_threads_of_gloo()
    dist.barrier()
    dist.destroy_process_group()
    del model
    gc.collect()
    return before, count_threads_of_gloo()


def print_own(*_: object) -> None:
    """A hook of the user's code."""
    sys.stderr.write("own\n")


def print_errors() -> list[str]:
    """How a rank prints its last error: in its third group, and in the next two, after the user's
    code has put a hook of its own in place.
    """
    printed = []
    for number in range(5):
        World.from_environment(timeout_seconds=60)
        with contextlib.redirect_stderr(io.StringIO()) as text:
            sys.excepthook(ValueError, ValueError("why"), None)
        printed.append(text.getvalue())
        if number == 2:
            sys.excepthook = print_own
        abandon(timedelta(seconds=60))
    return printed[2:]


def test_an_error_is_printed_once_with_its_rank_however_many_groups_there_were() -> None:
    (printed,) = run_group(print_errors, 1)
    assert printed == ["[rank0]: ValueError: why\n", *["[rank0]: own\n"] * 2]


def test_a_model_that_is_let_go_after_the_group_does_not_join_its_threads() -> None:
    for before, after in run_group(train_and_leave, 2):
        assert after >= before > 0, "a thread has its name a moment after its start"


def test_a_rank_joins_its_next_group_after_one_that_was_not_formed() -> None:
    assert run_group(join_after_a_group_that_was_not_formed, 2) == [2, 2]


def test_a_rank_leaves_a_group_whose_rank_0_never_comes() -> None:
    (seconds,) = run_group(leave_while_rank_0_is_not_there, 1)
    assert seconds < 30, "torch waits for the whole timeout"


def test_a_rank_leaves_a_group_whose_rank_0_is_lost_while_it_connects() -> None:
    (seconds,) = run_group(leave_while_rank_0_hangs_up, 1)
    assert seconds < 30, "torch connects again and again for the whole timeout"


def test_a_rank_that_died_after_it_arrived_is_noticed_before_connections_are_opened() -> None:
    store = HashStore()
    store.add("kdist/arrived", 1)
    with pytest.raises(dist.DistError):
        wait_for_ranks(store, 2, timedelta(seconds=0.2))
    with ThreadPoolExecutor(3) as pool:
        shared, timeout = HashStore(), timedelta(seconds=20)
        ranks = [pool.submit(wait_for_ranks, shared, 3, timeout) for _ in range(3)]
        assert [each.result() for each in ranks] == [None, None, None]


@pytest.mark.sampled
def test_a_rank_does_not_wait_long_for_the_connection_of_one_that_has_died(tmp_path: Path) -> None:
    # gloo decides which of two ranks connects to the other, and a dead one refuses at once.
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        with pytest.raises(RankFailed, match="rank 1 ended without a result: exit code -9"):
            run_group(join_with_a_rank_that_dies, 2, folder)
        cause, seconds, values = (folder / "told").read_text().split()
        assert cause == Cause.NODE_LOST
        assert float(seconds) < 60, "gloo waits for five times the timeout"
        assert values == "[None]", "it is ready for its next group"


def test_only_connections_get_a_short_timeout() -> None:
    assert run_group(communicate_late, 2) == [None, None]


def test_a_scripts_model_does_not_either_where_its_collectives_are_noted(tmp_path: Path) -> None:
    for before, after in run_group(leave_as_a_script_does, 2, tmp_path):
        assert after >= before > 0, "a thread has its name a moment after its start"
