"""A rank that raises, hangs, dies, or enters another collective than its peers: one record, in
time, that says who was where.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agent.lab import Lab

HANG_SECONDS = 6
BOUND_SECONDS = 60.0
"""Watchdog, comparison, the end of all ranks and agents, on a machine that others use too."""
SHOWN = {
    "all_reduce": "all_reduce(float32[{0}]) #4",
    "all_gather": "all_gather(float32[{0}]) #4",
    "broadcast": "broadcast(float32[{0}]) #4",
    "reduce_scatter": "reduce_scatter_single(float32[{0}]) #4",
    "barrier": "barrier #4",
}


def run(folder: Path, op: str, odd: str, *, nodes: int, procs: int) -> list[dict[str, Any]]:
    """The exit records of all agents of three ranks, of which rank 1 is `odd` in `op`."""
    job: dict[str, Any] = {
        "nodes": {"min": nodes, "max": nodes},
        "procsPerNode": procs,
        "maxRestarts": 0,
        "hangTimeoutSeconds": HANG_SECONDS,
    }
    with Lab(folder, entrypoint="disagree", **job) as lab:
        names = [f"node-{number}" for number in range(nodes)]
        lab.start(*names, LAB_OP=op, LAB_ODD=odd, LAB_TIMEOUT="120")
        for name in names:
            lab.wait(partial(lab.events, name, "rendezvous-completed"), "the group")
        began = time.monotonic()
        for name in names:
            lab.end(name)
        assert time.monotonic() - began < BOUND_SECONDS
        return [lab.record(name) for name in names]


def check(op: str, odd: str, record: dict[str, Any]) -> None:
    """One record: its cause, the odd rank, and what each rank was in."""
    peers, own = f"ranks 0,2 in {SHOWN[op].format(8192)}", SHOWN[op].format(12000)
    listed = record["collectives"]
    assert record["rank"] == 1, record
    if odd in ("shape", "op"):
        assert (record["cause"], record["code"]) == ("collective_mismatch", 70), record
        other = (
            own
            if odd == "shape"
            else "barrier #4"
            if op != "barrier"
            else SHOWN["all_reduce"].format(8192)
        )
        assert f"rank 1 {other}" in record["message"]
        assert f"ranks 0,2 {SHOWN[op].format(8192)}" in record["message"]
        assert listed
        return
    absent, *_ = [line for line in listed if line.startswith("rank 1 ")]
    assert absent == "rank 1 in no collective, after all_reduce(float32[4]) #3", record
    if op == "broadcast":  # who has sent or received its part is through, and waits in the next one
        through = "all_reduce(float32[4]) #5"
        assert all(
            line.endswith((SHOWN[op].format(8192), through)) for line in listed if line != absent
        ), record
    else:
        assert sorted(listed) == sorted([peers, absent]), record
    if odd == "raise":
        assert record["cause"] == "user_code"
        assert record["code"] == 70
        assert record["message"] == "ValueError: bad sample"
    else:
        assert (record["cause"], record["code"]) == ("budget", 75), (
            "another try could help, but the job allows none"
        )
        printed = {
            "hang": ("rank 1 hangs", "rank 1 did not enter"),
            "abort": ("SIGABRT",),
            "segfault": ("SIGSEGV",),
        }[odd]
        assert any(words in record["message"] for words in printed)
        assert odd == "hang" or "members.py" in record["place"]


@pytest.mark.processes
def test_a_wrong_shape_that_aborts_a_peer_in_cpp_is_reported_the_rank_that_sent_it(
    tmp_path: Path,
) -> None:
    (record,) = run(tmp_path, "all_reduce", "shape", nodes=1, procs=3)
    check("all_reduce", "shape", record)


@pytest.mark.processes
def test_agents_of_several_nodes_write_one_record_with_the_collectives_of_all_ranks(
    tmp_path: Path,
) -> None:
    records = run(tmp_path, "all_gather", "raise", nodes=3, procs=1)
    assert records[0] == records[1] == records[2]
    check("all_gather", "raise", records[0])


CELLS = [
    (op, odd)
    for op in SHOWN
    for odd in ("raise", "hang", "abort", "segfault", "op", "shape")
    if (op, odd) != ("barrier", "shape")
]
NARROW = {("broadcast", "shape"), ("all_reduce", "hang"), ("barrier", "op")}


@pytest.mark.sampled
@pytest.mark.chaos
@pytest.mark.parametrize(
    ("op", "odd"),
    [pytest.param(*cell, marks=[] if cell in NARROW else [pytest.mark.wide]) for cell in CELLS],
)
def test_whatever_a_rank_does_inside_a_collective_the_record_names_it(
    tmp_path: Path, op: str, odd: str
) -> None:
    (record,) = run(tmp_path, op, odd, nodes=1, procs=3)
    check(op, odd, record)


@pytest.mark.chaos
@pytest.mark.wide
@pytest.mark.parametrize("odd", ["shape", "op", "hang", "abort"])
def test_ranks_on_nodes_of_their_own_are_compared_through_the_store(
    tmp_path: Path, odd: str
) -> None:
    records = run(tmp_path, "all_reduce", odd, nodes=3, procs=1)
    assert records[0] == records[1] == records[2]
    check("all_reduce", odd, records[0])
