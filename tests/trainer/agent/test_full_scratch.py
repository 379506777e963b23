"""A scratch disk without room: what ranks have to say reaches their agent all the same, and nobody
calls it the user's fault.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kdist_trainer.config import Cause, Exit
from kdist_trainer.errors import DataError
from kdist_trainer.ipc import failure, result
from kdist_trainer.processes import preallocated
from tests.house.tree import ROOT
from tests.small_disk import fill, small_disk
from tests.trainer.agent.lab import Lab, kill

ENTER = (
    "from kdist_trainer.agent.worker_group import run_worker; "
    "run_worker('tests.trainer.agent.test_full_scratch:lack_data')"
)


def lack_data() -> None:
    """What a rank runs whose data is not there."""
    raise DataError("no data")


@pytest.fixture(name="disk")
def make_disk(tmp_path: Path) -> Iterator[Path]:
    yield from small_disk(tmp_path / "disk", mib=4)


def test_what_has_a_reserved_place_is_written_whole_on_a_full_disk_and_once(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDIST_SCRATCH", str(disk))
    for path in (failure.path_of(disk, 0), result.path_of(disk, 0)):
        preallocated.reserve(path)
        assert preallocated.read(path) == b""
    fill(disk)
    long = ValueError("é" * 3000)
    long.__cause__ = DeepError()
    failure.record(long)
    left = failure.read(disk, 0)
    assert left is not None
    assert left.message.startswith("ValueError: éé")
    assert left.traceback[-1].startswith("ValueError: éé")
    failure.record(KeyError("later"))
    assert failure.read(disk, 0) == left
    result.write_result(result.DONE, scratch=disk, local_rank=0)
    assert result.read_result(disk, 0) == result.DONE


class DeepError(Exception):
    """An error whose words fill the traceback."""

    def __str__(self) -> str:
        return "\n".join("ü" * 490 for _ in range(60))


@pytest.mark.sampled
def test_a_rank_whose_scratch_takes_nothing_ends_with_its_own_code(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "KDIST_SCRATCH": str(tmp_path / "gone"),
        "LOCAL_RANK": "0",
        "RANK": "0",
    }
    environment["KDIST_PARENT_PIPE"] = str(tmp_path / "parent-pipe")
    os.mkfifo(tmp_path / "parent-pipe")
    pipe = os.open(tmp_path / "parent-pipe", os.O_RDWR)
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", ENTER],
            cwd=ROOT,
            env=environment,
            stdout=full,
            stderr=full,
            timeout=60,
            check=False,
        )
    os.close(pipe)
    assert ended.returncode == Exit.DATA


@pytest.mark.sampled
@pytest.mark.processes
def test_a_lost_peer_is_no_failure_of_the_user_where_the_scratch_disk_is_full(
    disk: Path, tmp_path: Path
) -> None:
    with Lab(tmp_path, nodes={"min": 2, "max": 2}) as lab:
        (tmp_path / "node-0").symlink_to(disk)
        lab.start("node-0", "node-1")
        first = lab.stepping(1, world=2)
        ballast = fill(disk)
        (victim,) = (rank for rank in first.values() if rank["kdist_node"] == "node-1")
        kill(victim["pid"], signal.SIGKILL)
        assert lab.end("node-0") == 203, "its node can start no rank now; another try may find room"
        assert [one["cause"] for one in lab.ledger("failure")] == [Cause.SIGNAL]
        ballast.unlink()
        lab.start("node-0")
        lab.wait(
            lambda: len(lab.ranks(lab.ledger("generation")[-1]["generation"])) == 2,
            "another generation",
        )
        lab.tell("finish")
        assert [lab.end("node-0"), lab.end("node-1")] == [0, 0]
