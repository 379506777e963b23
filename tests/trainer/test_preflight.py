"""The preflight on real ranks: what is fast enough trains; what is not is told with what was
measured, and who is slow.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from kdist_trainer import worker
from kdist_trainer.config import AllReduceCheck, count_bytes
from kdist_trainer.distributed.world import World
from kdist_trainer.errors import BandwidthError, classify
from tests.trainer.training.group import run_group


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1G", 10**9), ("64Mi", 64 << 20), ("500k", 500_000), ("2Ti", 2 << 40)]
)
def test_quantities_of_bytes_are_kubernetes(text: str, nbytes: int) -> None:
    assert count_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "0Mi", "1.5G", "10", "1 G", "-1G", "1Kib", "G"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of bytes"):
        count_bytes(text)


def check(demanded: str, slow: int | None) -> tuple[str, float]:
    """What the preflight raised on this rank, and when; rank `slow` takes its time with every
    message.
    """
    with World.from_environment(timeout_seconds=10) as world:

        def exchange(payload: torch.Tensor, other: int, first: bool) -> None:
            time.sleep(0.02 if slow in (world.rank, other) else 0)
            for sends in (first, not first):
                if sends:
                    dist.send(payload, other)
                else:
                    dist.recv(payload, other)

        wanted = AllReduceCheck(min_bus_bandwidth=demanded, size="256Ki")
        try:
            worker.check(wanted, world, node=f"node-{world.rank}", beat=int, exchange=exchange)
        except BandwidthError as error:
            reported, when = str(error), time.time()
            if world.rank == slow:
                # where a real rank would end: the others wait for it, and now say the same
                dist.barrier()
            return reported, when
        return "", time.time()


@pytest.mark.processes
def test_a_group_that_reaches_what_is_demanded_trains() -> None:
    assert [reported for reported, _ in run_group(check, 2, "1k", None)] == ["", ""]


@pytest.mark.sampled
@pytest.mark.processes
def test_a_group_that_does_not_is_reported_what_was_measured_and_the_slow_rank_says_it_first() -> (
    None
):
    found = run_group(check, 4, "900T", 2)
    message, first = found[2]
    assert message.startswith("an all-reduce of 256Ki among 4 ranks reaches a bus bandwidth of ")
    assert "minBusBandwidth demands 900T (9e+05 GB/s)" in message
    assert "slow is rank 2 on node-2" in message
    assert classify(BandwidthError(message)) == ("preflight", 64, True)
    assert all(reported == message and when >= first for reported, when in found)
