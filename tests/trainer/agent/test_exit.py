"""How agents end: one record for all, the exit code of the table, and never a moment later than
they must.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kdist_trainer.checkpoint.manifest import CheckpointDirectory
from kdist_trainer.config import Exit
from tests.patience import soon
from tests.trainer.agent.lab import Lab

pytestmark = pytest.mark.processes


def test_an_exception_of_the_user_ends_all_agents_with_the_same_record_and_no_second_try(
    tmp_path: Path,
) -> None:
    with Lab(tmp_path, nodes={"min": 2, "max": 2}) as lab:
        lab.start("node-0", "node-1")
        ranks = lab.stepping(1, world=2)
        lab.tell("raise-1")
        codes = [lab.end("node-0"), lab.end("node-1")]
        assert codes == [70, 70]
        record = lab.record("node-0")
        assert record == lab.record("node-1")
        assert record["cause"] == "user_code"
        assert record["rank"] == 1
        assert record["node"] == ranks[1]["kdist_node"]
        assert record["message"] == "ValueError: bad sample on rank 1"
        assert record["traceback"][-1] == "ValueError: bad sample on rank 1"
        assert record["step"] > 2
        assert not lab.events("node-0", "restarting") + lab.events("node-1", "restarting")
        assert [one["cause"] for one in lab.ledger("failure")] == ["user_code"]
        assert [one["code"] for one in lab.ledger("failed")] == [70]


def test_a_rank_that_leaves_with_code_0_and_no_result_has_failed(tmp_path: Path) -> None:
    with Lab(tmp_path, nodes={"min": 2, "max": 2}) as lab:
        lab.start("node-0", "node-1")
        lab.stepping(1, world=2)
        lab.tell("leave-0")
        assert [lab.end("node-0"), lab.end("node-1")] == [70, 70]
        record = lab.record("node-1")
        assert (record["cause"], record["rank"]) == ("user_code", 0)
        assert record["message"].startswith("rank 0 exited with code 0 before its training")


def test_the_end_of_another_run_in_the_same_folder_means_nothing(tmp_path: Path) -> None:
    with Lab(tmp_path) as lab:
        CheckpointDirectory(lab.checkpoints).write_done({"run_id": "run-0", "step": 7})
        lab.start("node-0")
        lab.stepping(1, world=1)
        lab.tell("finish")
        assert lab.end("node-0") == 0
        assert not list((tmp_path / "node-0" / "tmp").glob("*")), "nothing temporary is left"


def test_an_agent_that_waits_for_others_gives_up_in_time_or_when_asked_to(tmp_path: Path) -> None:
    with Lab(tmp_path, nodes={"min": 2, "max": 2}, rendezvousTimeoutSeconds=3) as lab:
        lab.start("node-0")
        assert lab.end("node-0") == 201
        assert lab.record("node-0")["cause"] == "rendezvous"

    with Lab(tmp_path / "asked", nodes={"min": 2, "max": 2}) as lab:
        lab.start("node-0")
        lab.wait(lambda: lab.events("node-0", "rendezvous-started"), "the wait for others")
        lab.agents["node-0"].terminate()
        assert lab.end("node-0") == 200


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group that may have 1200 MB: its folder."""
    groups = Path("/sys/fs/cgroup")
    old = (groups / "memory").is_dir()
    folder = groups / ("memory" if old else "") / f"kdist-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if old else "memory.max")).write_text("1200M")
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield folder
    folder.rmdir()


@pytest.mark.sampled
def test_a_rank_killed_for_want_of_memory_ends_the_job_with_72(
    tmp_path: Path, memory_group: Path
) -> None:
    with Lab(tmp_path, entrypoint="devour") as lab:
        lab.start("node-0")
        (memory_group / "cgroup.procs").write_text(str(lab.agents["node-0"].pid))
        assert lab.end("node-0") == 72
        assert lab.record("node-0")["cause"] == "oom_host"
        lab.wait(
            lambda: not (memory_group / "cgroup.procs").read_text(),
            "the end of all processes of the agent",
        )


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A control group whose processes can be frozen, so that not even SIGKILL ends them: its
    folder.
    """
    folder = Path(f"/sys/fs/cgroup/freezer/kdist-test-{os.getpid()}")
    try:
        folder.mkdir()
        (folder / "freezer.state").write_text("THAWED")
    except OSError as error:
        pytest.skip(f"no control group that freezes beyond SIGKILL can be made here: {error}")
    yield folder
    (folder / "freezer.state").write_text("THAWED")
    assert soon(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


@pytest.mark.chaos
@pytest.mark.wide
def test_an_agent_whose_rank_does_not_die_forms_no_group_next_to_it_and_says_so(
    tmp_path: Path, freezer: Path
) -> None:
    with Lab(tmp_path, hangTimeoutSeconds=2) as lab:
        lab.start("node-0")
        (rank,) = lab.stepping(1, world=1).values()
        (freezer / "cgroup.procs").write_text(str(rank["pid"]))
        (freezer / "freezer.state").write_text("FROZEN")
        assert lab.end("node-0") == 202
        record = lab.record("node-0")
        assert (record["cause"], record["rank"]) == ("hang", 0)
        assert "was killed and does not exit" in record["message"]
        assert [one["generation"] for one in lab.ledger("generation")] == [1]


def test_an_error_of_the_agents_own_that_nobody_foresaw_has_the_code_for_the_unknown(
    tmp_path: Path,
) -> None:
    with Lab(tmp_path, script={"path": "train.py"}) as lab:
        lab.arguments = ["--code", str(tmp_path / "nowhere")]
        lab.start("node-0")
        assert lab.end("node-0") == Exit.UNKNOWN
        record = lab.record("node-0")
    assert record["cause"] == "unknown"
    assert record["message"].startswith("the agent failed: FileNotFoundError: ")
