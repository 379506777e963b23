"""What agents tell each other: documents that any number of them may change at once, and one
result.
"""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from kdist_trainer.agent.coordination import NOTHING_KEPT, AgentStore, failures_of
from kdist_trainer.agent.exits import failed, root_cause, stopped, success, write_record
from kdist_trainer.agent.settings import Settings
from kdist_trainer.config import Cause, Exit, Nodes, Script, TrainConfig
from kdist_trainer.formats import stamp
from kdist_trainer.ipc.failure import Failure
from kdist_trainer.rendezvous.stores import FileStore


def failure(
    time: float, *, primary: bool = True, cause: Cause = Cause.SIGNAL, code: Exit = Exit.PEERS_LOST
) -> Failure:
    return Failure(cause, code, primary, cause.value, time=time)


def test_agents_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    def post(node: str) -> None:
        agent_store = AgentStore(FileStore(tmp_path), run_id="run", node=node)
        for moment in range(10):
            agent_store.post_failures(1, [failure(moment)])
        agent_store.mark_finished(1)

    threads = [threading.Thread(target=post, args=(f"node-{index}",)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    document = AgentStore(FileStore(tmp_path), run_id="run", node="late").generation(1)
    assert len(failures_of(document)) == 40
    assert sorted(document["finished"]) == [f"node-{index}" for index in range(4)]


def test_what_hundreds_of_ranks_leave_behind_fits_into_one_document() -> None:
    store, lines = HashStore(), ("x" * 500,) * 40
    for node in range(64):
        echoes = [
            replace(failure(node + rank, primary=False), traceback=lines) for rank in range(8)
        ]
        AgentStore(store, run_id="run", node=f"node-{node}").post_failures(1, echoes)
    agent_store = AgentStore(store, run_id="run", node="node-0")
    agent_store.post_failures(
        1, [replace(failure(100 + rank), traceback=lines) for rank in range(8)]
    )
    kept = failures_of(agent_store.generation(1))
    assert len(str(agent_store.generation(1))) < 400_000
    assert (first := root_cause(kept)) is not None
    assert (first.time, first.traceback) == (100, lines)


def test_failures_are_posted_together_with_the_newest_step_that_is_kept() -> None:
    store = HashStore()
    for node, step in (("node-0", 17), ("node-1", 16), ("node-2", NOTHING_KEPT)):
        agent_store = AgentStore(store, run_id="run", node=node)
        agent_store.post_failures(1, [failure(1.0)], kept_step=step)
    agent_store.post_failures(2, [failure(1.0)])
    assert agent_store.generation(1)["kept_step"] == 17
    assert len(failures_of(agent_store.generation(1))) == 3
    assert "kept_step" not in agent_store.generation(2)


def test_the_first_result_stands_for_all_and_for_this_run_only() -> None:
    store = HashStore()
    first, second = (AgentStore(store, run_id="run", node=node) for node in ("node-0", "node-1"))
    assert first.run_result() == {}
    assert first.commit_result({"code": 70}) == {"code": 70}
    assert second.commit_result({"code": 65}) == {"code": 70}
    assert second.run_result() == {"code": 70}
    assert AgentStore(store, run_id="another", node="node-0").run_result() == {}


def test_a_generation_that_other_agents_have_begun_cannot_be_begun_again() -> None:
    store = HashStore()
    first, second = (AgentStore(store, run_id="r", node=node) for node in ("a", "b"))
    first.open_generation(1, {"a": "1"})
    first.open_generation(1, {"a": "1"})
    with pytest.raises(RuntimeError, match="begun by other agents"):
        second.open_generation(1, {"b": "2"})
    assert first.generation(1)["agents"] == {"a": "1"}


def test_the_first_reason_of_a_plan_stands() -> None:
    agent_store = AgentStore(HashStore(), run_id="run", node="node-0")
    agent_store.plan_stop(1, "join")
    agent_store.plan_stop(1, "stop")
    assert agent_store.generation(1)["planned_stop"] == "join"
    assert agent_store.generation(2) == {}


def test_the_first_primary_failure_decides_and_without_one_a_timeout_before_a_lost_peer() -> None:
    echo = failure(1.0, primary=False, cause=Cause.NODE_LOST)
    late_echo = failure(4.0, primary=False, cause=Cause.COLLECTIVE_TIMEOUT, code=Exit.HANG)
    user = failure(2.0, cause=Cause.USER_CODE, code=Exit.USER)
    assert root_cause([failure(3.0), echo, user, late_echo]) == user
    assert root_cause([echo, late_echo]) == late_echo
    assert root_cause([echo]) == echo
    assert root_cause([]) is None


def test_only_a_primary_failure_below_128_is_permanent() -> None:
    assert failure(0, cause=Cause.USER_CODE, code=Exit.USER).permanent
    assert not failure(0, cause=Cause.USER_CODE, code=Exit.USER, primary=False).permanent
    assert not failure(0, cause=Cause.SIGNAL).permanent


def test_records_reach_scratch_and_the_termination_message_which_takes_4_kib(
    tmp_path: Path,
) -> None:
    message = tmp_path / "termination-log"
    lines = tuple(f"line {number} {'ü' * 100}" for number in range(100))
    record = failed(Failure(Cause.USER_CODE, Exit.USER, True, "ValueError: odd", traceback=lines))
    write_record(record, tmp_path, message)
    assert len(message.read_bytes()) <= 4096
    short = json.loads(message.read_bytes())
    assert short["traceback"][-1] == lines[-1]
    assert lines[0] not in short["traceback"]
    record = stamp("exit.json", record)
    assert {**short, "traceback": None} == {**record, "traceback": None}
    assert json.loads((tmp_path / "exit.json").read_text()) == {**record, "traceback": list(lines)}


@pytest.mark.parametrize(
    "text", ["x" * 100_000, "\U0001f525" * 100_000, '"\\' * 100_000, "\ud800" * 9000]
)
def test_a_termination_message_is_whole_json_whatever_the_record_holds(
    tmp_path: Path, text: str
) -> None:
    record = failed(
        Failure(
            Cause.USER_CODE,
            Exit.USER,
            True,
            text,
            node=text,
            collective=text,
            traceback=(text,) * 50,
        )
    )
    write_record(record, tmp_path, tmp_path / "message")
    short = json.loads((tmp_path / "message").read_bytes())
    assert len((tmp_path / "message").read_bytes()) <= 4096
    assert short["code"] == 70
    assert json.loads((tmp_path / "exit.json").read_bytes())["code"] == 70


def test_ranks_are_reported_to_take_the_checkpoints_over_only_if_somebody_said_so(
    tmp_path: Path,
) -> None:
    config = TrainConfig(name="job", nodes=Nodes(min=1, max=1), script=Script(path="train.py"))
    path = tmp_path / "train.json"
    plain = Settings(
        config_path=path,
        config=config,
        run_id="run",
        node="node-0",
        scratch=tmp_path,
        rendezvous="file:/store",
    )
    assert "KDIST_TAKE_OVER" not in plain.environment()
    assert replace(plain, take_over=True).environment()["KDIST_TAKE_OVER"] == "1"


def test_every_record_has_a_code_of_the_table() -> None:
    for record in (success(step=3), stopped("asked", step=None), failed(failure(0))):
        assert Exit(record["code"]) == record["code"]


def test_a_record_that_cannot_be_written_raises_nothing(tmp_path: Path) -> None:
    write_record(success(step=None), tmp_path / "gone", tmp_path / "message")
    assert json.loads((tmp_path / "message").read_bytes())["outcome"] == "done"
    write_record(success(step=None), tmp_path / "gone", tmp_path / "gone" / "message")
